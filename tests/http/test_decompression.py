"""Content codings: any chunking gives the same bytes, and no piece is larger than a step."""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedapi_client.http.decompression import (
    STEP,
    CodingError,
    Decompressor,
    UnsupportedCodingError,
)

ENCODERS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "": bytes,
}
BOMB = 64 * 1024 * 1024


def inflate(coding: str, chunks: Iterable[bytes]) -> bytes:
    body = Decompressor(coding)
    inflated = b"".join(piece for chunk in chunks for piece in body.feed(chunk))
    body.finish()
    return inflated


@pytest.mark.parametrize("coding", ENCODERS)
@given(data=st.binary(max_size=5000), cuts=st.lists(st.integers(0, 6000), max_size=8))
def test_any_chunking_gives_the_same_bytes(coding: str, data: bytes, cuts: list[int]) -> None:
    encoded = ENCODERS[coding](data * 20)
    places = [0, *sorted(cuts), len(encoded)]
    chunks = [encoded[a:b] for a, b in itertools.pairwise(places)]
    assert inflate(coding, chunks) == data * 20


@given(parts=st.lists(st.binary(max_size=200), min_size=1, max_size=4), size=st.integers(1, 50))
def test_members_follow_each_other(parts: list[bytes], size: int) -> None:
    encoded = b"".join(map(gzip.compress, parts))
    chunks = [encoded[at : at + size] for at in range(0, len(encoded), size)]
    assert inflate("gzip", chunks) == b"".join(parts)


def test_zeros_may_pad_a_gzip_body() -> None:
    assert inflate("gzip", [gzip.compress(b"a") + b"\0\0", b"\0"]) == b"a"


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_r16_a_bomb_comes_in_steps(coding: str) -> None:
    body = Decompressor(coding)
    sizes = [len(piece) for piece in body.feed(ENCODERS[coding](bytes(BOMB)))]
    body.finish()
    assert sum(sizes) == BOMB
    assert max(sizes) <= STEP


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_a_body_that_ends_early_is_incomplete(coding: str) -> None:
    encoded = ENCODERS[coding](bytes(range(256)) * 20)
    for end in (1, len(encoded) // 2, len(encoded) - 1):
        with pytest.raises(CodingError):
            inflate(coding, [encoded[:end]])


@pytest.mark.parametrize("coding", ENCODERS)
def test_no_bytes_are_an_empty_body(coding: str) -> None:
    assert inflate(coding, []) == b""


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_other_bytes_are_damage(coding: str) -> None:
    with pytest.raises(CodingError, match="damaged"):
        inflate(coding, [b"no such thing" * 100])


@pytest.mark.parametrize(
    "coding", ["gzip, gzip", "gzip,identity,deflate", "br", "zstd", "GZIP, br", "rot13"]
)
def test_r16_one_coding_that_was_asked_for_is_undone(coding: str) -> None:
    with pytest.raises(UnsupportedCodingError):
        Decompressor(coding)
