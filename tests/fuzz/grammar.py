"""Random programs by seed: how one is written, which values there are to choose from, and the plain ops.

Each production takes what a scope has and adds an op or two. Ops whose values share memory, where faults lie, are in
``sharing``; branches, loops and collectives in ``nested``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tests.fuzz.interpret import infer
from tests.fuzz.operations import DECIDES, LOOPS, keeps_exact
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type

_SIZES = (2, 3, 4, 6, 8, 12)
MOST_ELEMENTS = 4096
Production = Callable[["Scope"], None]


def generate(seed: int, max_devices: int = 4) -> Program:
    """The program of a seed."""
    from tests.fuzz.sharing import TEMPLATES, vary

    dice = random.Random(seed)
    if dice.random() < 0.06:
        return replace(vary(TEMPLATES[dice.choice(sorted(TEMPLATES))], dice), seed=seed)
    while True:
        try:
            return _generate(dice, seed, max_devices)
        except ProgramError:
            continue


def _generate(dice: random.Random, seed: int, max_devices: int) -> Program:
    from tests.fuzz.nested import COLLECTIVE, layers
    from tests.fuzz.sharing import finish

    devices = dice.choice((1, 1, 1, 1, 2, 2, 2, 3, 4)) if max_devices > 1 else 1
    devices = min(devices, max_devices)
    mode = "shard_map" if devices > 1 and dice.random() < 0.8 else "jit"
    scope = Scope(dice, devices=devices if mode == "shard_map" else 1)
    _arguments(scope, devices)
    weighted = productions_of(scope)
    grow(scope, weighted, dice.choice((2, 4, 6, 9, 13)))
    if scope.devices > 1 and not any(op.name == "psum" for op in scope.ops_made):
        grow(scope, [(1, one) for _, one in COLLECTIVE], 1)
    if dice.random() < 0.3:
        grow(scope, [(1, layers)], 1)
    results = finish(scope)
    body = scope.body(*results)
    sharded = tuple(_result_is_sharded(scope, body.types[x], devices) for x in results)
    if mode == "jit" and devices > 1:
        sharded = tuple(
            one and bool(shape := body.types[x].shape) and shape[0] % devices == 0
            for one, x in zip(sharded, results, strict=True)
        )
    small_calls = dice.random() < 0.25
    return Program(body, tuple(scope.arguments), devices, mode, sharded, seed, small_calls)


def productions_of(scope: Scope) -> list[tuple[int, Production]]:
    """What may come next in a body, each with its weight."""
    from tests.fuzz.nested import COLLECTIVE, NESTED
    from tests.fuzz.sharing import SHARING

    found = [*PLAIN, *SHARING]
    if scope.depth < 2:
        found += NESTED
    if scope.devices > 1:
        found += COLLECTIVE
    return found


def grow(scope: Scope, weighted: Sequence[tuple[int, Production]], count: int) -> None:
    """Let up to ``count`` productions add to a body; one that finds nothing to work on adds nothing."""
    weights = [weight for weight, _ in weighted]
    for _ in range(count):
        (chosen,) = scope.dice.choices([one for _, one in weighted], weights)
        before = len(scope.ops_made), len(scope.types), len(scope.results)
        try:
            chosen(scope)
            if any(one.elements > MOST_ELEMENTS for one in scope.types[before[1] :]):
                raise ProgramError("too large")
        except ProgramError:
            del scope.ops_made[before[0] :]
            del scope.types[before[1] :]
            del scope.exact[before[1] :]
            del scope.results[before[2] :]


def _arguments(scope: Scope, devices: int) -> None:
    dice = scope.dice
    a, b = dice.choice(_SIZES), dice.choice(_SIZES)
    if dice.random() < 0.15:
        a, b = dice.choice(((16, 32), (32, 32), (64, 64), (8, 128)))
    if devices > 1:
        a = max(a - a % devices, devices)
    shapes = ((a, b), (b, a), (a, a), (a * b,), (a,), (b,), (a, b, 2), (2, a, b))
    main = dice.choices(shapes, (5, 2, 3, 3, 1, 1, 1, 1))[0]
    dtype = dice.choices(("f32", "bf16", "s32"), (7, 1.5, 1.5))[0]
    for number in range(dice.choice((1, 2, 2, 3, 4))):
        shape = main if number == 0 or dice.random() < 0.6 else dice.choice(shapes)
        own = dtype if dice.random() < 0.85 else dice.choice(("f32", "bf16", "s32"))
        sharded = devices > 1 and dice.random() < 0.6 and shape[0] % devices == 0
        scope.argument(own, *shape, donated=dice.random() < 0.55, sharded=sharded)
    if dice.random() < 0.55:
        scope.index(dice.choice((1, 2, 2, 3)), limit=min(a, b))
    if dice.random() < 0.55:
        scope.scalar(3)
    if dice.random() < 0.12:
        scope.key()


def _result_is_sharded(scope: Scope, of: Type, devices: int) -> bool:
    """As the arguments of this type are, so that it may take the storage of one; else by chance."""
    if devices == 1 or not of.shape:
        return False
    alike = [
        one.sharded
        for one, parameter in zip(scope.arguments, scope.parameters, strict=True)
        if parameter == of and one.donated
    ]
    return scope.dice.choice(alike) if alike else scope.dice.random() < 0.5


# Writing ----------------------------------------------------------------------------------------


class Builder:
    """A body under construction.

    Args:
        parameters: of a branch or a loop; a program adds arguments instead.
        exact: of each parameter, whether nothing has rounded it.
        devices: along the axis of collectives; 1 where there is none.
    """

    def __init__(
        self, parameters: Sequence[Type] = (), exact: Sequence[bool] | None = None, devices: int = 1
    ) -> None:
        self.parameters, self.devices = list(parameters), devices
        self.arguments: list[Argument] = []
        self.ops_made: list[Op] = []
        self.types = list(parameters)
        self.exact = list(exact) if exact is not None else [not one.is_float for one in parameters]

    def argument(self, dtype: str, *shape: int, donated: bool = False, sharded: bool = False) -> int:
        """A new argument; all come before the first op."""
        return self._argument(Type(dtype, shape), Argument("values", donated, sharded))

    def index(self, *shape: int, limit: int) -> int:
        """An argument of indices below ``limit``."""
        return self._argument(Type("s32", shape), Argument("index", limit=limit))

    def scalar(self, limit: int) -> int:
        """An argument that decides something."""
        return self._argument(Type("s32"), Argument("scalar", limit=limit))

    def key(self) -> int:
        """A random key."""
        return self._argument(Type("u32", (2,)), Argument("key"))

    def _argument(self, of: Type, argument: Argument) -> int:
        assert not self.ops_made
        self.parameters.append(of)
        self.arguments.append(argument)
        self.types.append(of)
        self.exact.append(True)
        return len(self.types) - 1

    def op(self, name: str, *operands: int, **attributes: Any) -> int:
        """Add an op of one result; its number.

        Raises:
            ProgramError: it does not fit its operands.
        """
        (result,) = self.ops(name, operands, attributes)
        return result

    def ops(
        self,
        name: str,
        operands: Sequence[int],
        attributes: dict[str, Any] | None = None,
        bodies: Sequence[Body] = (),
    ) -> list[int]:
        """Add an op; the numbers of its results.

        Raises:
            ProgramError: it does not fit its operands, or its result would depend on how something was rounded.
        """
        attributes = attributes or {}
        types = [self.types[x] for x in operands]
        exact = [self.exact[x] for x in operands]
        if decides(name, types, attributes) and not all(exact):
            raise ProgramError(f"{name} decides by numbers that may be rounded in several ways")
        results = infer(name, types, attributes, bodies, self.devices)
        first, made = len(self.types), Op(name, tuple(operands), results, attributes, tuple(bodies))
        self.ops_made.append(made)
        self.types += results
        self.exact += exact_behind(made, types, exact)
        return list(range(first, len(self.types)))

    def inner(self, dtype: str, *shape: int) -> Builder:
        """The body of a branch or loop with one parameter."""
        return Builder([Type(dtype, shape)], None, self.devices)

    def body(self, *results: int) -> Body:
        """What was written, with these results."""
        return Body(tuple(self.parameters), tuple(self.ops_made), results)

    def program(self, *results: int, seed: int = 0) -> Program:
        """The whole, on one device."""
        return Program(self.body(*results), tuple(self.arguments), sharded=(False,) * len(results), seed=seed)


def exact_behind(op: Op, operands: Sequence[Type], exact: Sequence[bool]) -> list[bool]:
    """Of each result, whether nothing has rounded it."""
    kept = not op.bodies and all(exact) and keeps_exact(op.name, op.attributes)
    if op.name == "convert" and op.results[0].dtype == "bf16":
        kept = kept and operands[0].dtype == "bf16"
    return [kept or not one.is_float for one in op.results]


def decides(name: str, operands: Sequence[Type], attributes: dict[str, Any]) -> bool:
    """Whether a rounded operand might lead to quite another result."""
    to_integer = name == "convert" and attributes.get("to") not in ("f32", "bf16") and operands[0].is_float
    return to_integer or name in DECIDES


def is_stable(body: Body, exact: Sequence[bool]) -> bool:
    """Whether no op of a body decides by numbers that may be rounded in several ways."""
    known, types = list(exact), body.types
    for op in body.ops:
        operands = [types[x] for x in op.operands]
        flags = [known[x] for x in op.operands]
        if decides(op.name, operands, dict(op.attributes)) and not all(flags):
            return False
        if not all(is_stable(inner, inner_exact(op, operands, flags)) for inner in op.bodies):
            return False
        known += exact_behind(op, operands, flags)
    return True


def inner_exact(op: Op, operands: Sequence[Type], exact: Sequence[bool]) -> list[bool]:
    """What a body within an op may take for exact: of what a loop carries, only what is no float."""
    known = [flag or not one.is_float for flag, one in zip(exact, operands, strict=True)]
    if op.name == "while":
        known[0] = True
    if op.name in LOOPS:
        first = 1 if op.name == "while" else 0
        carried = range(first, first + int(op.attributes["carried"]))
        return [known[i] and (i not in carried or not operands[i].is_float) for i in range(len(known))]
    return known[1:]


class Scope(Builder):
    """A body under construction, and dice."""

    def __init__(
        self,
        dice: random.Random,
        parameters: Sequence[Type] = (),
        exact: Sequence[bool] | None = None,
        *,
        devices: int = 1,
        depth: int = 0,
    ) -> None:
        super().__init__(parameters, exact, devices)
        self.dice, self.depth = dice, depth
        self.results: list[int] = []
        """Values that some production wants returned."""

    def pick(self, fits: Callable[[Type], bool] = lambda _: True) -> int:
        """A value of a type that fits, more often a late one.

        Raises:
            ProgramError: there is none.
        """
        found = [x for x, one in enumerate(self.types) if fits(one) and self.is_number(x)]
        if not found:
            raise ProgramError("no value fits")
        if self.dice.random() < 0.5:
            return self.dice.choice(found[-4:])
        return self.dice.choice(found)

    def array(self, *, least: int = 1, most: int = 4) -> int:
        """A value that is an array of numbers."""
        return self.pick(
            lambda one: least <= len(one.shape) <= most and one.dtype != "pred" and one.elements > 1
        )

    def like(self, x: int) -> int:
        """A value of the type of ``x``, another one where there is one."""
        same = [
            y for y, one in enumerate(self.types) if one == self.types[x] and y != x and self.is_number(y)
        ]
        return self.dice.choice(same) if same else x

    def is_number(self, x: int) -> bool:
        """Whether a value is no index, key or decision."""
        return x >= len(self.arguments) or self.arguments[x].role in ("values", "flags")

    def role(self, role: str) -> int:
        """An argument of a role.

        Raises:
            ProgramError: there is none.
        """
        found = [x for x, one in enumerate(self.arguments) if one.role == role]
        if not found:
            raise ProgramError(f"no argument is a {role}")
        return self.dice.choice(found)

    def donated(self) -> int:
        """A donated argument; inside a loop, what it carries; else any array."""
        found = [x for x, one in enumerate(self.arguments) if one.donated and one.role == "values"]
        found = found or [
            x for x in range(len(self.parameters)) if self.types[x].elements > 1 and self.is_number(x)
        ]
        return self.dice.choice(found) if found else self.array()

    def of(self, options: Sequence[str]) -> str:
        """One of some words."""
        return self.dice.choice(options)

    def a_permutation(self, rank: int) -> list[int]:
        """Axes in another order."""
        axes = list(range(rank))
        self.dice.shuffle(axes)
        return axes if axes != sorted(axes) or rank < 2 else axes[::-1]


# Plain ops --------------------------------------------------------------------------------------


def unary(s: Scope) -> None:
    x = s.array()
    if s.types[x].is_float:
        s.op(s.of(("tanh", "sin", "neg", "abs", "log1p", "decay", "rsqrt")), x)
    else:
        s.op(s.of(("neg", "abs", "not")), x)


def scale(s: Scope) -> None:
    s.op("scale", s.array(), by=s.dice.choice((2, 3, -1, 1)), plus=s.dice.choice((0, 0, 1)))


def binary(s: Scope) -> None:
    x = s.array()
    names = (
        ("add", "sub", "mul", "max", "min", "div")
        if s.types[x].is_float
        else ("add", "sub", "mul", "xor", "max")
    )
    pair = (x, s.like(x))
    s.op(s.of(names), *(pair if s.dice.random() < 0.5 else pair[::-1]))


def select(s: Scope) -> None:
    x = s.array()
    y = s.like(x)
    exact = [z for z in (x, y) if s.exact[z]]
    if exact and s.dice.random() < 0.6:
        flags = s.op("compare", s.dice.choice(exact), s.dice.choice(exact), how=s.of(("gt", "le")))
    else:
        shape = list(s.types[x].shape)
        rows, columns = (s.op("iota", shape=shape, axis=s.dice.randrange(len(shape))) for _ in range(2))
        flags = s.op("compare", rows, columns, how="gt")
    s.op("select", flags, x, y)


def convert(s: Scope) -> None:
    x = s.pick(lambda one: one.elements > 1)
    target = s.of([one for one in ("f32", "bf16", "s32") if one != s.types[x].dtype])
    y = s.op("convert", x, to=target)
    if s.dice.random() < 0.4 and s.types[x].is_float and s.types[y].is_float:
        s.op("convert", y, to=s.types[x].dtype)


def reduce(s: Scope) -> None:
    x = s.array()
    rank = len(s.types[x].shape)
    axes = sorted(s.dice.sample(range(rank), s.dice.randint(1, rank)))
    y = s.op("reduce", x, how=s.of(("sum", "sum", "max", "min")), axes=axes)
    if s.dice.random() < 0.5:
        kept = [axis for axis in range(rank) if axis not in axes]
        wide = s.op("broadcast", y, shape=list(s.types[x].shape), axes=kept)
        s.op(s.of(("add", "sub", "mul")), x, wide)


def broadcast(s: Scope) -> None:
    x = s.pick(lambda one: one.elements <= MOST_ELEMENTS // 4 and len(one.shape) < 3)
    shape = list(s.types[x].shape)
    at = s.dice.randrange(len(shape) + 1)
    wide = [*shape[:at], s.dice.choice((2, 3)), *shape[at:]]
    s.op("broadcast", x, shape=wide, axes=[i for i in range(len(wide)) if i != at])


def transpose(s: Scope) -> None:
    x = s.array(least=2)
    s.op("transpose", x, axes=s.a_permutation(len(s.types[x].shape)))


def reshape(s: Scope) -> None:
    s.op("reshape", (x := s.array()), shape=another_shape(s, s.types[x]))


def another_shape(s: Scope, of: Type) -> list[int]:
    """Another shape for as many elements."""
    count, options = of.elements, [[of.elements]]
    options += [list(one.shape) for one in s.types if one.elements == count and one.shape]
    options += [[n, count // n] for n in range(2, count) if count % n == 0]
    options = [one for one in options if tuple(one) != of.shape]
    if not options:
        raise ProgramError("no other shape")
    return s.dice.choice(options)


def slices(s: Scope) -> None:
    x = s.array()
    shape = s.types[x].shape
    start = [s.dice.randrange(0, max(1, n // 2)) for n in shape]
    limit = [s.dice.randint(low + 1, n) for low, n in zip(start, shape, strict=True)]
    s.op("slice", x, start=start, limit=limit, stride=[s.dice.choice((1, 1, 2)) for _ in shape])


def pad(s: Scope) -> None:
    x = s.array()
    sizes = [
        [s.dice.choice((0, 0, 1, -1)), s.dice.choice((0, 1, 2)), s.dice.choice((0, 0, 1))]
        for _ in s.types[x].shape
    ]
    s.op("pad", x, value=s.dice.choice((0, 1)), sizes=sizes)


def slice_and_pad_back(s: Scope) -> None:
    """The array moved by one along an axis, as in a shift register."""
    x = s.array()
    shape = s.types[x].shape
    axis = s.dice.randrange(len(shape))
    if shape[axis] < 2:
        raise ProgramError("too short")
    limit = [n - (i == axis) for i, n in enumerate(shape)]
    part = s.op("slice", x, start=[0] * len(shape), limit=limit, stride=[1] * len(shape))
    s.op("pad", part, value=0, sizes=[[int(i == axis), 0, 0] for i in range(len(shape))])


def concatenate(s: Scope) -> None:
    x = s.array()
    s.op("concatenate", x, s.like(x), axis=s.dice.randrange(len(s.types[x].shape)))


def reverse(s: Scope) -> None:
    x = s.array()
    rank = len(s.types[x].shape)
    s.op("reverse", x, axes=sorted(s.dice.sample(range(rank), s.dice.randint(1, rank))))


def roll(s: Scope) -> None:
    x = s.array()
    axis = s.dice.randrange(len(s.types[x].shape))
    s.op("roll", x, by=s.dice.randint(1, max(1, s.types[x].shape[axis] - 1)), axis=axis)


def indexed(s: Scope) -> tuple[int, int, int]:
    """An array, one of its axes, and indices that fit it."""
    i = s.role("index")
    limit = s.arguments[i].limit
    x = s.pick(lambda one: one.dtype != "pred" and any(n >= limit for n in one.shape))
    axis = s.dice.choice([axis for axis, n in enumerate(s.types[x].shape) if n >= limit])
    return x, axis, i


def gather(s: Scope) -> None:
    x, axis, i = indexed(s)
    s.op("gather", x, i, axis=axis, mode=s.of(("clip", "fill", "wrap")))


def scatter(s: Scope) -> None:
    x, axis, i = indexed(s)
    scatter_into(s, x, axis, i)


def scatter_into(s: Scope, x: int, axis: int, i: int) -> int:
    """Scatter part of something of the type of ``x`` into ``x``."""
    shape = list(s.types[x].shape)
    count = s.types[i].shape[0]
    if s.dice.random() < 0.4:
        part = s.op("full", shape=[*shape[:axis], count, *shape[axis + 1 :]], value=2, dtype=s.types[x].dtype)
    else:
        if count > shape[axis]:
            raise ProgramError("more indices than rows")
        limit = [*shape[:axis], count, *shape[axis + 1 :]]
        part = s.op("slice", s.like(x), start=[0] * len(shape), limit=limit, stride=[1] * len(shape))
    how = s.of(("add", "add", "set", "max", "mul"))
    return s.op(
        "scatter", x, i, part, how=how, axis=axis, unique=s.dice.random() < 0.5, mode=s.of(("fill", "clip"))
    )


def starts(s: Scope, shape: tuple[int, ...]) -> list[int]:
    """Where to begin along each axis: a number that is not known before the step runs, or 0."""
    try:
        moving = s.role("scalar") if s.depth == 0 else s.pick(lambda one: one == Type("s32"))
    except ProgramError:
        moving = -1
    zero = s.op("full", shape=[], value=s.dice.choice((0, 0, 1)), dtype="s32")
    return [moving if moving >= 0 and s.dice.random() < 0.7 else zero for _ in shape]


def dynamic_slice(s: Scope) -> None:
    x = s.array()
    shape = s.types[x].shape
    size = [s.dice.randint(1, n) for n in shape]
    s.op("dynamic_slice", x, *starts(s, shape), size=size)


def dynamic_update(s: Scope) -> None:
    update_in_place(s, s.array())


def update_in_place(s: Scope, x: int) -> int:
    """Write part of another array, or of ``x`` itself, into ``x``."""
    shape = s.types[x].shape
    size = [s.dice.randint(1, n) for n in shape]
    # XLA:CPU itself is wrong where the update is cut from the array that it writes to.
    source = s.like(x)
    if source == x:
        source = s.op("scale", x, by=2, plus=1)
    part = s.op("slice", source, start=[0] * len(shape), limit=size, stride=[1] * len(shape))
    if s.dice.random() < 0.5:
        part = s.op("scale", part, by=3, plus=1)
    return s.op("dynamic_update_slice", x, part, *starts(s, shape))


def window(s: Scope) -> None:
    x = s.array()
    window_over(s, x)


def window_over(s: Scope, x: int) -> int:
    """Sums or maxima over a window along an axis, of as many elements or fewer."""
    shape = s.types[x].shape
    axis = s.dice.randrange(len(shape))
    width = s.dice.randint(2, max(2, shape[axis]))
    size = [width if i == axis else 1 for i in range(len(shape))]
    if s.dice.random() < 0.7:
        padding = [[width - 1, 0] if i == axis else [0, 0] for i in range(len(shape))]
        return s.op(
            "window", x, how=s.of(("sum", "max")), size=size, stride=[1] * len(shape), padding=padding
        )
    if shape[axis] < width:
        raise ProgramError("narrower than its window")
    return s.op("window", x, how=s.of(("sum", "max")), size=size, stride=size, padding=[[0, 0]] * len(shape))


def cumulative(s: Scope) -> None:
    cumulative_over(s, s.array())


def cumulative_over(s: Scope, x: int) -> int:
    """A running sum, maximum or log-sum-exp along an axis."""
    how = s.of(("sum", "sum", "max", "logsumexp") if s.types[x].is_float else ("sum", "max"))
    axis = s.dice.randrange(len(s.types[x].shape))
    return s.op("cumulative", x, how=how, axis=axis, reverse=s.dice.random() < 0.3)


def dot(s: Scope) -> None:
    x = s.pick(lambda one: len(one.shape) == 2)
    dtype, shape = s.types[x].dtype, s.types[x].shape
    if dtype == "pred":
        raise ProgramError("no product of booleans")
    y = s.pick(lambda one: len(one.shape) == 2 and one.dtype == dtype and bool({*one.shape} & {*shape}))
    pairs = [(i, j) for i in (0, 1) for j in (0, 1) if shape[i] == s.types[y].shape[j]]
    i, j = s.dice.choice(pairs)
    s.op("dot", x, y, contract=[[i], [j]], batch=[[], []])


def batched_dot(s: Scope) -> None:
    x = s.pick(lambda one: len(one.shape) == 3 and one.dtype != "pred")
    y = s.like(x)
    axes = s.dice.sample(range(3), 2)
    s.op("dot", x, y, contract=[[axes[0]], [axes[0]]], batch=[[axes[1]], [axes[1]]])


def conv(s: Scope) -> None:
    x = s.pick(lambda one: len(one.shape) == 3 and one.is_float)
    shape, dtype = s.types[x].shape, s.types[x].dtype
    w = s.op("full", shape=[2, shape[1], 3], value=0.5, dtype=dtype)
    ramp = s.op("convert", s.op("iota", shape=[2, shape[1], 3], axis=2), to=dtype)
    s.op(
        "conv",
        x,
        s.op("add", w, ramp),
        stride=[s.dice.choice((1, 2))],
        padding=s.of(("SAME", "SAME", "VALID")),
    )


def rng(s: Scope) -> None:
    k = s.role("key")
    like = s.types[s.array()]
    how = s.of(("uniform", "normal")) if like.is_float else "bits"
    y = s.op("random", k, how=how, shape=list(like.shape))
    if s.types[y].dtype != like.dtype:
        s.op("convert", y, to=like.dtype)


def sort(s: Scope) -> None:
    x = s.array()
    axis = s.dice.randrange(len(s.types[x].shape))
    if s.exact[x] and s.dice.random() < 0.4:
        s.ops("sort_pairs", [x, s.like(x)], {"axis": axis})
    elif s.exact[x] and s.dice.random() < 0.4:
        s.op("argmax", x, axis=axis)
    else:
        s.op("sort", x, axis=axis)


def barrier(s: Scope) -> None:
    x = s.array()
    s.ops("barrier", [x, s.like(x)])


PLAIN: list[tuple[int, Production]] = [
    (8, unary), (4, scale), (12, binary), (3, select), (3, convert), (5, reduce), (2, broadcast), (5, transpose),
    (5, reshape), (3, slices), (2, pad), (2, slice_and_pad_back), (2, concatenate), (3, reverse), (1, roll),
    (3, gather), (5, scatter), (2, dynamic_slice), (4, dynamic_update), (4, window), (4, cumulative), (4, dot),
    (1, batched_dot), (1, conv), (2, rng), (2, sort), (1, barrier),
]  # fmt: skip
