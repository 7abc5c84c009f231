"""The errors of the project: each says what was expected, what came, where, and what to do."""

from typing import Self


class DiscoError(Exception):
    """Base of every error raised on purpose; its text is one readable message."""

    shared = False
    """Whether every rank of the job has this very error. Then rank 0 speaks for all."""

    def on_all_ranks(self) -> Self:
        """This error, marked as one that every rank of the job has."""
        self.shared = True
        return self


class ModuleError(DiscoError):
    """An HLO module cannot be read or holds something the graph does not support."""


class PlanError(DiscoError):
    """A plan is malformed, of another version, or does not fit the module at hand."""


class IllegalStrategyError(PlanError):
    """A strategy asks for a rewrite that XLA could not execute correctly."""


class CircleError(IllegalStrategyError):
    """Units of a strategy wait for each other in a circle.

    Args:
        message: what waits for what.
        tokens: the units of the circle, as an order names them.
    """

    def __init__(self, message: str, tokens: tuple[str, ...]) -> None:
        super().__init__(message)
        self.tokens = tokens


class IllegalMoveError(PlanError):
    """A structural move would change what the module computes, or does not fit it."""


class ProfileError(DiscoError):
    """A profile or trace is missing, malformed, or was taken on another device."""


class ActivationError(DiscoError):
    """The ranks of a job could not agree on what to enact."""


class UnsupportedError(DiscoError):
    """This version of jax, this backend or this machine lacks something we need."""
