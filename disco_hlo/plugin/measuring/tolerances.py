"""How far an element of a result may lie from XLA's default: four times as far as roundings move it there.

The default runs again on inputs that are changed by a rounding, as large as the step's module says
(:func:`rounding_of`). How far that moves an element of an output, beyond what moves the input that the output updates,
is one sample of what its roundings add up to. Another plan rounds in other places, so an element that happened not to
move may lie as far off as its neighbours moved: those of its row, of its column, or all where a row and a column are
only a few elements. And the last digits of an output are always rounded.

So one wrong element or tile stands out, where a norm over the result would hide it. What moves all elements a little is
seen in the norm.

Of millions of elements some move much farther than they and their neighbours did before: Adam divides by the root of a
moment that is next to nothing for a word just seen. Where an element of another program is too far off, fresh runs of
the default show how far beyond that its own roundings put any element of the output (:meth:`Allowed.look_farther`).

An output is compared in parts of a million elements. The rules are written once, for arrays ``[part, row, column]``,
and are computed where these lie: those of large outputs by a program on the device, others by numpy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from disco_hlo.backends import Backend
from disco_hlo.hlo.proto import DTYPES, Message, parse
from disco_hlo.plugin.xla.executables import JAX_NAMES, is_whole
from disco_hlo.plugin.xla.host_memory import copied
from disco_hlo.plugin.xla.own_programs import Fact, compile_for_each_device, on_each_device

FRESH_RUNS = 3
"""Of the default, that show how far its own elements go beyond what is allowed."""
_FARTHER = 2.0
"""Another program's farthest element of as many may go so many times as far as the farthest in these."""
_MOST_FARTHER = 4.0
"""Times what is allowed, whatever they show: where an element moves farther by itself, a wrong one beside it would hide
behind it."""
TIMES = 4.0
"""An element may lie so many times as far off as roundings move it."""
HIGH = 3.0
"""The largest of many neighbours moves so many times as far as they do by the root of their mean square."""
_NEXT = 0.7072
"""The power of two next to a number is above this part of it: the root of a half, or barely more."""
_LAYOUT: dict[int, tuple[Any, int, Any]] = {4: (np.uint32, 23, np.uint8), 8: (np.uint64, 52, np.uint16)}
"""By a float's bytes: bits of its size, bits below its exponent, and what holds the exponent."""
_EXPONENT_BYTES = {8: 2, 16: 2}
"""Of what is kept of an element's size, by the bytes of its type; 1 for others."""
_A_FEW = 4
_MANY = 64
"""Of so many elements the norm is compared, too."""
_ELEMENTS = 1 << 20
"""Of a part."""
_ON_DEVICES = 1 << 18
"""Outputs of so many elements are compared where they lie; for fewer no program is compiled."""
_USUAL = frozenset({"bfloat16", "float16", "float32", "float64"})
_COARSEST = 2.0**-8
"""Of bf16. What is kept in 8 bits is computed from something finer."""
_TENSOR_FLOAT = 2.0**-11
"""Half a last digit of TF32, in which a GPU may multiply f32."""
_SUMMED = 2.0**-23
"""Sums of anything coarser are in f32."""
_OF_TERMS = 0.5
"""A sum in another order differs by so much of the root of the number of its terms: less where they cancel on the way,
more where they do not."""
_PRODUCTS = frozenset({"convolution", "custom-call", "dot"})


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a flat array that are alike: so many, one behind the other, each of rows and columns."""

    start: int
    count: int
    rows: int
    columns: int

    def of(self, values: Any) -> Any:
        """``[part, row, column]``."""
        size = self.count * self.rows * self.columns
        return values.reshape(-1)[self.start : self.start + size].reshape(self.count, self.rows, self.columns)

    def each(self) -> Iterator[Parts]:
        """Each of them by itself."""
        for number in range(self.count):
            yield Parts(self.place(number, 0), 1, self.rows, self.columns)

    def place(self, part: int, within: int) -> int:
        """Of an element in the flat array."""
        return self.start + part * self.rows * self.columns + within


def parts_of(shape: Sequence[int]) -> tuple[Parts, ...]:
    """The parts in which an array of this shape is compared: whole rows where a row is no longer than a part, and what
    is left."""
    size = math.prod(shape)
    if not size:
        return ()
    columns = min(shape[-1] if shape else 1, _ELEMENTS)
    if shape and shape[-1] > _ELEMENTS:
        rows, step = 1, _ELEMENTS
    else:
        rows = _ELEMENTS // columns
        step = rows * columns
    count, rest = divmod(size, step)
    found = [Parts(0, count, rows, columns)] if count else []
    if rest:
        columns = min(columns, rest)
        found.append(Parts(count * step, 1, rest // columns, columns))
    return tuple(found)


# --- the rules: for numpy, and for programs of JAX ------------------------------------------------


class Seen(NamedTuple):
    """What is known of some :class:`Parts` of a float output."""

    powers: Any
    """``[part, row, column]``: the exponent of how far each element may be off by itself."""
    in_rows: Any
    """``[part, row]``: sums of squares of how far elements moved."""
    in_columns: Any
    """``[part, column]``"""
    last_digits: Any
    """``[part]``: sum of squares."""
    changed: Any
    """``[part]``: sum of squares of what the step changes."""


def _begin(xp: Any, values: Any, before: Any) -> Seen:
    kind = ml_dtypes.finfo(values.dtype)
    wide = widened(values)
    largest = xp.abs(wide)
    real = largest.dtype.type
    changed = wide if before is None else wide - widened(before)
    if before is not None:
        largest = xp.maximum(largest, xp.abs(widened(before)))
    digit = float(kind.eps) * _NEXT  # the power of two next to it is what the last digit is worth
    last_digit = _finite(xp, largest) * real(digit) + real(float(kind.smallest_normal))
    count, rows, columns = values.shape
    return Seen(
        _powers(last_digit),
        xp.zeros((count, rows), np.float64),
        xp.zeros((count, columns), np.float64),
        _squares(xp, last_digit, (1, 2)),
        _squares(xp, _finite(xp, xp.abs(changed)), (1, 2)),
    )


def _learn(xp: Any, seen: Seen, values: Any, moved: Any, before: Any, moved_before: Any) -> Seen:
    change = widened(moved) - widened(values)
    if before is not None:
        change = change - (widened(moved_before) - widened(before))
    size = _finite(xp, xp.abs(change))
    return seen._replace(
        powers=xp.maximum(seen.powers, _powers(size)),
        in_rows=seen.in_rows + _squares(xp, size, 2),
        in_columns=seen.in_columns + _squares(xp, size, 1),
    )


class _Verdict(NamedTuple):
    """How another program's values differ."""

    strange: Any
    """``[part, row, column]``: what is not finite, and not the same."""
    apart: Any
    allowed: Any
    norm: Any
    """``[part]``"""
    limit: Any


def _judge(xp: Any, seen: Seen, values: Any, runs: Any, got: Any) -> _Verdict:
    want, have = widened(values), widened(got)
    apart = xp.abs(have - want)
    strange = ~(xp.isfinite(want) & xp.isfinite(have))
    same = (want == have) | (xp.isnan(want) & xp.isnan(have))
    apart = xp.where(strange, apart.dtype.type(0), apart)
    _, rows, columns = values.shape
    near_rows, near_columns = xp.zeros_like(seen.in_rows), xp.zeros_like(seen.in_columns)
    if columns >= _A_FEW:
        near_rows = xp.sqrt(seen.in_rows / (runs * columns))
    if rows >= _A_FEW:
        near_columns = xp.sqrt(seen.in_columns / (runs * rows))
    moved = seen.in_rows.sum(1) / runs
    if max(rows, columns) < _A_FEW:
        near_rows = near_rows + xp.sqrt(moved / (rows * columns))[:, None]
    near = xp.maximum(
        (HIGH * near_rows).astype(apart.dtype)[:, :, None],
        (HIGH * near_columns).astype(apart.dtype)[:, None],
    )
    allowed = xp.maximum(near, _sizes(seen.powers, apart.dtype)) * apart.dtype.type(TIMES)
    norm = xp.sqrt(_squares(xp, apart, (1, 2)))
    return _Verdict(strange & ~same, apart, allowed, norm, TIMES * xp.sqrt(moved + seen.last_digits))


def _is_wrong(verdict: _Verdict, slack: Any) -> Any:
    """``[part]``"""
    allowed = verdict.allowed * slack.astype(verdict.allowed.dtype)
    wrong = (verdict.strange | (verdict.apart > allowed)).any((1, 2))
    if math.prod(verdict.apart.shape[1:]) >= _MANY:
        wrong = wrong | (verdict.norm > verdict.limit)
    return wrong


def _beyond(xp: Any, seen: Seen, values: Any, runs: Any, moved: Any, before: Any, moved_before: Any) -> Any:
    """``[part]``: the largest part of what is allowed that the default's own roundings move an element."""
    got = widened(moved)
    if before is not None:
        got = got - (widened(moved_before) - widened(before))
    verdict = _judge(xp, seen, values, runs, got)
    return xp.where(verdict.strange, verdict.apart.dtype.type(0), verdict.apart / verdict.allowed).max((1, 2))


def _words(verdict: _Verdict, values: NDArray[Any], got: NDArray[Any]) -> tuple[int, str]:
    """Where one part is wrong, and how."""
    strange, apart, allowed = (one.reshape(-1) for one in verdict[:3])
    if strange.any():
        place = int(np.argmax(strange))
        return place, f"it is {_shown(got, place)} and not {_shown(values, place)}"
    if (apart > allowed).any():
        place = int(np.argmax(apart / allowed))
        return place, f"by {apart[place]:.2g}, where roundings make {allowed[place]:.2g}"
    norm, limit = float(verdict.norm[0]), float(verdict.limit[0])
    return int(np.argmax(apart)), f"by {norm:.2g} of its norm, where roundings make {limit:.2g}"


def _shown(values: NDArray[Any], place: int) -> str:
    return f"{widened(values).reshape(-1)[place]:.3g}"


def widened(part: Any) -> Any:
    """In a type that numpy computes in: itself, or f32."""
    return part if part.dtype.kind in "fc" and part.dtype.itemsize > 2 else part.astype(np.float32)


def _finite(xp: Any, sizes: Any) -> Any:
    return xp.where(xp.isfinite(sizes), sizes, sizes.dtype.type(0))


def _squares(xp: Any, sizes: Any, axis: int | tuple[int, int]) -> Any:
    return xp.square(sizes.astype(np.float64)).sum(axis)


def _powers(sizes: Any) -> Any:
    """The powers of two next to sizes, as floats have them in their exponent: a quarter of the sizes' memory."""
    integer, mantissa, kept = _LAYOUT[sizes.dtype.itemsize]
    near = sizes * sizes.dtype.type(_NEXT)
    return ((near.view(integer) >> integer(mantissa)) + integer(1)).astype(kept)


def _sizes(powers: Any, dtype: np.dtype[Any]) -> Any:
    """The powers of two that :func:`_powers` kept."""
    integer, mantissa, _ = _LAYOUT[dtype.itemsize]
    return (powers.astype(integer) << integer(mantissa)).view(dtype)


def kept_bytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    """What an output takes on each device, or on the host for it, while others are compared with it."""
    powers = 0 if is_whole(dtype) else _EXPONENT_BYTES.get(dtype.itemsize, 1)
    return math.prod(shape) * (dtype.itemsize + powers)


# --- one output on this process's devices ---------------------------------------------------------


def are_compared_on_devices(values: Any) -> bool:
    """Whether an output, of which this is an array, is compared where it lies: of a usual type, and large."""
    dtype = np.dtype(values.dtype)
    return (dtype.name in _USUAL or dtype.kind in "biu") and math.prod(values.shape) >= _ON_DEVICES


def compile_rules(devices: tuple[Any, ...], output: Fact, updates: bool) -> None:
    """Compile what :class:`Allowed` runs on the devices for a large output, which ``updates`` an input or does not."""
    import jax

    parts, is_float = parts_of(output[0]), not is_whole(output[1])
    befores, seen = [output] * updates, []
    if is_float:
        compile_for_each_device(devices, _begun, (True, parts), output, *befores)
        with jax.enable_x64(True):
            like = [jax.ShapeDtypeStruct(*output)] * (1 + updates)
            begun = jax.eval_shape(functools.partial(_begun, True, parts), *like)
        seen = [(one.shape, one.dtype) for one in begun]
        compile_for_each_device(devices, _learnt, (True, parts), *seen, output, output, *befores, *befores)
    number = ((1,), np.dtype(np.float64))
    compile_for_each_device(
        devices, _are_wrong, (True, parts, is_float), *seen, output, number, number, output
    )
    if is_float:
        told = (*seen, output, number, output, *befores, *befores)
        compile_for_each_device(devices, _farthest, (True, parts), *told)


class Allowed:
    """What the default computed of one output, and how far off another program may be.

    Args:
        values: on each local device; kept.
        before: what the step updates there; None where it updates nothing.
        on_devices: whether they are compared where they lie; by their number and type where nobody says.
        kept_on_host: what is kept lies in the host's memory until it is needed: the devices have no room for it.
    """

    def __init__(
        self,
        values: Sequence[Any],
        before: Sequence[Any] | None,
        on_devices: bool | None = None,
        kept_on_host: bool = False,
    ) -> None:
        first = values[0]
        self.shape, self._dtype = tuple(first.shape), np.dtype(first.dtype)
        self._runs = 0
        self._slack = 1.0
        """How many times as far off as is allowed an element may be."""
        self.is_float = not is_whole(self._dtype)
        self._on_devices = are_compared_on_devices(first) if on_devices is None else on_devices
        self._parts = parts_of(self.shape)
        if not self._on_devices:  # what numpy makes on the way is as large as what it is given
            self._parts = tuple(one for parts in self._parts for one in parts.each())
        self._kept_on_host = kept_on_host
        self._devices = tuple(next(iter(one.devices())) for one in values) if self._on_devices else ()
        self._values = self._kept([self._there(values)])[0]
        self._seen: list[list[Any]] = []
        """By device, what :class:`Seen` has of each of the parts, one behind the other."""
        if self.is_float and self._parts:
            self._seen = self._kept(self._each(_begun, (self._parts,), self._values, *self._befores(before)))

    @property
    def moved_square(self) -> float:
        """The mean, over the runs, of the sum of squares of how far elements moved; of all devices together."""
        return self._sum("in_rows") / max(1, self._runs)

    @property
    def changed_square(self) -> float:
        """Sum of squares of what the step changes; of all devices together."""
        return self._sum("changed")

    def learn(
        self, moved: Sequence[Any], before: Sequence[Any] | None, moved_before: Sequence[Any] | None
    ) -> None:
        """Take in what the default computes on changed inputs, with ``before`` as of the class and what became of
        that by the change."""
        self._runs += 1
        if not self._seen:
            return
        told = (*self._befores(before), *self._befores(moved_before))
        self._seen = self._kept(
            self._each(_learnt, (self._parts,), *self._across(), self._values, self._there(moved), *told)
        )

    def look_farther(
        self, moved: Sequence[Any], before: Sequence[Any] | None, moved_before: Sequence[Any] | None
    ) -> None:
        """Allow what the default's own roundings do to some element, within bounds, by a run on changed inputs as of
        :meth:`learn`, of which nothing was learnt."""
        if not self._seen:
            return
        runs = [np.full(1, max(1, self._runs), np.float64)] * len(moved)
        told = (*self._befores(before), *self._befores(moved_before))
        found = self._each(
            _farthest, (self._parts,), *self._across(), self._values, runs, self._there(moved), *told
        )
        farthest = max(float(np.asarray(one).max()) for [one] in found)
        self._slack = min(max(self._slack, _FARTHER * farthest), _MOST_FARTHER)

    def unlike(self, got: Sequence[Any]) -> tuple[int, str]:
        """Where another program's values are too far off, on the first device where they are, as a place in the flat
        array, and how far; no words where nowhere."""
        if not self._parts:
            return 0, ""
        own = self._there(got)
        runs = [np.full(1, max(1, self._runs), np.float64)] * len(own)
        slack = [np.full(1, self._slack, np.float64)] * len(own)
        told = (*self._across(), self._values, runs, slack, own)
        for device, [wrong] in enumerate(self._each(_are_wrong, (self._parts, self.is_float), *told)):
            flags = np.asarray(wrong)
            if flags.any():
                return self._explain(device, int(np.argmax(flags)), own[device])
        return 0, ""

    def _explain(self, device: int, number: int, got: Any) -> tuple[int, str]:
        """Of one part, by numpy."""
        fields, group = len(Seen._fields), 0
        while number >= self._parts[group].count:
            number -= self._parts[group].count
            group += 1
        parts = self._parts[group]

        def one(whole: Any) -> NDArray[Any]:
            cut: NDArray[Any] = np.asarray(whole[number : number + 1])
            return cut

        values, other = one(parts.of(self._values[device])), one(parts.of(got))
        if not self.is_float:
            place = int(np.argmax(values != other))
            words = f"it is {other.reshape(-1)[place]} and not {values.reshape(-1)[place]}"
        else:
            seen = Seen(*(one(own) for own in self._seen[device][group * fields :][:fields]))
            with np.errstate(all="ignore"):
                verdict = _judge(np, seen, values, float(max(1, self._runs)), other)
                verdict = verdict._replace(allowed=verdict.allowed * verdict.allowed.dtype.type(self._slack))
                place, words = _words(verdict, values, other)
        return parts.place(number, place), words

    # --- where it is computed ---------------------------------------------------------------------

    def _there(self, arrays: Sequence[Any]) -> list[Any]:
        """Where they are compared, with a dimension at least."""
        if self._on_devices:
            return list(arrays)
        return [np.asarray(one).reshape(np.shape(one) or (1,)) for one in arrays]

    def _kept(self, by_device: list[list[Any]]) -> list[list[Any]]:
        if not self._kept_on_host:
            return by_device
        copies = iter(copied([one for own in by_device for one in own]))
        return [[next(copies) for _ in own] for own in by_device]

    def _befores(self, before: Sequence[Any] | None) -> list[list[Any]]:
        return [] if before is None else [self._there(before)]

    def _across(self) -> list[list[Any]]:
        """What is seen, by part and then by device."""
        return [list(one) for one in zip(*self._seen, strict=True)]

    def _each(
        self, rule: Callable[..., Any], static: tuple[Any, ...], *arguments: Sequence[Any]
    ) -> list[list[Any]]:
        """What a rule gives on each device."""
        if self._on_devices:
            import jax

            found = on_each_device(self._devices, rule, (True, *static), *arguments)
            jax.block_until_ready(found)  # what it took is free before the next output takes as much
            return [list(own) for own in zip(*found, strict=True)]
        with np.errstate(all="ignore"):
            return [list(rule(False, *static, *own)) for own in zip(*arguments, strict=True)]

    def _sum(self, name: str) -> float:
        place, fields = Seen._fields.index(name), len(Seen._fields)
        return sum(float(np.asarray(one).sum()) for own in self._seen for one in own[place::fields])


def _module(in_jax: bool) -> Any:
    if in_jax:
        import jax.numpy

        return jax.numpy
    return np


def _begun(in_jax: bool, every: tuple[Parts, ...], values: Any, before: Any = None) -> tuple[Any, ...]:
    xp = _module(in_jax)
    found: list[Any] = []
    for parts in every:
        found += _begin(xp, parts.of(values), None if before is None else parts.of(before))
    return tuple(found)


def _learnt(in_jax: bool, every: tuple[Parts, ...], *told: Any) -> tuple[Any, ...]:
    xp, (every_seen, arrays) = _module(in_jax), _split(every, told)
    found: list[Any] = []
    for parts, seen in zip(every, every_seen, strict=True):
        values, moved, *befores = map(parts.of, arrays)
        found += _learn(xp, seen, values, moved, *(befores or (None, None)))
    return tuple(found)


def _split(every: tuple[Parts, ...], told: tuple[Any, ...]) -> tuple[list[Seen], tuple[Any, ...]]:
    """What is seen of each of the parts, with which what a rule is told begins, and the rest."""
    fields, end = len(Seen._fields), len(Seen._fields) * len(every)
    return [Seen(*told[first : first + fields]) for first in range(0, end, fields)], told[end:]


def _are_wrong(in_jax: bool, every: tuple[Parts, ...], is_float: bool, *told: Any) -> tuple[Any]:
    xp = _module(in_jax)
    every_seen, (values, runs, slack, got) = _split(every if is_float else (), told)
    found: list[Any] = []
    for number, parts in enumerate(every):
        if not in_jax and parts.of(values).tobytes() == parts.of(got).tobytes():
            found.append(np.zeros(parts.count, np.bool_))
        elif is_float:
            judged = _judge(xp, every_seen[number], parts.of(values), runs[0], parts.of(got))
            found.append(_is_wrong(judged, slack))
        else:
            found.append((parts.of(values) != parts.of(got)).any((1, 2)))
    return (xp.concatenate(found),)


def _farthest(in_jax: bool, every: tuple[Parts, ...], *told: Any) -> tuple[Any]:
    xp, (every_seen, (values, runs, *arrays)) = _module(in_jax), _split(every, told)
    found: list[Any] = []
    for parts, seen in zip(every, every_seen, strict=True):
        moved, *befores = map(parts.of, arrays)
        found.append(_beyond(xp, seen, parts.of(values), runs[0], moved, *(befores or (None, None))))
    return (xp.concatenate(found),)


# --- the size of a rounding -----------------------------------------------------------------------


def rounding_of(module: bytes, backend: Backend) -> float:
    """By what part of it a number changes where a step, a serialized HloModuleProto, rounds it in the coarsest type
    that it computes in, or where its longest sum is added up in another order."""
    return _rounding_of(module, backend.tensor_float)


@functools.lru_cache(maxsize=1)
def _rounding_of(module: bytes, tensor_float: bool) -> float:
    """Known of the last module: it is asked for while a call is held, and a large one takes a second to read."""
    import jax.numpy as jnp

    message = parse(module)
    kinds = {
        DTYPES.get(instruction.shape.element_type, "")
        for computation in message.computations
        for instruction in computation.instructions
    }
    floats = [JAX_NAMES[kind] for kind in kinds & JAX_NAMES.keys() if kind.startswith(("f", "bf"))]
    parts = [float(jnp.finfo(kind).eps) for kind in floats]
    if tensor_float and "f32" in kinds:
        parts.append(_TENSOR_FLOAT)
    coarsest = min(max(parts, default=0.0), _COARSEST)
    return max(coarsest, min(coarsest, _SUMMED) * _OF_TERMS * math.sqrt(longest_sum(message)))


def longest_sum(message: Message) -> float:
    """About how many terms the longest sum of a module has; 1 where it has none. Loops count once."""
    found = 1.0
    for computation in message.computations:
        shapes = {instruction.id: instruction.shape for instruction in computation.instructions}
        for instruction in computation.instructions:
            operands = [_elements(shapes[operand]) for operand in instruction.operand_ids]
            if instruction.opcode == "reduce":
                found = max(found, operands[0] / max(1, _elements(instruction.shape)))
            elif instruction.opcode in _PRODUCTS and len(operands) >= 2:
                # Of [m, k] and [k, n] that is k; of convolutions it is so about.
                found = max(found, (operands[0] * operands[1] / max(1, _elements(instruction.shape))) ** 0.5)
    return found


def _elements(shape: Message) -> int:
    """Of an array, or of a tuple's first."""
    while shape.tuple_shapes:
        shape = shape.tuple_shapes[0]
    return math.prod(shape.dimensions)
