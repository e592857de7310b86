"""List the runs in a staging location, and delete those that no query needs::

python -m feedapi_client.spark.staging LOCATION
python -m feedapi_client.spark.staging LOCATION --older-than 30 --delete
python -m feedapi_client.spark.staging LOCATION --offsets RUN
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

from feedapi_client.spark.source_options import OptionError
from feedapi_client.spark.staging.runs import delete_runs, is_older, read_offsets, staged_runs
from feedapi_client.spark.staging.staging_errors import StagingError


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
    parser.add_argument(
        "--offsets",
        metavar="RUN",
        help="print the cursors of a run as JSON, one line for each feed: option startingCursors "
        "of a new query takes them",
    )
    given = parser.parse_args(arguments)
    if given.delete and not given.older_than:
        parser.error("--delete needs --older-than DAYS")
    try:
        if given.offsets:
            for offsets in read_offsets(given.location, given.offsets):
                sys.stdout.write(f"{json.dumps(asdict(offsets))}\n")
            return 0
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
