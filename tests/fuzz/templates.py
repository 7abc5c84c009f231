"""Steps that were once computed wrongly, written as programs, with variants.

Their values share memory: a branch that hands its operand on, a donated argument that is read through a reshape, a
result that is another's bitcast. What the grammar makes at random lies near them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.build import Builder
from tests.fuzz.program import Argument, Body, Op, Program, ProgramError, Type


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
