"""A topological order that is kept up while edges are added (Pearce and Kelly, 2006)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence


class RunningOrder:
    """The order of ops that wait for each other; an edge that would close a circle is told, not added."""

    def __init__(self, operands: Sequence[Sequence[int]]) -> None:
        self._before: list[list[int]] = [list(read) for read in operands]
        self._after: list[list[int]] = [[] for _ in operands]
        for op, read in enumerate(operands):
            for operand in read:
                self._after[operand].append(op)
        self._rank = list(range(len(operands)))

    def add(self, first: int, second: int) -> bool:
        """Let one op run before another; False, and nothing is added, where it must run after it."""
        if first == second:
            return False
        if self._rank[first] > self._rank[second] and not self._move(first, second):
            return False
        self._before[second].append(first)
        self._after[first].append(second)
        return True

    def add_all(self, pairs: Iterable[tuple[int, int]]) -> bool:
        """:meth:`add` for all pairs, or for none where one is refused."""
        added: list[tuple[int, int]] = []
        for first, second in pairs:
            if not self.add(first, second):
                for one, other in added:
                    self._before[other].remove(one)
                    self._after[one].remove(other)
                return False
            added.append((first, second))
        return True

    def _move(self, first: int, second: int) -> bool:
        rank = self._rank
        later = self._reached(second, self._after, lambda op: rank[op] <= rank[first])
        if first in later:
            return False
        earlier = self._reached(first, self._before, lambda op: rank[op] >= rank[second])
        moved = [*sorted(earlier, key=rank.__getitem__), *sorted(later, key=rank.__getitem__)]
        places = sorted(rank[op] for op in moved)
        for op, place in zip(moved, places, strict=True):
            rank[op] = place
        return True

    @staticmethod
    def _reached(start: int, edges: list[list[int]], within: Callable[[int], bool]) -> set[int]:
        seen, pending = {start}, [start]
        while pending:
            for op in edges[pending.pop()]:
                if op not in seen and within(op):
                    seen.add(op)
                    pending.append(op)
        return seen
