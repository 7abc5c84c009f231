"""Cost keys of fused kernels, under which a time is found again in another model.

A key is a digest of a kernel's structure: the keys of its ops, how they feed each other, which results leave it. Node
numbers, names and the rest of the graph do not matter, so the layers of a model share keys, and so do models.

What is hashed is a text: the emitter, then a line for each node in post-order from the results, then the numbers of
the results. A member's line is its key and the numbers of its operands, of what a kernel reads the shape and the
layout. A search asks for thousands of kernels a second, so the texts are put together in compiled code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disco_hlo.compiled import compiled, inner
from disco_hlo.hlo.cost_model import FlatKernels, Kernels
from disco_hlo.hlo.graph import Graph, flat_graph, flat_shapes, once_per_graph

GROUP_PREFIX = "g:"
"""First characters of the key of a fused kernel; no :attr:`Node.key` has them."""

_KEY_BYTES: Final = 12
_LINE_END, _SPACE, _ZERO = ord("\n"), ord(" "), ord("0")
_MOST_DIGITS: Final = 20
_MEMBER: Final = -1
"""What ``number`` says of a member that has none yet."""
_OUTSIDE: Final = -2


class _Lines(NamedTuple):
    """The texts of a graph's nodes. Arrays are never written."""

    operand_at: NDArray[np.int64]
    operand: NDArray[np.int64]
    line: NDArray[np.int64]
    """``[2 * nodes]``: the line of node x as a member, without the numbers of its operands, at 2 x, and as what a
    kernel reads at 2 x + 1."""
    text_at: NDArray[np.int64]
    """``[lines + 1]``: where each line begins in ``text``."""
    text: NDArray[np.uint8]


@once_per_graph
def _lines(graph: Graph) -> _Lines:
    flat, shapes = flat_graph(graph), flat_shapes(graph)
    keys = [graph.nodes[x].key for x in flat.example.tolist()]  # which tell shapes apart
    is_cloned = flat.is_cloned[flat.example]
    lines = [f"{key} " for key in keys]
    lines += [f"{keys[i]} \n" for i in np.flatnonzero(is_cloned).tolist()]
    lines += [f"read {shape} {shape.layout}\n" for shape in shapes.distinct]
    read = len(keys) + np.where(is_cloned, np.cumsum(is_cloned) - 1, np.sum(is_cloned) + shapes.of_key)
    encoded = [line.encode() for line in lines]
    return _Lines(
        flat.operand_at,
        flat.operand,
        np.stack([flat.of_key, read[flat.of_key]], axis=1).ravel(),
        np.cumsum([0, *map(len, encoded)], dtype=np.int64),
        np.frombuffer(b"".join(encoded), np.uint8),
    )


def kernel_keys(graph: Graph, kernels: Kernels) -> list[str]:
    """The key of each kernel."""
    end, written = _texts(_lines(graph), kernels.flat)
    text, ends = written.tobytes(), end.tolist()
    first = kernels.emitters or ("",) * len(kernels)
    return [
        GROUP_PREFIX + blake2b(emitter.encode() + text[a:b], digest_size=_KEY_BYTES).hexdigest()
        for emitter, a, b in zip(first, [0, *ends], ends, strict=False)
    ]


def group_key(graph: Graph, members: Iterable[int], results: Sequence[int], emitter: str = "") -> str:
    """The key of one kernel, as :class:`~disco_hlo.hlo.cost_model.Kernels` has it; the order of its results counts."""
    return kernel_keys(graph, Kernels.of_lists([sorted(members)], [results], [emitter]))[0]


@compiled
def _texts(lines: _Lines, kernels: FlatKernels) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where the text of each kernel ends, and all texts one after the other, each but for its emitter."""
    count = kernels.tiled.size
    ends, out = np.empty(count, np.int64), np.empty(1 << 12, np.uint8)
    number = np.full(lines.operand_at.size - 1, _OUTSIDE)
    stack = np.empty(2 * (lines.operand.size + number.size) + 1, np.int64)
    order = np.empty(number.size, np.int64)
    end = 0
    for i in range(count):
        members = kernels.members[kernels.member_at[i] : kernels.member_at[i + 1]]
        results = kernels.results[kernels.result_at[i] : kernels.result_at[i + 1]]
        for x in members:
            number[x] = _MEMBER
        known = _number(lines, results, number, stack, order)
        wanted = end + _most_bytes(lines, order[:known], results.size)
        if wanted > out.size:
            larger = np.empty(2 * wanted, np.uint8)
            for k in range(end):
                larger[k] = out[k]
            out = larger
        end = _write(lines, order[:known], results, number, out, end)
        ends[i] = end
        for x in members:
            number[x] = _OUTSIDE
        for k in range(known):
            number[order[k] if order[k] >= 0 else ~order[k]] = _OUTSIDE
    return ends, out[:end]


@inner
def _number(lines: Any, results: Any, number: Any, stack: Any, order: Any) -> Any:
    """Number the nodes of a kernel in post-order from its results; how many there are. ``order`` has them, with all
    bits flipped where the kernel only reads them."""
    depth, known = 0, 0
    for i in range(results.size - 1, -1, -1):
        stack[depth] = results[i]
        depth += 1
    while depth:  # ends: each op is put there once to be numbered and once to be read
        depth -= 1
        x = stack[depth]
        if x < 0:
            if number[~x] == _MEMBER:
                number[~x], order[known] = known, ~x
                known += 1
        elif number[x] == _MEMBER:
            stack[depth] = ~x
            depth += 1
            for e in range(lines.operand_at[x + 1] - 1, lines.operand_at[x] - 1, -1):
                stack[depth] = lines.operand[e]
                depth += 1
        elif number[x] == _OUTSIDE:
            number[x], order[known] = known, ~x
            known += 1
    return known


@inner
def _most_bytes(lines: Any, order: Any, results: Any) -> Any:
    wanted = 1 + results * _MOST_DIGITS
    for x in order:
        line = lines.line[2 * x if x >= 0 else 2 * ~x + 1]
        wanted += lines.text_at[line + 1] - lines.text_at[line] + 1
        if x >= 0:
            wanted += (lines.operand_at[x + 1] - lines.operand_at[x]) * _MOST_DIGITS
    return wanted


@inner
def _write(lines: Any, order: Any, results: Any, number: Any, out: Any, end: Any) -> Any:
    """The text of a kernel from ``end`` on; where it ends."""
    out[end] = _LINE_END  # that of the emitter
    end += 1
    for x in order:
        line = lines.line[2 * x if x >= 0 else 2 * ~x + 1]
        for k in range(lines.text_at[line], lines.text_at[line + 1]):
            out[end] = lines.text[k]
            end += 1
        if x < 0:
            continue
        first, last = lines.operand_at[x], lines.operand_at[x + 1]
        for e in range(first, last):
            end = _write_number(number[lines.operand[e]], out, end)
            out[end] = _SPACE if e < last - 1 else _LINE_END
            end += 1
        if first == last:
            out[end] = _LINE_END
            end += 1
    for i in range(results.size):
        if i:
            out[end] = _SPACE
            end += 1
        end = _write_number(number[results[i]], out, end)
    return end


@inner
def _write_number(number: Any, out: Any, end: Any) -> Any:
    digits, rest = 1, number // 10
    while rest:  # ends: divided by ten
        digits += 1
        rest //= 10
    for place in range(end + digits - 1, end - 1, -1):
        out[place] = _ZERO + number % 10
        number //= 10
    return end + digits
