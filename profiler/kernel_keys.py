"""Cost keys of many fused kernels at once: :func:`~disco_hlo.profiler.keys.group_key` in compiled code.

A search asks whether anybody measured a kernel for thousands of kernels a second. The key is a BLAKE2b
digest of a text, made here byte for byte as there, from the texts of the graph's nodes. A text is kept as
words of 8 bytes, the first byte lowest, and written a word at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.flat_graph import flat_graph, flat_shapes
from disco_hlo.hlo.graph import Graph
from disco_hlo.profiler.blake2b import BLOCK_WORDS, blake2b, eight_blake2b
from disco_hlo.profiler.words import SIDE_BY_SIDE

KEY_BYTES: Final = 12
"""Length of the digest in a kernel's key."""

_LINE_END, _SPACE = np.uint64(ord("\n")), np.uint64(ord(" "))
_WORD: Final = 8
_PADDING: Final = tuple(map(bytes, range(_WORD)))
_MOST_NUMBER: Final = 8
"""Most bytes of a number and what separates it from the next."""
_POWERS_OF_TEN: Final = 10 ** np.arange(1, _MOST_NUMBER)
_UNNUMBERED: Final = 1 << 31
_ROOM_WORDS: Final = 1 << 12
_FEW: Final = 2
"""So many texts are hashed one by one: eight at once take as long as two, or three where vectors are short."""


class KeyTexts(NamedTuple):
    """What the keys of a graph's kernels are made of."""

    operand_at: NDArray[np.int64]
    operand: NDArray[np.int64]
    line: NDArray[np.int64]
    """``[2 * nodes]``: the line of node x as a member, without the numbers of its operands, at 2 x, and as what a
    kernel reads at 2 x + 1."""
    text_at: NDArray[np.int64]
    """``[lines + 1]``: words of each line."""
    size: NDArray[np.int64]
    """``[lines]``: its bytes."""
    text: NDArray[np.uint64]
    digits: NDArray[np.uint64]
    """``[nodes]``: numbers as text."""
    digit_count: NDArray[np.int64]
    most_words: NDArray[np.int64]
    """``[nodes]``: most words that a member and what it reads add to a text."""
    seen: NDArray[np.int64]
    """``[nodes]``, working space: the stamp plus ``_UNNUMBERED`` for members of the kernel at hand, plus its
    number for what is numbered; less for everything else."""
    stack: NDArray[np.int64]
    stamp: NDArray[np.int64]
    room: NDArray[np.uint64]
    """``[words, SIDE_BY_SIDE]``, working space: a text in each column, if it is not longer."""


def key_texts(graph: Graph) -> KeyTexts:
    """Texts and operands of all nodes."""
    flat, shapes, count = flat_graph(graph), flat_shapes(graph), len(graph)
    keys = [graph.nodes[x].key for x in flat.example.tolist()]  # which tell shapes apart
    is_cloned = flat.is_cloned[flat.example]
    lines = [f"{key} " for key in keys]
    lines += [f"{keys[i]} \n" for i in np.flatnonzero(is_cloned).tolist()]
    lines += [f"read {shape} {shape.layout}\n" for shape in shapes.distinct]
    read = len(keys) + np.where(is_cloned, np.cumsum(is_cloned) - 1, np.sum(is_cloned) + shapes.of_key)
    encoded = [line.encode() for line in lines]
    text = b"".join([line + _PADDING[-len(line) % _WORD] for line in encoded])
    size = np.array([len(line) for line in encoded], np.int64)
    words = -(-size // _WORD)
    line = np.stack([flat.of_key, read[flat.of_key]], axis=1)
    own_words, read_words = words[line].T
    of_reads = _offsets((read_words + 1)[flat.operand])
    digits, digit_count = _digits(count)
    return KeyTexts(
        flat.operand_at,
        flat.operand,
        line.ravel(),
        _offsets(words),
        size,
        np.frombuffer(text, "<u8").astype(np.uint64),
        digits,
        digit_count,
        own_words + 1 + of_reads[flat.operand_at[1:]] - of_reads[flat.operand_at[:-1]],
        np.zeros(count, np.int64),
        np.zeros(2 * (flat.operand.size + count) + 64, np.int64),
        np.zeros(1, np.int64),
        np.empty((_ROOM_WORDS, SIDE_BY_SIDE), np.uint64),
    )


def _digits(count: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Numbers up to ``count`` as text, the first digit in the lowest byte, and how many digits each has."""
    rest = np.arange(count)
    digit_count = np.searchsorted(_POWERS_OF_TEN, rest, "right") + 1
    text = np.zeros(count, np.uint64)
    for place in range(int(digit_count.max(initial=0))):
        rest, digit = np.divmod(rest, 10)
        more = (text << np.uint64(8)) | (digit + ord("0")).astype(np.uint64)
        text = np.where(place < digit_count, more, text)
    return text, digit_count


def _offsets(lengths: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def kernel_keys(
    texts: KeyTexts,
    member_at: NDArray[np.int64],
    members: NDArray[np.int64],
    result_at: NDArray[np.int64],
    results: NDArray[np.int64],
) -> list[str]:
    """The digest in the key of each kernel, in hexadecimal (kernels as in ``hlo.kernel_times.KernelTimes``)."""
    words: NDArray[np.uint64] = _digests(texts, member_at, members, result_at, results)
    found = words.astype("<u8").view(np.uint8)[:, :KEY_BYTES].tobytes().hex()
    return [found[at : at + 2 * KEY_BYTES] for at in range(0, len(found), 2 * KEY_BYTES)]


@compiled
def _digests(texts: Any, member_at: Any, members: Any, result_at: Any, results: Any) -> Any:
    count = member_at.size - 1
    found = np.empty((count, 2), np.uint64)
    room, sizes = texts.room, np.zeros(SIDE_BY_SIDE, np.int64)
    text = np.empty(room.shape[0], np.uint64)  # one that is written in one piece is written in half the time
    eight = np.empty((SIDE_BY_SIDE, 2), np.uint64)
    for first in range(0, count, SIDE_BY_SIDE):
        together = min(SIDE_BY_SIDE, count - first)
        wanted = 0
        for i in range(first, first + together):
            wanted = max(wanted, _most_words(texts, member_at, members, result_at, i))
        if wanted > room.shape[0]:
            room = np.empty((2 * wanted, SIDE_BY_SIDE), np.uint64)
            text = np.empty(2 * wanted, np.uint64)
        sizes[:] = 0
        for k in range(together):
            i = first + k
            inside = members[member_at[i] : member_at[i + 1]]
            sizes[k] = _write(texts, inside, results[result_at[i] : result_at[i + 1]], text)
            end = sizes[k] // _WORD + BLOCK_WORDS
            text[sizes[k] // _WORD + 1 : end] = 0
            if together <= _FEW:
                blake2b(text, sizes[k], KEY_BYTES, found[i])
            else:
                room[:end, k] = text[:end]
        if together > _FEW:
            eight_blake2b(room, sizes, KEY_BYTES, eight)
            found[first : first + together] = eight[:together]
    return found


@inner
def _most_words(texts: Any, member_at: Any, members: Any, result_at: Any, i: Any) -> Any:
    """Room for the text of kernel ``i``."""
    wanted = 2 * BLOCK_WORDS + result_at[i + 1] - result_at[i]
    for x in members[member_at[i] : member_at[i + 1]]:
        wanted += texts.most_words[x]
    return wanted


@inner
def _write(texts: Any, members: Any, results: Any, out: Any) -> Any:
    """The text of a kernel: a line for each node, in post-order from the results; its length in bytes.

    The word that the text ends in is handed from one function to the next with the number of its bits: read back
    from ``out``, where it was just put, every word would wait for the one before it.
    """
    texts.stamp[0] += np.int64(1) << 32
    stamp = texts.stamp[0]
    seen, stack, operand_at, operand = texts.seen, texts.stack, texts.operand_at, texts.operand
    for x in members:
        seen[x] = stamp + _UNNUMBERED
    depth, known = 0, 0
    end = (np.int64(0), np.int64(8), _LINE_END)
    for i in range(results.size - 1, -1, -1):
        stack[depth] = results[i]
        depth += 1
    while depth:  # ends: each op is put there once to be written and once to be read
        depth -= 1
        x = stack[depth]
        if x < 0:
            x = ~x
            end = _append_line(texts, 2 * x, out, end)
            first, last = operand_at[x], operand_at[x + 1]
            if first == last:
                end = _append(out, end, _LINE_END, 8)
            for e in range(first, last):
                after = _SPACE if e < last - 1 else _LINE_END
                end = _append_number(texts, seen[operand[e]] - stamp, after, 1, out, end)
        elif seen[x] == stamp + _UNNUMBERED:
            stack[depth] = ~x
            depth += 1
            for e in range(operand_at[x + 1] - 1, operand_at[x] - 1, -1):
                stack[depth] = operand[e]
                depth += 1
            continue
        elif seen[x] < stamp:
            end = _append_line(texts, 2 * x + 1, out, end)
        else:
            continue
        seen[x] = stamp + known
        known += 1
    for i in range(results.size):
        end = _append_number(texts, seen[results[i]] - stamp, _SPACE, i < results.size - 1, out, end)
    at, bits, word = end
    out[at] = word
    return _WORD * at + bits // 8


@inner
def _append_line(texts: Any, number: Any, out: Any, end: Any) -> Any:
    line = texts.line[number]
    first, last = texts.text_at[line], texts.text_at[line + 1]
    for k in range(first, last - 1):
        end = _append(out, end, texts.text[k], 64)
    return _append(out, end, texts.text[last - 1], 8 * (texts.size[line] - _WORD * (last - 1 - first)))


@inner
def _append_number(texts: Any, number: Any, separator: Any, separated: Any, out: Any, end: Any) -> Any:
    count = texts.digit_count[number]
    word = texts.digits[number]
    if separated:
        word |= separator << np.uint64(8 * count)
    return _append(out, end, word, 8 * (count + separated))


@inner
def _append(out: Any, end: Any, word: Any, bits: Any) -> Any:
    """Put ``bits`` of ``word``, the rest of which is 0, behind the text; where that ends then: at which word, after
    how many bits (0 to 63) of it, and that word, 0 beyond, which is not in ``out`` yet."""
    at, used, last = end
    last |= word << np.uint64(used)
    out[at] = last
    used += bits
    if used < 64:
        return at, used, last
    return at + 1, used - 64, (word >> np.uint64(1)) >> np.uint64(63 - used + bits)
