"""Replay the kept inputs of the fuzz targets, without a fuzzer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"


@pytest.mark.parametrize("target", TARGETS)
def test_r21_the_kept_inputs_of_a_fuzz_target_break_no_promise(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())
    assert inputs
    for path in inputs:
        TARGETS[target](path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_short_inputs_break_no_promise(target: str) -> None:
    TARGETS[target](b"")
    for first in range(256):
        TARGETS[target](bytes([first]))
        TARGETS[target](bytes([first, 0, 0, first]))


def test_the_corpus_has_no_inputs_of_unknown_targets() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
