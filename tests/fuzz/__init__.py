"""Fuzzing with coverage guidance of everything that reads foreign bytes.

::

    pip install atheris
    python -m tests.fuzz decoder --runs 1000000

`targets.py` says what must hold for any input. `corpus/TARGET/` keeps a small set of inputs, which
`test_corpus.py` replays without atheris. An input that fails belongs there too, once it is mended.
"""
