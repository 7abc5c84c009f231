"""BLAKE2b (RFC 7693) in compiled code, for short digests of many texts."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from disco_hlo.compiled import inner
from disco_hlo.profiler.words import SIDE_BY_SIDE, either, load, plus, spread, store, turned

BLOCK_WORDS: Final = 16
"""Words of 8 bytes in a block."""
_BLOCK_BYTES: Final = 128
_INITIAL: Final = (
    np.uint64(0x6A09E667F3BCC908), np.uint64(0xBB67AE8584CAA73B), np.uint64(0x3C6EF372FE94F82B),
    np.uint64(0xA54FF53A5F1D36F1), np.uint64(0x510E527FADE682D1), np.uint64(0x9B05688C2B3E6C1F),
    np.uint64(0x1F83D9ABFB41BD6B), np.uint64(0x5BE0CD19137E2179),
)  # fmt: skip
_SIGMA = np.array(
    [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
     [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
     [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
     [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
     [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
     [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
     [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
     [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
     [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
     [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
     [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
     [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3]], np.uint8,
)  # fmt: skip


@inner
def blake2b(text: Any, size: Any, digest_bytes: Any, out: Any) -> None:
    """The digest of the first ``size`` bytes of ``text`` into the words of ``out``, of which 2 are written:
    ``digest_bytes`` (at most 16) bytes of these are the digest.

    ``text`` is words of 8 bytes, zero from byte ``size`` to the end of its block.
    """
    i0, i1, i2, i3, i4, i5, i6, i7 = _INITIAL
    h0, h1, h2, h3, h4, h5, h6, h7 = _INITIAL
    h0 ^= np.uint64(0x01010000 ^ digest_bytes)
    blocks = max(1, (size + _BLOCK_BYTES - 1) // _BLOCK_BYTES)
    for block in range(blocks):
        last = block == blocks - 1
        hashed = np.uint64(size if last else (block + 1) * _BLOCK_BYTES)
        v = (h0, h1, h2, h3, h4, h5, h6, h7, i0, i1, i2, i3, i4 ^ hashed, i5, ~i6 if last else i6, i7)
        m = text[BLOCK_WORDS * block : BLOCK_WORDS * (block + 1)]
        for turn in range(_SIGMA.shape[0]):
            s = _SIGMA[turn]
            v = _turn(
                v, m[s[0]], m[s[1]], m[s[2]], m[s[3]], m[s[4]], m[s[5]], m[s[6]], m[s[7]],
                m[s[8]], m[s[9]], m[s[10]], m[s[11]], m[s[12]], m[s[13]], m[s[14]], m[s[15]],
            )  # fmt: skip
        h0, h1, h2, h3 = h0 ^ v[0] ^ v[8], h1 ^ v[1] ^ v[9], h2 ^ v[2] ^ v[10], h3 ^ v[3] ^ v[11]
        h4, h5, h6, h7 = h4 ^ v[4] ^ v[12], h5 ^ v[5] ^ v[13], h6 ^ v[6] ^ v[14], h7 ^ v[7] ^ v[15]
    out[0], out[1] = h0, h1


@inner
def eight_blake2b(texts: Any, sizes: Any, digest_bytes: Any, out: Any) -> None:
    """The digests of eight texts at once, in hardly more time than the longest takes: into ``out`` [8, 2].

    Word w of text k is ``texts[w, k]``, and of ``sizes`` [8] bytes; zero from there to the end of its block.
    """
    i0, i1, i2, i3, i4, i5, i6, i7 = _INITIAL
    h0, h1, h2, h3 = spread(i0 ^ np.uint64(0x01010000 ^ digest_bytes)), spread(i1), spread(i2), spread(i3)
    h4, h5, h6, h7 = spread(i4), spread(i5), spread(i6), spread(i7)
    hashed, ends = np.empty(SIDE_BY_SIDE, np.uint64), np.empty(SIDE_BY_SIDE, np.uint64)
    found = np.empty((2, SIDE_BY_SIDE), np.uint64)
    blocks = max(1, (sizes.max() + _BLOCK_BYTES - 1) // _BLOCK_BYTES)
    for block in range(blocks):
        any_ends = False
        for k in range(SIDE_BY_SIDE):
            last = block == max(1, (sizes[k] + _BLOCK_BYTES - 1) // _BLOCK_BYTES) - 1
            any_ends = any_ends or last
            hashed[k] = sizes[k] if last else (block + 1) * _BLOCK_BYTES
            ends[k] = ~np.uint64(0) if last else np.uint64(0)
        v = (
            h0, h1, h2, h3, h4, h5, h6, h7, spread(i0), spread(i1), spread(i2), spread(i3),
            either(spread(i4), load(hashed, 0)), spread(i5), either(spread(i6), load(ends, 0)), spread(i7),
        )  # fmt: skip
        first = block * BLOCK_WORDS
        for turn in range(_SIGMA.shape[0]):
            s = _SIGMA[turn]
            v = _turn(
                v, _word(texts, first + s[0]), _word(texts, first + s[1]), _word(texts, first + s[2]),
                _word(texts, first + s[3]), _word(texts, first + s[4]), _word(texts, first + s[5]),
                _word(texts, first + s[6]), _word(texts, first + s[7]), _word(texts, first + s[8]),
                _word(texts, first + s[9]), _word(texts, first + s[10]), _word(texts, first + s[11]),
                _word(texts, first + s[12]), _word(texts, first + s[13]), _word(texts, first + s[14]),
                _word(texts, first + s[15]),
            )  # fmt: skip
        h0, h1 = either(h0, either(v[0], v[8])), either(h1, either(v[1], v[9]))
        h2, h3 = either(h2, either(v[2], v[10])), either(h3, either(v[3], v[11]))
        h4, h5 = either(h4, either(v[4], v[12])), either(h5, either(v[5], v[13]))
        h6, h7 = either(h6, either(v[6], v[14])), either(h7, either(v[7], v[15]))
        if any_ends:
            store(found, 0, h0)
            store(found, SIDE_BY_SIDE, h1)
            for k in range(SIDE_BY_SIDE):
                if ends[k]:
                    out[k, 0], out[k, 1] = found[0, k], found[1, k]


@inner
def _word(texts: Any, word: Any) -> Any:
    return load(texts, SIDE_BY_SIDE * np.int64(word))


@inner
def _turn(
    v: Any, m0: Any, m1: Any, m2: Any, m3: Any, m4: Any, m5: Any, m6: Any, m7: Any,
    m8: Any, m9: Any, m10: Any, m11: Any, m12: Any, m13: Any, m14: Any, m15: Any,
) -> Any:  # fmt: skip
    """One round. All words are names: compiled, they stay in registers."""
    v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15 = v
    v0, v4, v8, v12 = _mix(v0, v4, v8, v12, m0, m1)
    v1, v5, v9, v13 = _mix(v1, v5, v9, v13, m2, m3)
    v2, v6, v10, v14 = _mix(v2, v6, v10, v14, m4, m5)
    v3, v7, v11, v15 = _mix(v3, v7, v11, v15, m6, m7)
    v0, v5, v10, v15 = _mix(v0, v5, v10, v15, m8, m9)
    v1, v6, v11, v12 = _mix(v1, v6, v11, v12, m10, m11)
    v2, v7, v8, v13 = _mix(v2, v7, v8, v13, m12, m13)
    v3, v4, v9, v14 = _mix(v3, v4, v9, v14, m14, m15)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12, v13, v14, v15


@inner
def _mix(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
    a = plus(plus(a, b), x)
    d = turned(either(d, a), np.uint64(32))
    c = plus(c, d)
    b = turned(either(b, c), np.uint64(24))
    a = plus(plus(a, b), y)
    d = turned(either(d, a), np.uint64(16))
    c = plus(c, d)
    b = turned(either(b, c), np.uint64(63))
    return a, b, c, d
