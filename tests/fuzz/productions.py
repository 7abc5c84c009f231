"""Plain ops for the grammar: each takes what a scope has and adds an op or two."""

from __future__ import annotations

from tests.fuzz.grammar import MOST_ELEMENTS, Production, Scope
from tests.fuzz.program import ProgramError, Type


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
