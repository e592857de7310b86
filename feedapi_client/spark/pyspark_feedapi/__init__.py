"""Found by PySpark itself: it imports every top-level module named ``pyspark_*`` and registers the `DefaultSource` in it.

An import that raised would switch that look-up off for every package, so nothing may escape here: without the extra ``spark`` there is just no source.
"""

try:
    from feedapi_client.spark import FeedDataSource as DefaultSource
except Exception:  # noqa: BLE001
    __all__ = []
else:
    __all__ = ["DefaultSource"]
