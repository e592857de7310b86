"""``python -m feedapi_client.spark.ingest``."""

import sys

from feedapi_client.spark.ingest.ingest_command import main

if __name__ == "__main__":
    sys.exit(main())
