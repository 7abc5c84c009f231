"""The errors of the project: each says what was expected, what came, where, and what to do."""

from typing import TypeVar

AnyError = TypeVar("AnyError", bound=BaseException)


class DiscoError(Exception):
    """Base of every error raised on purpose; its text is one readable message."""


class ModuleError(DiscoError):
    """An HLO module cannot be read or holds something the graph does not support."""


class PlanError(DiscoError):
    """A plan is malformed, of another version, or does not fit the module at hand."""


class IllegalStrategyError(PlanError):
    """A strategy asks for a rewrite that XLA could not execute correctly."""


class XlaRefusalError(IllegalStrategyError):
    """XLA does not compile a module that was put in the place of its own."""


class CircleError(IllegalStrategyError):
    """Units of a strategy wait for each other in a circle; ``tokens`` are these, as an order names them."""

    def __init__(self, message: str, tokens: tuple[str, ...]) -> None:
        super().__init__(message)
        self.tokens = tokens


class IllegalMoveError(PlanError):
    """A structural move would change what the module computes, or does not fit it."""


class ProfileError(DiscoError):
    """A profile or trace is missing, malformed, or was taken on another device."""


class ActivationError(DiscoError):
    """The ranks of a job could not agree on what to enact."""


class GoneError(ActivationError):
    """A rank is dead or stands still, and is not waited for any longer."""


class UnsupportedError(DiscoError):
    """This version of jax, this backend or this machine lacks something we need."""


def why_unreadable(error: Exception) -> str:
    """Why JSON or TOML cannot be read. What Python says of its own limits is of no use to whoever has the file."""
    if isinstance(error, RecursionError):
        return "something in it is nested too deep"
    return "a number in it has thousands of digits" if "int_max_str_digits" in str(error) else str(error)


def shared(error: AnyError) -> AnyError:
    """Mark an error as one that rank 0 knows of, whichever rank has it: then rank 0 speaks for all."""
    error.__dict__["shared"] = True
    return error


def is_shared(error: BaseException) -> bool:
    """Whether rank 0 speaks of this error."""
    return bool(error.__dict__.get("shared"))
