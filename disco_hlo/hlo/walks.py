"""Walks along whatever hangs together: nodes, instructions, computations, units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from graphlib import CycleError
from typing import TypeVar

_Of = TypeVar("_Of")


def reached(starts: Iterable[_Of], following: Callable[[_Of], Iterable[_Of]]) -> dict[_Of, None]:
    """The starts and all that one comes to from them, each once."""
    found = dict.fromkeys(starts)
    pending = list(found)
    while pending:
        new = dict.fromkeys(one for one in following(pending.pop()) if one not in found)
        found |= new
        pending += new
    return found


def needed_first(starts: Iterable[_Of], needs: Callable[[_Of], Iterable[_Of]]) -> dict[_Of, None]:
    """The starts and all that they need, depth first, each behind what it needs itself.

    Raises:
        CycleError: one needs itself, through others or not; it is the second argument.
    """
    found: dict[_Of, None] = {}
    for start in starts:
        path = {} if start in found else {start: iter(needs(start))}
        while path:
            one, left = next(reversed(path.items()))
            ahead = next((other for other in left if other not in found), None)
            if ahead is None:
                del path[one]
                found[one] = None
            elif ahead in path:
                raise CycleError("it needs itself", ahead)
            else:
                path[ahead] = iter(needs(ahead))
    return found
