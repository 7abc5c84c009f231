"""The channel over the key-value store, and the signs of life in it."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from disco_hlo.activation import kvstore
from disco_hlo.activation.agree import Proposal, agree, settle
from disco_hlo.activation.channel import CoordinationStore
from disco_hlo.activation.kvstore import BEAT_S, CHUNK_BYTES, HANGS, SILENT_S, KvChannel, Pulse
from disco_hlo.errors import ActivationError, GoneError
from tests.activation.stores import MemoryStore, on_ranks


def joined(items: Mapping[int, bytes]) -> bytes:
    """A rule for ``decide`` whose outcome shows whose items it saw."""
    return b",".join(b"%d=%s" % (rank, items[rank]) for rank in sorted(items))


@pytest.mark.parametrize("length", [0, 1, 65536, 65537, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
def test_every_rank_gets_the_bytes_of_rank_0(length: int) -> None:
    payload = hashlib.shake_256(b"x").digest(length)
    received = on_ranks(
        3, lambda one: one.broadcast(payload if one.rank == 0 else None, tag="t", timeout_s=10)
    )
    assert all(data == payload for data in received)


def test_every_rank_gets_the_items_of_all_in_the_order_of_ranks_large_ones_too() -> None:
    for size, each in ((4, 1), (2, 200_000)):
        received = on_ranks(
            size, lambda one, each=each: one.all_gather(bytes([one.rank]) * each, tag="t", timeout_s=10)
        )
        assert received == [[bytes([rank]) * each for rank in range(size)]] * size


def test_one_tag_may_be_used_again() -> None:
    def step(one: KvChannel) -> list[bytes]:
        return [
            one.broadcast(b"%d" % turn if one.rank == 0 else None, tag="same", timeout_s=10)
            for turn in range(5)
        ]

    assert on_ranks(2, step) == [[b"0", b"1", b"2", b"3", b"4"]] * 2


def test_two_jobs_in_one_store_do_not_meet() -> None:
    store = MemoryStore()
    for job in ("first/job", "first_job"):
        KvChannel(0, 2, job, store).broadcast(job.encode(), tag="t", timeout_s=1)
    assert KvChannel(1, 2, "first/job", store).broadcast(None, tag="t", timeout_s=1) == b"first/job"
    assert KvChannel(1, 2, "first_job", store).broadcast(None, tag="t", timeout_s=1) == b"first_job"


def test_what_all_ranks_have_read_is_deleted() -> None:
    store = MemoryStore()

    def step(one: KvChannel) -> None:
        one.broadcast(bytes(3 * CHUNK_BYTES) if one.rank == 0 else None, tag="big", timeout_s=10)
        one.all_gather(b"", tag="past it", timeout_s=10)

    on_ranks(2, step, store)
    assert len(store.values) == 3
    assert all(key.startswith("disco/job/1-past") for key in store.values)


def test_rank_0_names_the_ranks_that_do_not_come() -> None:
    def step(one: KvChannel) -> str:
        if one.rank in (1, 3, 4):
            return "stays away"
        with pytest.raises(ActivationError) as caught:
            one.all_gather(b"", tag="meet", timeout_s=0.3)
        return str(caught.value)

    message = "meet: ranks 1, 3-4 of 5 did not answer within 0.3 s"
    store = MemoryStore("disco/job/0-meet/from/0", "disco/job/0-meet/from/2")
    assert on_ranks(5, step, store) == [message, "stays away", message, "stays away", "stays away"]


def test_a_broadcast_nobody_sends_names_rank_0_and_after_it_exchanges_fail_at_once_with_this_reason() -> None:
    channel = KvChannel(1, 3, "job", MemoryStore())
    with pytest.raises(ActivationError, match=r"^plan: rank 0 of 3 did not answer within 0\.1 s$"):
        channel.broadcast(None, tag="plan", timeout_s=0.1)
    with pytest.raises(ActivationError, match="earlier exchange between the ranks failed: plan: rank 0 of 3"):
        channel.all_gather(b"", tag="next", timeout_s=60)


@pytest.mark.parametrize("spoil", ["shorten", "flip", "drop", "header"])
def test_damaged_pieces_are_noticed(spoil: str) -> None:
    store = MemoryStore()
    KvChannel(0, 2, "job", store).broadcast(b"abc" * CHUNK_BYTES, tag="t", timeout_s=1)
    piece = "disco/job/0-t/pieces/all/1"
    if spoil == "shorten":
        store.values[piece] = store.values[piece][:-1]
    elif spoil == "flip":
        store.values[piece] = b"X" + store.values[piece][1:]
    elif spoil == "drop":
        del store.values[piece]
    else:
        store.values["disco/job/0-t/all"] = b"short"
    with pytest.raises(ActivationError, match="arrived damaged"):
        KvChannel(1, 2, "job", store).broadcast(None, tag="t", timeout_s=0.2)


def test_the_decision_is_rank_0s_rule_over_all_items() -> None:
    def step(one: KvChannel) -> bytes:
        return one.decide(b"%d" % (one.rank * 10), joined, tag="t", timeout_s=10)

    assert on_ranks(3, step) == [b"0=0,1=10,2=20"] * 3


def test_a_rank_that_comes_late_reads_the_decision_taken_without_it() -> None:
    store = MemoryStore("disco/job/decided/t/0/from/0", "disco/job/decided/t/0/from/1")
    on_time = [KvChannel(rank, 3, "job", store) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        decided = list(pool.map(lambda one: one.decide(b"x", joined, tag="t", timeout_s=0.5), on_time))
    late = KvChannel(2, 3, "job", store).decide(b"x", joined, tag="t", timeout_s=0.5)
    assert [*decided, late] == [b"0=x,1=x"] * 3


def test_without_rank_0_the_others_decide_without_it_and_alike() -> None:
    store = MemoryStore("disco/job/decided/t/0/from/1", "disco/job/decided/t/0/from/2")
    # It said something before it fell silent; that must not count.
    store.put("disco/job/decided/t/0/from/0", b"x")

    def step(one: KvChannel) -> bytes:
        return b"" if one.rank == 0 else one.decide(b"x", joined, tag="t", timeout_s=0.2)

    assert on_ranks(3, step, store)[1:] == [b"1=x,2=x"] * 2


def test_however_the_ranks_race_there_is_one_decision() -> None:
    for delay_ms in range(0, 40, 4):
        store = MemoryStore()
        barrier = threading.Barrier(2)

        def step(one: KvChannel, delay_ms: int = delay_ms, barrier: threading.Barrier = barrier) -> bytes:
            barrier.wait()
            # Rank 0 comes about when rank 1 gives up on it.
            threading.Event().wait(delay_ms / 1000 if one.rank == 0 else 0)
            return one.decide(b"x", joined, tag="t", timeout_s=0.02)

        first, second = on_ranks(2, step, store)
        assert first == second


class BrokenClient:
    """jaxlib's client, answering everything with one error."""

    def __init__(self, message: str) -> None:
        self.message = message

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: object) -> Any:
            raise RuntimeError(self.message)

        return call


def test_the_store_tells_an_absent_value_from_an_absent_service() -> None:
    assert CoordinationStore(BrokenClient("DEADLINE_EXCEEDED: GetKeyValue() timed out")).get("k", 0.1) is None
    assert CoordinationStore(BrokenClient("ALREADY_EXISTS: key k already exists")).put("k", b"") is False
    with pytest.raises(ActivationError, match=r"does not answer: UNAVAILABLE: Socket closed$"):
        CoordinationStore(BrokenClient("UNAVAILABLE: Socket closed\nmore")).get("k", 0.1)
    with pytest.raises(ActivationError, match="does not answer"):
        CoordinationStore(BrokenClient("UNAVAILABLE")).put("k", b"")


LONG_S = 3600.0
LOOKS = int(SILENT_S / BEAT_S)


class Notes:
    """A store of notes; out of reach where it is ``gone``."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.gone = False
        self.renewed = threading.Event()

    def renew(self, key: str, value: bytes) -> None:
        if self.gone:
            raise ActivationError("out of reach")
        self.kept[key] = value
        self.renewed.set()

    def get(self, key: str, _timeout_s: float) -> bytes | None:
        if self.gone:
            raise ActivationError("out of reach")
        return self.kept.get(key)

    def delete(self, key: str) -> None:
        if self.gone:
            raise ActivationError("out of reach")
        del self.kept[key]

    def values(self, directory: str) -> dict[str, bytes]:
        if self.gone:
            raise ActivationError("out of reach")
        return {
            key.removeprefix(f"{directory}/"): value
            for key, value in self.kept.items()
            if key.startswith(f"{directory}/")
        }


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(kvstore, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def looks(watching: Pulse, clock: SimpleNamespace, times: int, apart_s: float = BEAT_S) -> bool:
    """What rank 0 knows after so many looks."""
    for _ in range(times):
        clock.now += apart_s
        watching()
    return watching()


SIGN = "disco/job/pulse/of/1"


def test_a_rank_whose_sign_stays_the_same_is_silent_and_all_hear_of_it(clock: SimpleNamespace) -> None:
    notes = Notes()
    first, third = Pulse(0, 3, "job", notes), Pulse(2, 3, "job", notes)
    notes.kept[SIGN] = b"7"
    assert not looks(first, clock, LOOKS)
    assert not looks(third, clock, 1)
    assert looks(first, clock, 1)
    assert looks(third, clock, 1)
    # It stays so: the others have given up on it.
    notes.kept[SIGN] = b"8"
    assert looks(first, clock, 1)


def test_a_rank_that_gives_signs_or_took_leave_or_never_came_is_not_silent(clock: SimpleNamespace) -> None:
    notes = Notes()
    watching = Pulse(0, 3, "job", notes)
    for count in range(3 * LOOKS):
        notes.kept[SIGN] = b"%d" % count
        assert not looks(watching, clock, 1)
    leaving = Pulse(1, 3, "job", notes)
    leaving.start()
    leaving.stop()
    assert not looks(watching, clock, 3 * LOOKS)


def test_a_rank_0_that_stood_still_begins_to_count_anew(clock: SimpleNamespace) -> None:
    """The others' signs stood still with it, since the store lies in its process."""
    notes = Notes()
    watching = Pulse(0, 2, "job", notes)
    notes.kept[SIGN] = b"7"
    assert not looks(watching, clock, LOOKS)
    clock.now += 10 * SILENT_S
    assert not watching()
    assert not looks(watching, clock, LOOKS - 1)
    assert looks(watching, clock, 1)


def test_signs_are_given_from_start_to_stop_and_a_store_that_is_gone_harms_nobody() -> None:
    notes = Notes()
    giving = Pulse(1, 2, "job", notes, beat_s=0.001)
    giving.start()
    assert notes.renewed.wait(60)
    giving.stop()
    assert notes.kept == {SIGN: b"away"}
    giving.start()
    notes.gone = True
    giving.stop()
    assert not Pulse(0, 2, "job", notes)()


def test_rank_0_and_one_that_is_alone_give_no_signs() -> None:
    notes = Notes()
    for one in (Pulse(0, 2, "job", notes), Pulse(1, 1, "job", notes)):
        one.start()
        one.stop()
    assert notes.kept == {}


def test_a_run_hangs_once_every_rank_has_waited_long_in_it() -> None:
    notes = Notes()
    first, second, third = (KvChannel(rank, 3, "job", notes).wait() for rank in range(3))
    assert [first.verdict(0.0), second.verdict(0.0)] == ["", ""]
    second.end()  # it came back there
    assert [second.verdict(0.0), third.verdict(0.0), first.verdict(0.0)] == ["", "", ""]
    second = KvChannel(1, 3, "job", notes).wait("")
    assert second.verdict(0.0) == ""
    assert [one.verdict(0.0) for _ in range(2) for one in (third, first)] == [""] * 4
    assert [one.verdict(0.0) for one in (third, first, second, third)] == ["", *[HANGS] * 3]


@pytest.mark.parametrize("runs", [0, 1])
def test_a_rank_that_has_stood_still_since_its_run_ended_ends_nothing(runs: int) -> None:
    """Its word that it runs is there yet, and when it goes on it may ask for the verdict before it takes that back."""
    notes = Notes()
    channels = [KvChannel(rank, 2, "job", notes) for rank in range(2)]
    stood, past = channels[runs].wait(where="calls/t/7"), channels[1 - runs].wait("", "calls/t/7")
    assert stood.verdict(0.0) == ""
    assert [past.verdict(0.0) for _ in range(600)] == [""] * 600
    assert [stood.verdict(0.0), past.verdict(0.0)] == ["", ""]
    stood.end()
    assert past.verdict(0.0) == ""


def test_nothing_hangs_where_all_ranks_have_come_back() -> None:
    """The one that gathers their words may have stood still just then."""
    notes = Notes()
    first, second = (KvChannel(rank, 2, "job", notes).wait("no memory" * rank) for rank in range(2))
    assert [one.verdict(0.0) for one in (second, first, second)] == ["", "", ""]


def test_a_rank_whose_run_failed_tells_the_others_why_they_wait() -> None:
    notes = Notes()
    first, second = KvChannel(0, 2, "job", notes).wait(), KvChannel(1, 2, "job", notes).wait("no memory")
    assert [second.verdict(0.0), first.verdict(0.0), first.verdict(0.0)] == [""] * 3
    assert first.verdict(0.0) == "rank 1: no memory"
    assert second.verdict(0.0) == "rank 1: no memory"


def test_a_wait_whose_store_is_gone_says_nothing() -> None:
    notes = Notes()
    wait = KvChannel(0, 1, "job", notes).wait()
    notes.gone = True
    assert wait.verdict(0.0) == ""
    wait.end()


def test_waits_of_one_run_are_told_from_those_of_another() -> None:
    store = MemoryStore()
    earlier, later = KvChannel(0, 2, "job", store), KvChannel(1, 2, "job", store)
    before = earlier.wait()._directory
    assert later.wait()._directory == before
    earlier._begin("an exchange")
    assert earlier.wait()._directory != before


def test_others_hear_in_which_of_several_places_a_rank_has_been_for_long() -> None:
    notes = Notes()
    first, second = (KvChannel(rank, 2, "job", notes) for rank in range(2))
    assert second.long_in("calls/t") == set()
    wait, past = first.wait(where="calls/t/7"), second.wait("", "calls/t/5")
    assert [wait.verdict(0.0), past.verdict(0.0)] == ["", ""]
    assert second.long_in("calls/t") == {"7"}
    past = second.wait("", "calls/t/7")
    assert [past.verdict(0.0), wait.verdict(0.0), wait.verdict(0.0)] == [""] * 3
    assert [wait.verdict(0.0), past.verdict(0.0)] == [HANGS] * 2
    wait.end()
    assert first.long_in("calls/t") == set()


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_is_gone(rank: int) -> None:
    channel = KvChannel(rank, 3, "job", MemoryStore(), lambda: True)
    with pytest.raises(GoneError, match="of 3 did not answer: a rank is dead or stood still"):
        channel.all_gather(b"", tag="t", timeout_s=LONG_S)
    assert settle(channel, "", LONG_S, tag="s").endswith("of 3 did not answer: a rank is dead or stood still")
    outcome = agree(channel, Proposal("a" * 64, "b" * 64), LONG_S)
    assert not outcome.enact
    assert outcome.reason.endswith("of 3 did not answer: a rank is dead or stood still")
