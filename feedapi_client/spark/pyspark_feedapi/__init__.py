"""Lets PySpark find the format by itself.

PySpark imports every top-level module named ``pyspark_*`` and registers its `DefaultSource`. An
import that raised would turn this off for every package. Nothing may therefore escape here:
without the extra ``spark`` there is no source.
"""

try:
    from feedapi_client.spark import FeedDataSource as DefaultSource
except Exception:  # noqa: BLE001
    __all__ = []
else:
    __all__ = ["DefaultSource"]
