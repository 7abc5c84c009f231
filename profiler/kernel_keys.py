"""Cost keys of many fused kernels at once: :func:`~disco_hlo.profiler.keys.group_key` in compiled code.

A search asks whether anybody measured a kernel for thousands of kernels a second. The key is a BLAKE2b
digest (RFC 7693) of a text; both are made here byte for byte as there, from the texts of the graph's nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.graph import Graph, is_cloned

KEY_BYTES = 12
"""Length of the digest in a kernel's key."""

_INITIAL = np.array(
    [0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1,
     0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179], np.uint64,
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
     [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0]], np.int64,
)  # fmt: skip
_ROUNDS, _BLOCK = 12, 128
_MIXED = np.array(
    [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
     [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14]], np.int64,
)  # fmt: skip
_LINE_END, _SPACE, _ZERO = 10, 32, 48
_STATE_ROWS = 3


class KeyTexts(NamedTuple):
    """What the keys of a graph's kernels are made of."""

    operand_at: NDArray[np.int64]
    operand: NDArray[np.int64]
    text_at: NDArray[np.int64]
    """``[2 * nodes + 1]``: the text of node x as a member, at 2 x, and as what a kernel reads, at 2 x + 1."""
    text: NDArray[np.uint8]
    row: NDArray[np.int64]
    """``[3, nodes]``, working space: the stamp of the last kernel that a node was a member of, or numbered in,
    and its number."""
    stack: NDArray[np.int64]
    stamp: NDArray[np.int64]


def key_texts(graph: Graph) -> KeyTexts:
    """Texts and operands of all nodes."""
    texts: list[bytes] = []
    for node in graph.nodes:
        member = f"{node.key} ".encode()
        texts += [member, member if is_cloned(node) else f"read {node.shape} {node.shape.layout}".encode()]
    operands = [operand for node in graph.nodes for operand in node.operands]
    return KeyTexts(
        _offsets([node.operands for node in graph.nodes]),
        np.array(operands, np.int64),
        _offsets(texts),
        np.frombuffer(b"".join(texts), np.uint8),
        np.zeros((_STATE_ROWS, len(graph)), np.int64),
        np.zeros(2 * (len(operands) + len(graph)) + 64, np.int64),
        np.zeros(1, np.int64),
    )


def _offsets(lists: Sequence[Sequence[object]]) -> NDArray[np.int64]:
    return np.cumsum([0, *map(len, lists)], dtype=np.int64)


def kernel_keys(
    texts: KeyTexts,
    member_at: NDArray[np.int64],
    members: NDArray[np.int64],
    result_at: NDArray[np.int64],
    results: NDArray[np.int64],
) -> list[str]:
    """The digest in the key of each kernel, in hexadecimal (kernels as in ``simulator.costs.KernelCosts``)."""
    found: str = _digests(texts, member_at, members, result_at, results).tobytes().hex()
    return [found[at : at + 2 * KEY_BYTES] for at in range(0, len(found), 2 * KEY_BYTES)]


@compiled
def _digests(texts: Any, member_at: Any, members: Any, result_at: Any, results: Any) -> Any:
    count = member_at.size - 1
    found = np.empty((count, KEY_BYTES), np.uint8)
    room = np.empty(1 << 12, np.uint8)
    for i in range(count):
        inside = members[member_at[i] : member_at[i + 1]]
        wanted = _room_for(texts, inside) + 24 * (result_at[i + 1] - result_at[i])
        if wanted > room.size:
            room = np.empty(2 * wanted, np.uint8)
        size = _write(texts, inside, results[result_at[i] : result_at[i + 1]], room)
        found[i] = _blake2b(room, size)
    return found


@inner
def _room_for(texts: Any, members: Any) -> Any:
    """Most bytes that the text of a kernel can have, and that a block more takes."""
    size = 2 * _BLOCK
    for x in members:
        size += texts.text_at[2 * x + 1] - texts.text_at[2 * x] + 1
        for e in range(texts.operand_at[x], texts.operand_at[x + 1]):
            operand = texts.operand[e]
            size += texts.text_at[2 * operand + 2] - texts.text_at[2 * operand + 1] + 24
    return size


@inner
def _write(texts: Any, members: Any, results: Any, out: Any) -> Any:
    """The text of a kernel: a line for each node, in post-order from the results; its length."""
    texts.stamp[0] += 1
    stamp = texts.stamp[0]
    member, numbered, number = texts.row[0], texts.row[1], texts.row[2]
    for x in members:
        member[x] = stamp
    depth, known, size = 0, 0, 1
    out[0] = _LINE_END
    for i in range(results.size - 1, -1, -1):
        texts.stack[depth] = results[i]
        depth += 1
    while depth:
        depth -= 1
        entry = texts.stack[depth]
        x = entry if entry >= 0 else ~entry
        if numbered[x] == stamp:
            continue
        if entry >= 0 and member[x] == stamp:
            texts.stack[depth] = ~x
            depth += 1
            for e in range(texts.operand_at[x + 1] - 1, texts.operand_at[x] - 1, -1):
                texts.stack[depth] = texts.operand[e]
                depth += 1
            continue
        numbered[x], number[x] = stamp, known
        known += 1
        kind = 2 * x + (member[x] != stamp)
        for at in range(texts.text_at[kind], texts.text_at[kind + 1]):
            out[size] = texts.text[at]
            size += 1
        if member[x] == stamp:
            first = texts.operand_at[x]
            for e in range(first, texts.operand_at[x + 1]):
                size = _write_number(number[texts.operand[e]], e > first, out, size)
        out[size] = _LINE_END
        size += 1
    for i in range(results.size):
        size = _write_number(number[results[i]], i > 0, out, size)
    return size


@inner
def _write_number(value: Any, spaced: Any, out: Any, size: Any) -> Any:
    if spaced:
        out[size] = _SPACE
        size += 1
    digits, rest = 1, value // 10
    while rest:
        digits += 1
        rest //= 10
    for k in range(digits - 1, -1, -1):
        out[size + k] = _ZERO + value % 10
        value //= 10
    return size + digits


@inner
def _blake2b(text: Any, size: Any) -> Any:
    """Digest of ``text[:size]``; what stands behind is overwritten."""
    hashed = _INITIAL.copy()
    hashed[0] ^= np.uint64(0x01010000 ^ KEY_BYTES)
    blocks = max(1, (size + _BLOCK - 1) // _BLOCK)
    for k in range(size, blocks * _BLOCK):
        text[k] = 0
    words, v = np.empty(16, np.uint64), np.empty(16, np.uint64)
    for block in range(blocks):
        last = block == blocks - 1
        for k in range(16):
            word = np.uint64(0)
            for byte in range(8):
                word |= np.uint64(text[block * _BLOCK + 8 * k + byte]) << np.uint64(8 * byte)
            words[k] = word
        for k in range(8):
            v[k], v[k + 8] = hashed[k], _INITIAL[k]
        v[12] ^= np.uint64(size if last else (block + 1) * _BLOCK)
        if last:
            v[14] = ~v[14]
        for turn in range(_ROUNDS):
            for k in range(8):
                x, y = words[_SIGMA[turn % 10, 2 * k]], words[_SIGMA[turn % 10, 2 * k + 1]]
                _mix(v, _MIXED[k, 0], _MIXED[k, 1], _MIXED[k, 2], _MIXED[k, 3], x, y)
        for k in range(8):
            hashed[k] ^= v[k] ^ v[k + 8]
    return hashed.view(np.uint8)[:KEY_BYTES]


@inner
def _mix(v: Any, a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> None:
    v[a] = v[a] + v[b] + x
    v[d] = _turned(v[d] ^ v[a], np.uint64(32))
    v[c] = v[c] + v[d]
    v[b] = _turned(v[b] ^ v[c], np.uint64(24))
    v[a] = v[a] + v[b] + y
    v[d] = _turned(v[d] ^ v[a], np.uint64(16))
    v[c] = v[c] + v[d]
    v[b] = _turned(v[b] ^ v[c], np.uint64(63))


@inner
def _turned(word: Any, bits: Any) -> Any:
    return (word >> bits) | (word << (np.uint64(64) - bits))
