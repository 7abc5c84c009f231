"""Agreement before compilation: every rank enacts the same module, or none enacts any.

(DisCo, sections 4.1 and 5.1: the master broadcasts the optimized HLO module, workers check and enact.)

Ranks that compile different modules issue different collectives and hang. So :func:`broadcast_plan`
carries plan and module from rank 0 to all, and :func:`agree` compares what every rank would enact.
Its outcome is one decision that all ranks read alike, however late they come; where a rank does not
come at all, that decision is XLA's default.

What travels is bounded in size and checked; it is never more than data.
"""

from __future__ import annotations

import gzip
import hashlib
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from disco_hlo.activation.channel import Channel, absence, name_ranks
from disco_hlo.errors import ActivationError
from disco_hlo.plan.plan import MAX_BYTES
from disco_hlo.plan.store import MAX_MODULE_BYTES
from disco_hlo.printable import counted
from disco_hlo.regular_file import unzipped

_MAX_REASON = 500


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rank would do."""

    fingerprint: str
    """Of the canonical graph of this rank's own module; empty where it has none."""
    enact_sha256: str
    """SHA-256 (hex) of the module bytes this rank would hand to XLA; empty for nothing."""
    reason: str = ""
    """Why nothing."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks do."""

    enact_sha256: str
    """The module every rank enacts; empty: every rank uses XLA's default."""
    reason: str = ""
    """One line on who differed and how, the same on every rank; empty where they enact."""

    @property
    def enact(self) -> bool:
        """Whether there is something to enact."""
        return bool(self.enact_sha256)


@dataclass(frozen=True, slots=True)
class PlanBytes:
    """A plan and the optimized module it led to, as the plan store keeps them."""

    plan_json: bytes
    module: bytes
    """A serialized ``HloModuleProto``."""

    @property
    def module_sha256(self) -> str:
        """Hex digest of the module."""
        return hashlib.sha256(self.module).hexdigest()


def agree(channel: Channel, proposal: Proposal, timeout_s: float, *, tag: str = "agree") -> Agreement:
    """Compare what all ranks would enact; call it on every rank before any of them compiles.

    A rank that fails to answer within ``timeout_s`` makes it the default. All ranks call this the same
    number of times with the same tags.

    Raises:
        ActivationError: the ranks cannot even share a decision, because rank 0's process is gone.
    """

    def rule(answers: Mapping[int, bytes]) -> bytes:
        try:
            if absent := absence(channel, answers, timeout_s):
                raise ActivationError(absent)
            outcome = verdict([_decode(answers[rank], rank) for rank in range(channel.size)])
        except ActivationError as error:
            outcome = _default(str(error))
        return msgspec.json.encode(outcome)

    mine = replace(proposal, reason=_one_line(proposal.reason))
    outcome = channel.decide(msgspec.json.encode(mine), rule, tag=tag, timeout_s=timeout_s)
    return _read_decision(outcome, proposal)


def settle(channel: Channel, failure: str, timeout_s: float, *, tag: str) -> str:
    """Whether a stage that all ranks go through succeeded on all of them.

    Unlike an all-gather, whose receivers may each time out for themselves, the answer is a decision:
    either every rank goes on with what the stage was for (a compiled plan), or none does.

    Args:
        failure: why this rank failed; empty if it did not.

    Returns:
        Empty if no rank failed, else one line on who failed and why; the same on every rank.

    Raises:
        ActivationError: the ranks cannot share a decision, because rank 0's process is gone.
    """

    def rule(answers: Mapping[int, bytes]) -> bytes:
        if absent := absence(channel, answers, timeout_s):
            return f"{tag}: {absent}".encode()
        failed = _ranks_by({rank: text.decode(errors="replace") for rank, text in answers.items() if text})
        listed = "; ".join(f"{name_ranks(ranks)}: {why}" for why, ranks in failed.items())
        return _one_line(f"{tag}: {listed}").encode() if listed else b""

    return channel.decide(_one_line(failure).encode(), rule, tag=tag, timeout_s=timeout_s).decode(
        errors="replace"
    )


def verdict(proposals: Sequence[Proposal]) -> Agreement:
    """The outcome of everybody's proposal; a rule, so equal on all ranks."""
    fingerprints = _ranks_by({rank: one.fingerprint for rank, one in enumerate(proposals)})
    if len(fingerprints) > 1:
        listed = _list(fingerprints, "no readable module")
        return _default(
            f"the ranks compile different training steps (another batch size or version?): {listed}"
        )
    silent = _ranks_by({rank: one.reason for rank, one in enumerate(proposals) if not one.enact_sha256})
    if silent:
        listed = "; ".join(
            f"{name_ranks(ranks)}: {why or 'nothing to enact'}" for why, ranks in silent.items()
        )
        everyone = not any(one.enact_sha256 for one in proposals)
        return _default(listed if everyone else f"not every rank has a plan to enact; {listed}")
    modules = _ranks_by({rank: one.enact_sha256 for rank, one in enumerate(proposals)})
    if len(modules) > 1:
        listed = _list(modules, "nothing")
        return _default(f"the ranks would enact different modules (an older plan somewhere?): {listed}")
    return Agreement(proposals[0].enact_sha256)


def _default(why: str) -> Agreement:
    return Agreement("", _one_line(f"XLA's default on all ranks: {why}"))


def _ranks_by(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        groups[value].append(rank)
    return groups


def _list(digests: Mapping[str, list[int]], empty: str) -> str:
    return "; ".join(f"{name_ranks(ranks)}: {digest[:12] or empty}" for digest, ranks in digests.items())


def _decode(answer: bytes, rank: int) -> Proposal:
    try:
        return msgspec.json.decode(answer, type=Proposal)
    except msgspec.MsgspecError as error:
        raise ActivationError(f"rank {rank} answered with something unreadable: {error}") from error


def _read_decision(decision: bytes, proposal: Proposal) -> Agreement:
    try:
        agreement = msgspec.json.decode(decision, type=Agreement)
    except msgspec.MsgspecError as error:
        raise ActivationError(f"the ranks' decision is not readable: {error}") from error
    if agreement.enact and agreement.enact_sha256 != proposal.enact_sha256:
        mine = proposal.enact_sha256[:12] or "nothing"
        raise ActivationError(
            f"the ranks enact {agreement.enact_sha256[:12]}, this one has {mine}: it is out of step with them"
        )
    return agreement


def _one_line(text: str) -> str:
    """A reason as it travels; file names in it need not be text (``os.fsdecode``)."""
    readable = text.encode(errors="backslashreplace").decode()
    return re.sub(r"\s+", " ", readable).strip()[:_MAX_REASON]


def broadcast_plan(
    channel: Channel, plan: PlanBytes | None, *, reason: str = "", timeout_s: float, tag: str = "plan"
) -> tuple[PlanBytes | None, str]:
    """Carry rank 0's plan and optimized module to every rank.

    Args:
        plan: on rank 0 what to send, or None to tell the others that there is none; ignored elsewhere.
        reason: on rank 0, why there is none.

    Returns:
        On every rank the plan and ``""``, or None and rank 0's reason.

    Raises:
        ActivationError: it did not arrive within ``timeout_s``, or arrived damaged.
    """
    if channel.rank != 0:
        return unframe(channel.broadcast(None, tag=tag, timeout_s=timeout_s))
    if channel.size > 1:
        channel.broadcast(frame(plan, reason), tag=tag, timeout_s=timeout_s)
    return plan, "" if plan is not None else _one_line(reason)


def frame(plan: PlanBytes | None, reason: str = "") -> bytes:
    """Plan and module, or the reason why there is none, as one compressed message.

    Raises:
        ActivationError: a part is larger than what the other side accepts.
    """
    if plan is not None and (len(plan.plan_json) > MAX_BYTES or len(plan.module) > MAX_MODULE_BYTES):
        sizes = f"plan of {len(plan.plan_json)} bytes with a module of {len(plan.module)} bytes"
        raise ActivationError(f"{sizes} is too large to send")
    return gzip.compress(msgspec.msgpack.encode((plan, _one_line(reason))), 1, mtime=0)


def unframe(message: bytes) -> tuple[PlanBytes | None, str]:
    """The inverse of :func:`frame`; trusts nothing in it.

    Raises:
        ActivationError: the message is not one, is too large, or is damaged.
    """
    most_bytes = MAX_BYTES + MAX_MODULE_BYTES + (1 << 16)
    try:
        return msgspec.msgpack.decode(unzipped(message, most_bytes), type=tuple[PlanBytes | None, str])
    except (OSError, msgspec.MsgspecError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise ActivationError(
            f"the plan from rank 0 is damaged ({counted(len(message), 'byte')}): {why}"
        ) from error
