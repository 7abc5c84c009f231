"""The moves of the search: one file each, legality checked before anything is changed for good.

Every move takes ``(g, s, w, a, b)`` and returns whether it was made. One that is refused leaves the
state as it was; one that was made can be undone with ``state.roll_back``.
"""
