"""Signs of life: who is silent, who only looks so, and that nobody waits for one who is."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from disco_hlo.activation import kvstore
from disco_hlo.activation.agree import Proposal, agree, settle
from disco_hlo.activation.kvstore import BEAT_S, SILENT_S, KvChannel, Pulse
from disco_hlo.errors import ActivationError, GoneError
from tests.activation.stores import MemoryStore

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

    def values(self, directory: str) -> dict[str, bytes]:
        if self.gone:
            raise ActivationError("out of reach")
        return {
            key.rsplit("/", 1)[1]: value
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


@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_rank_that_is_gone(rank: int) -> None:
    channel = KvChannel(rank, 3, "job", MemoryStore(), lambda: True)
    with pytest.raises(GoneError, match="of 3 did not answer: a rank is dead or stood still"):
        channel.all_gather(b"", tag="t", timeout_s=LONG_S)
    assert settle(channel, "", LONG_S, tag="s").endswith("of 3 did not answer: a rank is dead or stood still")
    outcome = agree(channel, Proposal("a" * 64, "b" * 64), LONG_S)
    assert not outcome.enact
    assert outcome.reason.endswith("of 3 did not answer: a rank is dead or stood still")
