"""Run the command line with ``python -m feedapi_client.cli``."""

from feedapi_client.cli import main

main()
