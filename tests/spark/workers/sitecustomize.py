"""Python runs this when it starts: what Spark's processes of the tests leave out.

httpx imports click and rich where they are installed, and httpcore trio. A cluster has none of
them; here they are for development. A streaming query's process starts with 0.5 instead of 0.7 s of
processor time without them, and the tests start some 90 of these alone.
"""

import sys

if any(argument.startswith("pyspark.") for argument in sys.orig_argv):
    sys.modules.update(dict.fromkeys(("click", "trio")))
