"""Random programs by seed: which values there are to choose from, and how a program comes about.

What may be put next to what is in ``productions`` (plain ops), ``sharing`` (ops whose values share memory, where faults
lie) and ``nested`` (branches, loops, collectives).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.fuzz.build import Builder
from tests.fuzz.program import Program, ProgramError, Type

_SIZES = (2, 3, 4, 6, 8, 12)
MOST_ELEMENTS = 4096
Production = Callable[["Scope"], None]


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

    def pick(self, fits: Callable[[Type], bool] = lambda _: True, *, exact: bool = False) -> int:
        """A value of a type that fits, more often a late one.

        Raises:
            ProgramError: there is none.
        """
        found = [
            x
            for x, one in enumerate(self.types)
            if fits(one) and (self.exact[x] or not exact) and self.is_number(x)
        ]
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

    def role(self, role: str, fits: Callable[[int], bool] = lambda _: True) -> int:
        """An argument of a role.

        Raises:
            ProgramError: there is none.
        """
        found = [x for x, one in enumerate(self.arguments) if one.role == role and fits(x)]
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


def generate(seed: int, max_devices: int = 4) -> Program:
    """The program of a seed."""
    from tests.fuzz.templates import TEMPLATES, vary

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
            one and _divides(body.types[x], devices) for one, x in zip(sharded, results, strict=True)
        )
    small_calls = dice.random() < 0.25
    return Program(body, tuple(scope.arguments), devices, mode, sharded, seed, small_calls)


def productions_of(scope: Scope) -> list[tuple[int, Production]]:
    """What may come next in a body, each with its weight."""
    from tests.fuzz.nested import COLLECTIVE, NESTED
    from tests.fuzz.productions import PLAIN
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


def _divides(of: Type, devices: int) -> bool:
    return bool(of.shape) and of.shape[0] % devices == 0
