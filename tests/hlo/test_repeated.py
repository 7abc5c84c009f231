"""Modules that are small as files and without end once everything that is called is looked at again and again."""

from __future__ import annotations

import time

import pytest

from disco_hlo.errors import ModuleError
from disco_hlo.hlo.canonical import CanonicalModule, canonicalize
from tests.hlo.small_modules import module_of

LEVELS = 40


def twice(call: str) -> str:
    """Computations of which each calls the next one twice."""
    parts = ["%f0 (p: f32[8]) -> f32[8] {\n %p = f32[8]{0} parameter(0)\n ROOT %n = f32[8]{0} negate(%p)\n}"]
    for level in range(1, LEVELS):
        one, two = (call.format(operand, level - 1) for operand in ("p", "a"))
        parts.append(
            f"%f{level} (p: f32[8]) -> f32[8] {{\n %p = f32[8]{{0}} parameter(0)\n %a = f32[8]{{0}} {one}\n "
            f"ROOT %b = f32[8]{{0}} {two}\n}}"
        )
    return "\n\n".join(parts)


def tuples() -> str:
    """A kernel that makes a tuple of a tuple, twice, of a tuple, twice, and so on."""
    shape, lines = "f32[8]{0}", [" %t0 = f32[8]{0} parameter(0)"]
    for level in range(1, 12):
        shape = f"({shape}, {shape})"
        lines.append(f" %t{level} = {shape} tuple(%t{level - 1}, %t{level - 1})")
    lines.append(' ROOT %whole = f32[8]{0} custom-call(%t11), custom_call_target="whole"')
    return "\n".join(["%f0 (p: f32[8]) -> f32[8] {", *lines, "}"])


def canonical(computations: str, call: str, last: int) -> CanonicalModule:
    entry = "ENTRY %main (x: f32[8]) -> f32[8] {\n %x = f32[8]{0} parameter(0)\n ROOT %y = f32[8]{0} "
    text = f"HloModule jit_step, is_scheduled=true\n\n{computations}\n\n{entry}{call.format('x', last)}\n}}\n"
    return canonicalize(module_of(text))


@pytest.mark.parametrize("computations", [twice("fusion(%{}), kind=kLoop, calls=%f{}"), tuples()])
def test_kernels_that_repeat_each_other_without_end_are_refused(computations: str) -> None:
    last = LEVELS - 1 if f"%f{LEVELS - 1} " in computations else 0
    with pytest.raises(
        ModuleError, match="computation 'main' repeats what it calls until it holds more than"
    ):
        canonical(computations, "fusion(%{}), kind=kLoop, calls=%f{}", last)


def test_what_a_computation_overwrites_is_found_once_however_often_it_is_called() -> None:
    call = "call(%{}), to_apply=%f{}"
    started = time.monotonic()
    assert canonical(twice(call), call, LEVELS - 1).graph.inplace == ()
    assert time.monotonic() - started < 10


def nested_loops(members: int, depth: int) -> str:
    """Loops of which each runs the next one, which changes all that they carry."""
    shape = f"({', '.join(['f32[8]'] * members)})"
    numbers = range(members)
    made = f"ROOT %t = {shape} tuple({', '.join(f'%m{i}' for i in numbers)})"

    def elements(of: str, names: str) -> list[str]:
        return [f"%{names}{i} = f32[8] get-tuple-element(%{of}), index={i}" for i in numbers]

    parts = [[f"%go (q: {shape}) -> pred[] {{", f"%q = {shape} parameter(0)", "ROOT %c = pred[] constant(1)"]]
    changed = [f"%m{i} = f32[8] negate(%k{i})" for i in numbers]
    parts.append(
        [f"%l0 (p: {shape}) -> {shape} {{", f"%p = {shape} parameter(0)", *elements("p", "k"), *changed, made]
    )
    for level in range(1, depth):
        loop = f"%w = {shape} while(%p), condition=%go, body=%l{level - 1}"
        head = f"%l{level} (p: {shape}) -> {shape} {{"
        parts.append([head, f"%p = {shape} parameter(0)", loop, *elements("w", "m"), made])
    given = [f"%x{i} = f32[8] parameter({i})" for i in numbers]
    start = f"%s = {shape} tuple({', '.join(f'%x{i}' for i in numbers)})"
    loop = f"%w = {shape} while(%s), condition=%go, body=%l{depth - 1}"
    result = "ROOT %y = f32[8] get-tuple-element(%w), index=0"
    entry = f"ENTRY %main ({', '.join(f'x{i}: f32[8]' for i in numbers)}) -> f32[8] {{"
    parts.append([entry, *given, start, loop, result])
    return "\n\n".join(
        ["HloModule jit_step, is_scheduled=true", *("\n ".join(part) + "\n}" for part in parts)]
    )


def test_what_nested_loops_only_read_is_found_once_for_each_loop() -> None:
    module = module_of(nested_loops(members=24, depth=6))
    started = time.monotonic()
    assert len(canonicalize(module).graph.inplace) == 24
    assert time.monotonic() - started < 10
