"""List the runs in a staging location, and delete those that no query needs::

python -m feedapi_client.spark.staging LOCATION
python -m feedapi_client.spark.staging LOCATION --older-than 30 --delete
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta

from feedapi_client.spark.options import OptionError
from feedapi_client.spark.staging.errors import StagingError
from feedapi_client.spark.staging.runs import delete_runs, is_older, staged_runs


def main(arguments: Sequence[str] | None = None) -> int:
    """List or delete runs. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m feedapi_client.spark.staging",
        description="List the runs of a staging location, and delete those that are not used.",
    )
    parser.add_argument("location", help="s3://, gs://, az://, file:// or a path")
    parser.add_argument(
        "--older-than",
        type=float,
        metavar="DAYS",
        default=0.0,
        help="only runs that were not used for so long; longer than any query ever pauses",
    )
    parser.add_argument(
        "--delete",
        action="store_true",
        help="delete them: a query whose run is gone can't start again from its checkpoint",
    )
    given = parser.parse_args(arguments)
    if given.delete and not given.older_than:
        parser.error("--delete needs --older-than DAYS")
    try:
        runs = staged_runs(given.location)
        old = [run for run in runs if is_older(run, timedelta(days=given.older_than))]
        for run in old:
            sys.stdout.write(f"{run}\n")
        if given.delete:
            count = delete_runs(given.location, old)
            sys.stdout.write(f"deleted {count} objects of {len(old)} runs\n")
    except (StagingError, OptionError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
