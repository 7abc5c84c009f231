"""Digests of compiled code are those of the standard library."""

from hashlib import blake2b as expected

import numba
import numpy as np
import pytest

from disco_hlo.profiler.blake2b import blake2b, eight_blake2b

DIGEST = 12
ROOM = 1024


@numba.njit
def one(text, size, out):
    blake2b(text, size, DIGEST, out)


@numba.njit
def eight(texts, sizes, out):
    eight_blake2b(texts, sizes, DIGEST, out)


def digests_of(texts: list[bytes]) -> list[bytes]:
    columns = np.zeros((ROOM, 8), np.uint64)
    for k, text in enumerate(texts):
        columns[:, k] = np.frombuffer(text + bytes(8 * ROOM - len(text)), "<u8")
    out = np.zeros((8, 2), np.uint64)
    eight(columns, np.array([*map(len, texts)]), out)
    return [row.astype("<u8").tobytes()[:DIGEST] for row in out]


@pytest.mark.parametrize(
    "sizes", [(0, 1, 127, 128, 129, 255, 256, 257), (8000,) * 8, (1, 1, 1, 1, 1, 1, 1, 8191)]
)
def test_eight_at_once_are_eight_one_by_one(sizes: tuple[int, ...]) -> None:
    texts = [np.random.default_rng(k).bytes(size) for k, size in enumerate(sizes)]
    assert digests_of(texts) == [expected(text, digest_size=DIGEST).digest() for text in texts]


@pytest.mark.parametrize("size", [0, 1, 8, 127, 128, 129, 4000])
def test_one_is_as_the_standard_says(size: int) -> None:
    text = np.random.default_rng(size).bytes(size)
    out = np.zeros(2, np.uint64)
    one(np.frombuffer(text + bytes(8 * ROOM - size), "<u8").astype(np.uint64), size, out)
    assert out.astype("<u8").tobytes()[:DIGEST] == expected(text, digest_size=DIGEST).digest()
