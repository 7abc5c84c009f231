"""Exactly how two plans of one training step differ: kernels, buckets, order, and where they come from.

Units are told apart by their nodes, not by their numbers: two plans number alike only by chance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from disco_hlo.errors import PlanError
from disco_hlo.plan.plan import Bucket, Group, Plan, Strategy


@dataclass(frozen=True, slots=True)
class GroupChange:
    """A group of one plan that the other does not have, with the groups there that share ops with it."""

    token: str
    group: Group
    shares_with: tuple[str, ...]
    """Tokens in the other plan, of groups (``g3``) and of ops that stand alone there (``n17``)."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective that is in another bucket."""

    all_reduce: int
    bucket_a: str
    bucket_b: str


@dataclass(frozen=True)
class Difference:
    """How plan B differs from plan A."""

    common_groups: int
    groups_a: tuple[GroupChange, ...]
    """Only in A."""
    groups_b: tuple[GroupChange, ...]
    """Only in B."""
    common_buckets: int
    buckets_a: tuple[tuple[str, Bucket], ...]
    buckets_b: tuple[tuple[str, Bucket], ...]
    moved_all_reduces: tuple[Moved, ...]
    common_units: int
    moved_units: tuple[str, ...]
    """Fewest units that both have and that must be moved to turn one order into the other, as B
    calls them. Empty where one of the orders is not known."""

    @property
    def same(self) -> bool:
        """Whether both execute the same."""
        return not (self.groups_a or self.groups_b or self.buckets_a or self.buckets_b or self.moved_units)


def require_comparable(a: Plan, b: Plan) -> None:
    """Refuse plans of two training steps.

    Raises:
        PlanError: naming both.
    """
    left, right = a.target, b.target
    if left.key != right.key:
        raise PlanError(
            f"these plans do not compare: one is for {left.module_name!r} ({left.key[:16]}), "
            f"the other for {right.module_name!r} ({right.key[:16]}), another training step"
        )
    made = ["XLA's" if one.structure is UNSET else one.structure.name for one in (a, b)]
    if a.ops_key != b.ops_key:
        raise PlanError(
            f"these plans do not compare: the step's structure is {made[0]} in one and {made[1]} in the other, so "
            "that their ops are not the same"
        )


def compare(a: Strategy, b: Strategy) -> Difference:
    """How ``b`` differs from ``a``; both of one graph, in normal form where that is possible."""
    keys_a, keys_b = _unit_keys(a), _unit_keys(b)
    groups_a = {group: f"g{i}" for i, group in enumerate(a.groups)}
    groups_b = {group: f"g{i}" for i, group in enumerate(b.groups)}
    buckets_a = {bucket: f"b{i}" for i, bucket in enumerate(a.buckets)}
    buckets_b = {bucket: f"b{i}" for i, bucket in enumerate(b.buckets)}
    home_a = {node: token for bucket, token in buckets_a.items() for node in bucket.all_reduces}
    home_b = {node: token for bucket, token in buckets_b.items() for node in bucket.all_reduces}
    only_a = {bucket: token for bucket, token in buckets_a.items() if bucket not in buckets_b}
    only_b = {bucket: token for bucket, token in buckets_b.items() if bucket not in buckets_a}
    regrouped = sorted(node for bucket in only_b for node in bucket.all_reduces)
    place_b = [keys_b[token] for token in b.order]
    known = set(place_b)
    place_a = [keys_a[token] for token in a.order if keys_a[token] in known]
    return Difference(
        common_groups=len(groups_a.keys() & groups_b.keys()),
        groups_a=_changes(groups_a, groups_b),
        groups_b=_changes(groups_b, groups_a),
        common_buckets=len(buckets_a.keys() & buckets_b.keys()),
        buckets_a=tuple((token, bucket) for bucket, token in only_a.items()),
        buckets_b=tuple((token, bucket) for bucket, token in only_b.items()),
        moved_all_reduces=tuple(Moved(n, home_a[n], home_b[n]) for n in regrouped if n in home_a),
        common_units=len(place_a),
        moved_units=_moved(place_a, place_b, b.order),
    )


def _changes(mine: dict[Group, str], other: dict[Group, str]) -> tuple[GroupChange, ...]:
    inside: dict[int, list[str]] = {}
    for group, token in other.items():
        for node in (*group.nodes, *group.duplicates):
            inside.setdefault(node, []).append(token)
    changes = []
    for group, token in mine.items():
        if group in other:
            continue
        nodes = (*group.nodes, *group.duplicates)
        shares = dict.fromkeys(found for node in nodes for found in inside.get(node, [f"n{node}"]))
        changes.append(GroupChange(token, group, tuple(shares)))
    return tuple(changes)


def _unit_keys(strategy: Strategy) -> dict[str, Hashable]:
    """What a token of the order stands for, whatever its number."""
    keys: dict[str, Hashable] = {}
    for token in strategy.order:
        name, _, part = token.partition(".")
        number = int(name[1:])
        if name[0] == "g":
            keys[token] = strategy.groups[number]
        elif name[0] == "b":
            keys[token] = (strategy.buckets[number], part)
        else:
            keys[token] = number
    return keys


def _moved(
    place_a: Sequence[Hashable], place_b: Sequence[Hashable], names_b: Sequence[str]
) -> tuple[str, ...]:
    """The units of B outside a longest run of units that stand in the same order in A."""
    rank = {key: i for i, key in enumerate(place_a)}
    shared = [(rank[key], name) for key, name in zip(place_b, names_b, strict=True) if key in rank]
    ends: list[int] = []
    ends_at: list[int] = []
    before: list[int] = []
    for position, (value, _) in enumerate(shared):
        slot = bisect_left(ends, value)
        before.append(ends_at[slot - 1] if slot else -1)
        ends[slot : slot + 1] = [value]
        ends_at[slot : slot + 1] = [position]
    kept: set[int] = set()
    position = ends_at[-1] if ends_at else -1
    while position >= 0:
        kept.add(position)
        position = before[position]
    return tuple(name for i, (_, name) in enumerate(shared) if i not in kept)
