"""Branches, loops and collectives for the grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.fuzz.grammar import Production, Scope, grow, inner_exact, productions_of
from tests.fuzz.program import Body, Op, ProgramError, Type
from tests.fuzz.sharing import moved, viewed, viewed_back


def _inside(s: Scope, op: Op, operands: Sequence[int], types: Sequence[Type], *, collectives: bool) -> Scope:
    exact = inner_exact(op, [s.types[x] for x in operands], [s.exact[x] for x in operands])
    return Scope(s.dice, types, exact, devices=s.devices if collectives else 1, depth=s.depth + 1)


def _new_value(inner: Scope, like: Type, old: int) -> int:
    """A value of the type of ``like`` that was made inside; made of ``old`` where there is none."""
    made = [x for x in range(len(inner.parameters), len(inner.types)) if inner.types[x] == like]
    if made and inner.dice.random() < 0.8:
        return inner.dice.choice(made)
    return changed(inner, old)


def changed(s: Scope, x: int) -> int:
    """``x`` with other elements, of the same type: in place, by others of its elements, or each by itself."""
    how = s.dice.randrange(4)
    if how == 0 and s.types[x].shape:
        y = moved(s, viewed(s, x)) if s.dice.random() < 0.4 else moved(s, x)
        return s.op("sub", x, viewed_back(s, y, x))
    if how == 1 and s.types[x].is_float:
        return s.op("tanh", x)
    return s.op("scale", x, by=s.dice.choice((1, 2)), plus=1)


def cond(s: Scope) -> None:
    """Branches of which one may hand an operand on, update it, or change two of them over."""
    p = s.role("scalar") if s.depth == 0 else s.pick(lambda one: one == Type("s32"))
    x = s.donated() if s.dice.random() < 0.3 else s.array()
    if s.dice.random() < 0.5:
        x = s.op("scale", x, by=2, plus=0)
    operands = [x, s.like(x)] if s.dice.random() < 0.6 else [x]
    if s.dice.random() < 0.3:
        operands.append(s.array())
    types = [s.types[y] for y in operands]
    count = 1 if s.dice.random() < 0.6 or len(operands) < 2 else 2
    op = Op("cond", (p, *operands), ())
    bodies = []
    for number in range(s.dice.choice((2, 2, 3))):
        inner = _inside(s, op, op.operands, types, collectives=False)
        bodies.append(_branch(inner, types[:count], hands_on=number == 1 or s.dice.random() < 0.25))
    results = s.ops("cond", op.operands, bodies=bodies)
    if s.dice.random() < 0.6:
        s.op(s.of(("sub", "add")), s.like(x), x)
    if s.dice.random() < 0.5 and types[0] == s.types[results[0]]:
        s.results.append(s.op("sub", results[0], x))


def _branch(inner: Scope, results: Sequence[Type], *, hands_on: bool) -> Body:
    if hands_on:
        chosen = list(range(len(results)))
        if len(chosen) == 2 and results[0] == results[1] and inner.dice.random() < 0.4:
            chosen = chosen[::-1]
        return inner.body(*chosen)
    grow(inner, productions_of(inner), inner.dice.choice((0, 1, 3)))
    return inner.body(*(_new_value(inner, one, x) for x, one in enumerate(results)))


def scan(s: Scope) -> None:
    """A loop over rows, with what it carries and what it stacks."""
    length = s.dice.choice((2, 3, 4))
    rows = [x for x in range(len(s.types)) if s.types[x].shape[:1] == (length,) and s.is_number(x)]
    carried = [s.donated() if s.dice.random() < 0.5 else s.array()]
    if s.dice.random() < 0.4:
        carried.append(s.like(carried[0]))
    sliced = [s.dice.choice(rows)] if rows and s.dice.random() < 0.7 else []
    captured = [s.array()] if s.dice.random() < 0.5 else []
    attributes: dict[str, Any] = {
        "carried": len(carried), "sliced": len(sliced), "length": length, "reverse": s.dice.random() < 0.2,
        "unroll": s.dice.choice((1, 1, 1, length)),
    }  # fmt: skip
    operands = [*carried, *sliced, *captured]
    types = [s.types[x] for x in operands]
    for i in range(len(carried), len(carried) + len(sliced)):
        types[i] = Type(types[i].dtype, types[i].shape[1:])
    op = Op("scan", tuple(operands), (), attributes)
    inner = _inside(s, op, operands, types, collectives=True)
    grow(inner, productions_of(inner), s.dice.choice((0, 1, 2, 4)))
    results = _carried_on(inner, len(carried))
    made = [x for x, one in enumerate(inner.types) if one.elements * length <= 1024]
    results += [s.dice.choice(made) for _ in range(s.dice.choice((0, 1, 1, 2))) if made]
    s.ops("scan", operands, attributes, (inner.body(*results),))
    if s.dice.random() < 0.4:
        s.op(s.of(("neg", "abs")), carried[0])


def loop(s: Scope) -> None:
    """A while or fori loop with carried arrays."""
    carried = [s.donated() if s.dice.random() < 0.5 else s.array()]
    for _ in range(s.dice.choice((0, 1, 1, 2))):
        carried.append(s.like(carried[0]) if s.dice.random() < 0.6 else s.array())
    captured = [s.array()] if s.dice.random() < 0.4 else []
    how = s.of(("while", "fori"))
    if s.depth == 0 and how == "while":
        trips = s.role("scalar")
    else:
        trips = s.op("full", shape=[], value=2, dtype="s32")
    attributes: dict[str, Any] = {"carried": len(carried), "most": s.dice.choice((1, 2, 3, 5)), "how": how}
    op = Op("while", (trips, *carried, *captured), (), attributes)
    types = [Type("s32"), *(s.types[x] for x in (*carried, *captured))]
    inner = _inside(s, op, op.operands, types, collectives=True)
    grow(inner, productions_of(inner), s.dice.choice((0, 1, 2, 4)))
    s.ops("while", op.operands, attributes, (inner.body(*_carried_on(inner, len(carried), first=1)),))
    if s.dice.random() < 0.4:
        s.op(s.of(("neg", "abs")), carried[0])


def _carried_on(inner: Scope, count: int, first: int = 0) -> list[int]:
    """What a loop's body hands to its next turn: new values, some as they were, some changed over."""
    results = []
    for x in range(first, first + count):
        hands_on = inner.dice.random() < 0.2 and count > 1
        results.append(x if hands_on else _new_value(inner, inner.types[x], x))
    if count > 1 and inner.types[first] == inner.types[first + 1] and inner.dice.random() < 0.35:
        results[0], results[1] = (
            (first + 1, results[0]) if inner.dice.random() < 0.5 else (results[1], results[0])
        )
    return results


def layers(s: Scope) -> None:
    """A scan as trainers write it: a state, the weights of each layer, states saved in an array that is updated in
    place, and something that all layers read. Several collectives of a layer may travel together."""
    length = s.dice.choice((2, 3, 4))
    x = s.array(most=2)
    shape, dtype = list(s.types[x].shape), s.types[x].dtype
    if s.types[x].elements * length > 1024:
        raise ProgramError("too large")
    wide = [length, *shape]
    rows = s.op("broadcast", s.like(x), shape=wide, axes=[*range(1, len(wide))])
    ramp = s.op("convert", s.op("iota", shape=wide, axis=0), to=dtype)
    saved = s.op("full", shape=wide, value=1, dtype=dtype)
    counter = s.op("full", shape=[], value=0, dtype="s32")
    carried = [x, s.like(x), saved, counter]
    operands = [*carried, s.op("add", rows, ramp), s.op("sub", rows, ramp), s.array()]
    attributes: dict[str, Any] = {
        "carried": 4, "sliced": 2, "length": length, "reverse": s.dice.random() < 0.3, "unroll": 1,
    }  # fmt: skip
    types = [s.types[y] for y in operands]
    types[4:6] = [Type(dtype, tuple(shape))] * 2
    inner = _inside(s, Op("scan", tuple(operands), (), attributes), operands, types, collectives=True)
    body = inner.body(*_layer(inner))
    found = s.ops("scan", operands, attributes, (body,))
    if s.dice.random() < 0.3:  # two loops of one body
        found = s.ops("scan", [*found[:3], *operands[3:]], attributes, (body,))
    s.results += found[: s.dice.choice((1, 3))]


def _layer(s: Scope) -> list[int]:
    """The body of :func:`layers`: what it carries on, and what it stacks."""
    x, other, saved, counter, weight, bias = range(6)
    if s.devices > 1:
        weight, bias = _gathered(s, weight, bias)
    if s.dice.random() < 0.6:
        grow(s, productions_of(s), s.dice.choice((1, 2, 3)))
    if s.depth == 1 and s.dice.random() < 0.3:
        grow(s, NESTED, 1)
    y = s.op(s.of(("mul", "add", "sub")), changed(s, x), weight)
    z = s.op(s.of(("add", "sub", "max")), y, bias)
    part = s.op(
        "broadcast",
        s.dice.choice((x, z)),
        shape=[1, *s.types[x].shape],
        axes=[*range(1, len(s.types[x].shape) + 1)],
    )
    zero = s.op("full", shape=[], value=0, dtype="s32")
    updated = s.op("dynamic_update_slice", saved, part, counter, *[zero] * len(s.types[x].shape))
    late = s.op(s.of(("sub", "add")), z, x)
    read = s.op("dynamic_slice", s.dice.choice((saved, updated)), zero, *[zero] * len(s.types[x].shape),
                size=[1, *s.types[x].shape])  # fmt: skip
    stacked = s.dice.sample((late, y, x, read), s.dice.choice((0, 1, 2)))
    state = (z, s.dice.choice((other, late, y, x)))
    if s.dice.random() < 0.4:
        state = state[::-1]
    return [*state, updated, s.op("scale", counter, by=1, plus=1), *stacked]


def _gathered(s: Scope, *parts: int) -> list[int]:
    """These values as a collective over all devices changes them; all in one way, so that XLA may combine them."""
    how = s.of(("psum", "psum", "all_gather", "psum_scatter", "none"))
    if how == "psum":
        return [s.ops("psum", [x])[0] for x in parts]
    shape = list(s.types[parts[0]].shape)
    if how == "all_gather":
        wide = [s.op("all_gather", x, axis=0) for x in parts]
        start = [0] * len(shape)
        return [s.op("slice", x, start=start, limit=shape, stride=[1] * len(shape)) for x in wide]
    if how == "psum_scatter" and shape[0] % s.devices == 0:
        return [s.op("all_gather", s.op("psum_scatter", x, axis=0), axis=0) for x in parts]
    return list(parts)


NESTED: list[tuple[int, Production]] = [(6, cond), (5, scan), (5, loop), (3, layers)]


# Collectives -------------------------------------------------------------------------------------


def psum(s: Scope) -> None:
    """Sums over all devices or some, of one array or several at once."""
    operands = [s.array() if s.dice.random() < 0.8 else s.pick(lambda one: one.dtype != "pred")]
    operands += [s.array() for _ in range(s.dice.choice((0, 0, 1, 2)))]
    attributes: dict[str, Any] = {}
    if s.devices % 2 == 0 and s.dice.random() < 0.2:
        half = s.devices // 2
        attributes["groups"] = [list(range(half)), list(range(half, s.devices))]
    name = "psum" if s.dice.random() < 0.85 else "pmax"
    s.ops(name, operands, attributes)


def gradients(s: Scope) -> None:
    """Several sums apart, each applied to an argument: what goes into buckets."""
    for _ in range(s.dice.choice((2, 2, 3))):
        p = s.donated() if s.dice.random() < 0.6 else s.array()
        g = s.op(s.of(("neg", "abs")), s.like(p)) if s.dice.random() < 0.7 else s.like(p)
        (total,) = s.ops("psum", [viewed(s, g) if s.dice.random() < 0.3 else g])
        s.results.append(s.op("sub", p, viewed_back(s, total, p)))


def all_gather(s: Scope) -> None:
    x = s.pick(lambda one: len(one.shape) > 0 and one.dtype != "pred" and one.elements <= 512)
    s.op("all_gather", x, axis=s.dice.randrange(len(s.types[x].shape)))


def _divisible(s: Scope) -> tuple[int, int]:
    x = s.pick(lambda one: one.dtype != "pred" and any(n % s.devices == 0 for n in one.shape))
    return x, s.dice.choice([axis for axis, n in enumerate(s.types[x].shape) if n % s.devices == 0])


def psum_scatter(s: Scope) -> None:
    x, axis = _divisible(s)
    y = s.op("psum_scatter", x, axis=axis)
    if s.dice.random() < 0.5:
        s.op("all_gather", s.op("scale", y, by=2, plus=1), axis=axis)


def all_to_all(s: Scope) -> None:
    x, axis = _divisible(s)
    s.op("all_to_all", x, axis=axis)


def ppermute(s: Scope) -> None:
    x = s.array()
    s.op("ppermute", x, pairs=[[d, (d + 1) % s.devices] for d in range(s.devices)])


COLLECTIVE: list[tuple[int, Production]] = [
    (8, psum), (6, gradients), (2, all_gather), (2, psum_scatter), (1, all_to_all), (1, ppermute),
]  # fmt: skip
