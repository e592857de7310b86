"""``python -m tests.fuzz TARGET --runs N``: fuzz one target with atheris (libFuzzer).

Starts from ``tests/fuzz/corpus/TARGET`` and keeps what it finds in ``build/fuzz/TARGET``. The last
line says how many inputs were run. An input that breaks a promise is written to
``build/fuzz/TARGET.crash-*``, and the exit code is not 0.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

try:
    import atheris
except ImportError:
    sys.exit("fuzzing needs atheris: pip install atheris")

# Only modules that are imported in here count for the coverage.
with atheris.instrument_imports(include=["feedapi_client", "tests.fuzz.targets"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
DICTIONARY = Path(__file__).parent / "words.dict"
FOUND = Path("build", "fuzz")
_MAX_INPUT = 2048


def main() -> None:
    """Parse the command line and fuzz. Does not return: libFuzzer ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, default=100_000, help="inputs to run; -1: no end")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    chosen = parser.parse_args()
    found = FOUND / chosen.target
    found.mkdir(parents=True, exist_ok=True)
    options = [
        f"-runs={chosen.runs}",
        f"-seed={chosen.seed}",
        f"-max_len={_MAX_INPUT}",
        f"-artifact_prefix={found}.",
        f"-dict={DICTIONARY}",
        "-print_final_stats=1",
        str(found),
        str(CORPUS / chosen.target),
    ]
    atheris.Setup([sys.argv[0], *options], TARGETS[chosen.target])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
