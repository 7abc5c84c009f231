"""Ops whose values share memory, near which faults were found.

These are in-place updates that are read late, a value under two names, results that are one value, and arguments that
change places.

Templates are steps that were once computed wrongly, written as programs, with variants; what the grammar makes at
random lies near them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.grammar import (
    Builder,
    Production,
    Scope,
    another_shape,
    cumulative_over,
    indexed,
    scatter_into,
    update_in_place,
    window_over,
)
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type


def viewed(s: Scope, x: int) -> int:
    """The elements of ``x`` in another shape or order, as a bitcast may show them."""
    shape = s.types[x].shape
    if s.dice.random() < 0.5 and len(shape) > 1:
        return s.op("transpose", x, axes=s.a_permutation(len(shape)))
    return s.op("reshape", x, shape=another_shape(s, s.types[x]))


def viewed_back(s: Scope, x: int, like: int) -> int:
    """``x`` with the shape of ``like``."""
    if s.types[x].shape == s.types[like].shape:
        return x
    if s.types[x].elements != s.types[like].elements:
        raise ProgramError("not as many elements")
    return s.op("reshape", x, shape=list(s.types[like].shape))


def moved(s: Scope, x: int) -> int:
    """As many elements as ``x`` has, each made of others than the one in its place."""
    shape = s.types[x].shape
    how = s.dice.randrange(5)
    if how == 0 and len(shape) > 1:
        return s.op("transpose", x, axes=s.a_permutation(len(shape)))
    if how == 1:
        return s.op("reverse", x, axes=[s.dice.randrange(len(shape))])
    if how == 2:
        return s.op("roll", x, by=1, axis=s.dice.randrange(len(shape)))
    if how == 3:
        return cumulative_over(s, x)
    return window_over(s, x)


def read_through_a_view(s: Scope) -> None:
    """A donated argument, and itself read at other elements through a view."""
    x = s.donated()
    y = moved(s, viewed(s, x)) if s.dice.random() < 0.6 else moved(s, x)
    s.results.append(s.op(s.of(("sub", "add", "mul")), x, viewed_back(s, y, x)))


def running_state(s: Scope) -> None:
    """A running sum that two ops share."""
    z = s.op("scale", moved(s, s.donated()), by=s.dice.choice((1, 2)), plus=1)
    one, other = (s.op(s.of(("tanh", "abs", "neg")), z) if s.types[z].is_float else z for _ in range(2))
    s.results.append(s.op(s.of(("mul", "add", "sub")), one, other))


def with_its_transpose(s: Scope) -> None:
    """A square array and its transpose in one sum."""
    g = s.pick(lambda one: len(one.shape) == 2 and one.shape[0] == one.shape[1] and one.dtype != "pred")
    if s.dice.random() < 0.6:
        g = s.op("dot", g, s.like(g), contract=[[s.dice.randrange(2)], [s.dice.randrange(2)]], batch=[[], []])
    total = s.op(s.of(("add", "sub", "max")), g, s.op("transpose", g, axes=[1, 0]))
    if s.dice.random() < 0.5:
        w = s.like(total)
        s.results.append(s.op("sub", w, total))


def with_its_view(s: Scope) -> None:
    """An array and a view of it, both read by two ops."""
    x = s.array()
    y = viewed(s, x)
    s.op(s.of(("neg", "abs")), y)
    s.op(s.of(("add", "mul")), x, viewed_back(s, moved(s, y), x))


def view_and_update(s: Scope) -> None:
    """A view is returned, and the view with something written into it, too."""
    try:
        x, axis, i = indexed(s)
        if len(s.types[x].shape) == 2 and s.dice.random() < 0.7:
            view = s.op("transpose", x, axes=[1, 0])
            updated = scatter_into(s, view, 1 - axis, i)
        else:
            view = s.op("scale", x, by=1, plus=1) if s.dice.random() < 0.5 else x
            updated = scatter_into(s, view, axis, i)
    except ProgramError:
        view = viewed(s, s.array())
        updated = update_in_place(s, view)
    s.results += [view, s.op("scale", updated, by=3, plus=0) if s.dice.random() < 0.5 else updated]


def update_then_read(s: Scope) -> None:
    """An array is updated in place, and read after that as it was."""
    x = s.donated()
    s.results.append(update_in_place(s, x))
    s.results.append(s.op(s.of(("neg", "abs")), viewed(s, x) if s.dice.random() < 0.5 else x))


def same_value_twice(s: Scope) -> None:
    """A result, and a view of it or itself again as another result."""
    x = s.array()
    if s.dice.random() < 0.4:
        shape = list(s.types[x].shape)
        if s.types[x].elements > 1024:
            raise ProgramError("too large")
        x = s.op("broadcast", x, shape=[2, *shape], axes=[i + 1 for i in range(len(shape))])
    s.results += [x, x if s.dice.random() < 0.2 else viewed(s, x)]


def view_of_a_donated(s: Scope) -> None:
    """A donated argument is handed back in another shape, or as it is."""
    x = s.donated()
    s.results.append(viewed(s, x) if s.dice.random() < 0.7 else x)


def swapped(s: Scope) -> None:
    """Two donated arguments change places, changed or not."""
    x = s.donated()
    y = s.like(x)
    if x == y:
        raise ProgramError("nothing to change places with")
    s.results += [s.op("scale", y, by=2, plus=0) if s.dice.random() < 0.5 else y]
    s.results += [s.op("neg", x) if s.dice.random() < 0.5 else x]


def momentum(s: Scope) -> None:
    """As an optimizer does: the new state from the old, and the parameter from the new state."""
    p = s.donated()
    m, g = s.like(p), s.like(p)
    state = s.op("add", s.op("scale", m, by=3, plus=0), moved(s, g) if s.dice.random() < 0.3 else g)
    state = viewed_back(s, state, p)
    s.results += [s.op("sub", p, state), state]


SHARING: list[tuple[int, Production]] = [
    (4, read_through_a_view), (3, running_state), (3, with_its_transpose), (3, with_its_view), (4, view_and_update),
    (4, update_then_read), (3, same_value_twice), (2, view_of_a_donated), (2, swapped), (3, momentum),
]  # fmt: skip


def finish(s: Scope) -> list[int]:
    """What a program returns: what productions want, what nobody reads, and sometimes what has been read."""
    read = {x for op in s.ops_made for x in op.operands}
    unread = [x for x in range(len(s.parameters), len(s.types)) if x not in read]
    results = [*s.results, *unread]
    made = range(len(s.parameters), len(s.types))
    if made and s.dice.random() < 0.4:
        results.append(s.dice.choice(made))
    for x, one in enumerate(s.arguments):
        if one.role == "values" and s.dice.random() < 0.08:
            results.append(x)
    if results and s.dice.random() < 0.1:
        results.append(s.dice.choice(results))
    s.dice.shuffle(results)
    results = results[:6]
    if not any(x >= len(s.parameters) for x in results):
        raise ProgramError("nothing is computed")
    _donate_what_fits(s, results)
    return results


def _donate_what_fits(s: Scope, results: list[int]) -> None:
    """A donated argument that no result can take over stays the caller's: jax says so aloud."""
    free: list[Type] = [s.types[x] for x in results]
    for x, one in enumerate(s.arguments):
        if not one.donated:
            continue
        if s.types[x] in free:
            free.remove(s.types[x])
        elif s.dice.random() < 0.7:
            s.arguments[x] = type(one)(one.role, False, one.sharded, one.limit)


# Templates --------------------------------------------------------------------------------------


def cond_passes_its_operand_on(dtype: str = "f32") -> Program:
    """``cond(p > 0, v + 1, v)`` of ``x * 2``, which is read after it."""
    b = Builder()
    x, p = b.argument(dtype, 8), b.scalar(3)
    doubled = b.op("scale", x, by=2, plus=0)
    other = b.inner(dtype, 8)
    added = other.body(other.op("scale", 0, by=1, plus=1))
    handed_on = b.inner(dtype, 8).body(0)
    (chosen,) = b.ops("cond", [p, doubled], bodies=(added, handed_on))
    return b.program(b.op("sub", chosen, doubled), seed=1)


def donated_read_through_a_reshape(dtype: str = "f32") -> Program:
    """A window over ``x.reshape(8, 8)``, subtracted from the donated ``x``."""
    b = Builder()
    x = b.argument(dtype, 64, donated=True)
    square = b.op("reshape", x, shape=[8, 8])
    sums = b.op("window", square, how="sum", size=[8, 1], stride=[1, 1], padding=[[7, 0], [0, 0]])
    return b.program(b.op("sub", x, b.op("reshape", sums, shape=[64])))


def donated_cumsum(dtype: str = "f32", size: int = 4096) -> Program:
    """A running state: ``tanh(z) / (|z| + 1)`` of a cumulative sum."""
    b = Builder()
    h = b.argument(dtype, size, donated=True)
    z = b.op("scale", b.op("cumulative", h, how="sum", axis=0, reverse=False), by=0.5, plus=1)
    return b.program(b.op("div", b.op("tanh", z), z))


def transposed_scatter(dtype: str = "f32", product: bool = False) -> Program:
    """``x.T`` is returned, and ``x.T`` with something added to some rows, too."""
    b = Builder()
    x, i, part = b.argument(dtype, 8, 12), b.index(2, limit=12), b.argument(dtype, 2, 8)
    turned = b.op("transpose", x, axes=[1, 0])
    added = b.op("scatter", turned, i, part, how="add", axis=0, unique=False, mode="fill")
    return b.program(turned, b.op("scale", added, by=3, plus=0) if product else added)


def transposed_scatter_then_product(dtype: str = "f32") -> Program:
    """The same, and what was scattered is multiplied."""
    return transposed_scatter(dtype, product=True)


def two_results_one_buffer(dtype: str = "f32") -> Program:
    """A result and the same result reshaped."""
    b = Builder()
    both = b.op("broadcast", b.argument(dtype, 24), shape=[2, 24], axes=[1])
    return b.program(both, b.op("reshape", both, shape=[48]))


def sum_with_its_transpose(dtype: str = "f32", size: int = 64) -> Program:
    """``w - 0.1 * (g + g.T)``, ``w`` donated."""
    b = Builder()
    w, x = b.argument(dtype, size, size, donated=True), b.argument(dtype, 8, size)
    product = b.op("dot", x, w, contract=[[1], [0]], batch=[[], []])
    g = b.op("dot", b.op("tanh", x), b.op("tanh", product), contract=[[0], [0]], batch=[[], []])
    total = b.op("add", g, b.op("transpose", g, axes=[1, 0]))
    return b.program(b.op("sub", w, b.op("scale", total, by=0.1, plus=0)))


TEMPLATES = {
    one.__name__: one
    for one in (
        cond_passes_its_operand_on,
        donated_read_through_a_reshape,
        donated_cumsum,
        transposed_scatter,
        transposed_scatter_then_product,
        two_results_one_buffer,
        sum_with_its_transpose,
    )
}


def vary(template: Callable[[str], Program], dice: random.Random) -> Program:
    """A template in a random type, perhaps with a second donated argument, perhaps inside of a ``lax.scan``."""
    dtypes = ["f32", "f32", "bf16", "s32"]
    dice.shuffle(dtypes)
    for dtype in dtypes:
        try:
            program = template(dtype)
        except (ProgramError, TypeError):
            continue  # no tanh of integers
        if dice.random() < 0.4:
            program = with_another_donated(program, dice)
        return in_a_scan(program) if dice.random() < 0.35 else program
    raise ProgramError("no type fits the template")


def with_another_donated(program: Program, dice: random.Random) -> Program:
    """The same with one more of the arguments donated, or with one that is returned changed."""
    free = [i for i, one in enumerate(program.arguments) if one.role == "values" and not one.donated]
    arguments = list(program.arguments)
    if free:
        i = dice.choice(free)
        arguments[i] = replace(arguments[i], donated=True)
    return replace(program, arguments=tuple(arguments))


def in_a_scan(program: Program) -> Program:
    """The same step three times, on arguments that change: each value argument is carried on, doubled."""
    body = program.body
    values = [i for i, one in enumerate(program.arguments) if one.role == "values"]
    others = [i for i in range(len(program.arguments)) if i not in values]
    order = [*values, *others]
    place = {old: new for new, old in enumerate(order)}
    count = len(order)

    def renumbered(x: int) -> int:
        return place[x] if x < count else x

    ops = [replace(op, operands=tuple(map(renumbered, op.operands))) for op in body.ops]
    results = [renumbered(x) for x in body.results]
    types = [body.parameters[x] for x in order] + body.types[count:]
    carried: list[int] = []
    for i in range(len(values)):
        taken = next((x for x in results if x >= count and types[x] == types[i] and x not in carried), None)
        if taken is None:
            ops.append(Op("scale", (i,), (types[i],), {"by": 2, "plus": 1}))
            types.append(types[i])
            taken = len(types) - 1
        carried.append(taken)
    inner = Body(tuple(types[:count]), tuple(ops), (*carried, *results))
    attributes = {"carried": len(values), "sliced": 0, "length": 3, "reverse": False, "unroll": 1}
    gives = [types[i] for i in range(len(values))] + [
        Type(types[x].dtype, (3, *types[x].shape)) for x in results
    ]
    scan = Op("scan", tuple(order), tuple(gives), attributes, (inner,))
    outer = Body(body.parameters, (scan,), tuple(range(count, count + len(gives))))
    arguments: tuple[Argument, ...] = program.arguments
    return Program(outer, arguments, sharded=(False,) * len(gives), seed=program.seed)
