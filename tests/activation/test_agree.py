"""The verdict on what the ranks propose, and the message that carries a plan."""

import dataclasses
import gzip

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.activation import agree as agree_module
from disco_hlo.activation.agree import (
    Agreement,
    PlanBytes,
    Proposal,
    agree,
    broadcast_plan,
    frame,
    settle,
    unframe,
    verdict,
)
from disco_hlo.activation.channel import LocalChannel
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.errors import ActivationError
from tests.activation.stores import MemoryStore
from tests.activation.test_kvstore import on_ranks

SAME = Proposal("a" * 64, "b" * 64)
PLAN = PlanBytes(b'{"version": 1}', b"\x0a\x04step" * 100)


def test_verdict() -> None:
    assert agree(LocalChannel(), SAME, 1) == Agreement("b" * 64, "")
    assert verdict([SAME, dataclasses.replace(SAME, reason="retried")]).enact, (
        "a reason beside a plan does not count"
    )
    for late_digit in ({"fingerprint": "a" * 63 + "b"}, {"enact_sha256": "b" * 63 + "c"}):
        assert not verdict([SAME, dataclasses.replace(SAME, **late_digit)]).enact
    proposals = [Proposal("a", "", "no plan"), Proposal("a", "", "no plan"), Proposal("a", "", "banned")]
    nothing = Agreement("", "XLA's default on all ranks: ranks 0-1: no plan; rank 2: banned")
    assert verdict(proposals) == nothing
    outcome = verdict([Proposal(f"{rank:064x}", "b" * 64) for rank in range(1000)])
    assert not outcome.enact
    assert "\n" not in outcome.reason, "one line however many ranks differ"
    assert len(outcome.reason) <= 500


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (Proposal("c" * 64, "b" * 64),
            "the ranks compile different training steps (another batch size or version?): "
            "ranks 0-1: aaaaaaaaaaaa; rank 2: cccccccccccc"),
        (Proposal("", "", "HLO not readable"),
            "the ranks compile different training steps (another batch size or version?): "
            "ranks 0-1: aaaaaaaaaaaa; rank 2: no readable module"),
        (Proposal("a" * 64, "d" * 64), "the ranks would enact different modules (an older plan somewhere?): "
            "ranks 0-1: bbbbbbbbbbbb; rank 2: dddddddddddd"),
        (Proposal("a" * 64, "", "no\n space"), "not every rank has a plan to enact; rank 2: no space"),
    ],
)  # fmt: skip
def test_one_that_differs_makes_it_the_default_and_is_named(odd: Proposal, reason: str) -> None:
    store = MemoryStore()
    outcomes = on_ranks(3, lambda one: agree(one, odd if one.rank == 2 else SAME, 10), store)
    assert outcomes == [Agreement("", f"XLA's default on all ranks: {reason}")] * 3


def test_a_rank_that_never_comes_makes_it_the_default() -> None:
    store = MemoryStore()
    outcome = agree(KvChannel(0, 2, "job", store), SAME, 0.2)
    assert outcome == Agreement("", "XLA's default on all ranks: rank 1 of 2 did not answer within 0.2 s")
    late = agree(KvChannel(1, 2, "job", store), SAME, 0.2)
    assert late == outcome


@pytest.mark.parametrize("answer", [b"\xff", b"7", b'{"fingerprint": "a", "enact_sha256": 5}'])
def test_an_unreadable_answer_makes_it_the_default(answer: bytes) -> None:
    store = MemoryStore()
    store.put("disco/job/decided/agree/0/from/1", answer)
    outcome = agree(KvChannel(0, 2, "job", store), SAME, 1)
    assert not outcome.enact
    assert "rank 1 answered with something unreadable" in outcome.reason


def test_a_rank_out_of_step_does_not_enact_what_it_does_not_have() -> None:
    store = MemoryStore()
    store.put("disco/job/decided/agree/0/outcome", b'{"enact_sha256": "' + b"b" * 64 + b'", "reason": ""}')
    with pytest.raises(ActivationError, match="this one has nothing: it is out of step"):
        agree(KvChannel(1, 2, "job", store), Proposal("a" * 64, "", "no plan"), 1)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        (["", "", ""], ""),
        (["", "no\nmemory", "no memory", "refused"], "compile: ranks 1-2: no memory; rank 3: refused"),
    ],
)
def test_a_stage_that_fails_somewhere_fails_everywhere_with_one_line(
    failures: list[str], expected: str
) -> None:
    outcomes = on_ranks(len(failures), lambda one: settle(one, failures[one.rank], 10, tag="compile"))
    assert outcomes == [expected] * len(failures)


def test_a_reason_that_names_a_file_in_no_text_reaches_every_rank() -> None:
    why = "there is no plan in /home/m\udcfcller"
    failed = on_ranks(2, lambda channel: settle(channel, why * (not channel.rank), 5, tag="stage"))
    assert failed == ["stage: rank 0: there is no plan in /home/m\\udcfcller"] * 2
    told = on_ranks(2, lambda channel: broadcast_plan(channel, None, reason=why, timeout_s=5))
    assert told == [(None, "there is no plan in /home/m\\udcfcller")] * 2


def test_a_stage_that_a_rank_does_not_reach_fails() -> None:
    store = MemoryStore()
    outcome = settle(KvChannel(0, 2, "job", store), "", 0.2, tag="compile")
    assert outcome == "compile: rank 1 of 2 did not answer within 0.2 s"
    assert settle(KvChannel(1, 2, "job", store), "", 0.2, tag="compile") == outcome


def test_a_plan_or_the_reason_why_there_is_none_reaches_every_rank() -> None:
    received = on_ranks(3, lambda one: broadcast_plan(one, PLAN if one.rank == 0 else None, timeout_s=10))
    assert received == [(PLAN, "")] * 3
    none = on_ranks(2, lambda one: broadcast_plan(one, None, reason="search\nfailed", timeout_s=10))
    assert none == [(None, "search failed")] * 2


@given(st.binary(), st.binary())
def test_a_frame_holds_what_was_put_in(plan_json: bytes, module: bytes) -> None:
    assert unframe(frame(PlanBytes(plan_json, module))) == (PlanBytes(plan_json, module), "")


@given(st.data())
def test_a_frame_changed_anywhere_is_refused(data: st.DataObject) -> None:
    message = bytearray(frame(PLAN))
    at = data.draw(st.integers(0, len(message) - 1))
    # Of a gzip file's header, and of a compressed stream, not every bit counts.
    message[at] ^= data.draw(st.integers(1, 255))
    try:
        received, _ = unframe(bytes(message))
    except ActivationError:
        return
    assert received == PLAN


@given(st.integers(0, 400))
def test_a_frame_cut_short_is_refused(length: int) -> None:
    message = frame(PLAN)
    with pytest.raises(ActivationError):
        unframe(message[: min(length, len(message) - 1)])


def test_a_compression_bomb_is_refused_without_unpacking_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree_module, "MAX_BYTES", 10)
    monkeypatch.setattr(agree_module, "MAX_MODULE_BYTES", 10)
    with pytest.raises(
        ActivationError, match=r"damaged \(50\d\d\d bytes\): it unzips to more than \d+ bytes"
    ):
        unframe(gzip.compress(bytes(50 << 20)))


def test_what_the_other_side_would_refuse_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agree_module, "MAX_MODULE_BYTES", 10)
    with pytest.raises(ActivationError, match="too large to send"):
        frame(PLAN)
