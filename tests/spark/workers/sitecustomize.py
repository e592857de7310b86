"""Python runs this when it starts: what Spark's processes of the tests leave out.

httpx imports click and rich where they are installed, and httpcore trio. A cluster has none of
them; here they are for development. Spark puts an archive of PySpark before the installed one, and
Python compiles what it imports from an archive in each process anew. Without both, the process of a
streaming query takes 0.8 instead of 1.6 s of processor time, and the tests start some 250 of these
alone. What the workers of a daemon import is imported before it forks them.
"""

import sys

if any(argument.startswith("pyspark.") for argument in sys.orig_argv):
    sys.modules.update(dict.fromkeys(("click", "trio")))
    sys.path[:] = [path for path in sys.path if not path.endswith("pyspark.zip")]
if "pyspark.daemon" in sys.orig_argv:
    # Nothing that starts threads, as numpy and pyarrow do.
    import pyspark.worker  # noqa: F401

    import feedapi_client.client  # noqa: F401
