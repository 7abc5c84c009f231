"""A trial from the first call to the end, on calls whose times are made up, and on real ones."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from disco_hlo.activation.channel import LocalChannel
from disco_hlo.activation.kvstore import KvChannel
from disco_hlo.errors import ActivationError, UnsupportedError
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plugin.calls import trial as trials
from disco_hlo.plugin.calls.schedule import FEWEST_ROUNDS
from disco_hlo.plugin.calls.trial import FIRST_MEETING, Hold, Trial
from disco_hlo.plugin.calls.watch import FromScript, Sample, Seen
from tests.activation.stores import MemoryStore


class Calls:
    """In the place of a watch: calls whose times are those of ``step_ns``; they end ``behind`` calls later."""

    module_name = "jit_step"

    def __init__(self, step_ns: dict[str, int], behind: int = 3) -> None:
        self.names: tuple[str, ...] = (DEFAULT,)
        self.failures: dict[str, str] = {}
        self.settled: str | None = None
        self.device_ns = 0
        self.timed = 0
        self.on_sample: Callable[[Sample], None] | None = None
        self.ran: list[str] = []
        self.share: Callable[[], float] = lambda: 1.0
        self._step_ns = step_ns
        self._behind = behind
        self._choose: Callable[[int], str] | None = None

    def offer(self, name: str, executable: object) -> None:
        if executable is None:
            raise UnsupportedError("other layouts")
        self.names += (name,)

    @property
    def seen(self) -> Seen:
        return Seen(len(self.ran), round(1000 * self.share()), 1000)

    def drain(self) -> None:
        pass

    def beside(self, _: object) -> None:
        """No call of these hangs."""

    def drain_queue(self) -> None:
        pass

    def drain_before_next(self) -> None:
        pass

    def swap(self, choose: Callable[[int], str]) -> None:
        self._choose = choose

    def settle(self, name: str) -> None:
        self.settled = name

    def call(self, count: int = 1) -> list[str]:
        """What ran the next calls, until one is settled."""
        begun = len(self.ran)
        for _ in range(count):
            if self.settled is not None:
                break
            assert self._choose is not None
            self.ran.append(self._choose(len(self.ran)))
            ended = len(self.ran) - 1 - self._behind
            if ended >= 0:
                name = self.ran[ended]
                taken_ns = self._step_ns[name] + ended % 3
                self.device_ns += taken_ns
                self.timed += 1
                assert self.on_sample is not None
                self.on_sample(Sample(ended, name, taken_ns))
        return self.ran[begun:]


FAST = {DEFAULT: 10**8, "fast": 8 * 10**7, "slow": 2 * 10**8, "near": 10**8}


def tried(step_ns: dict[str, int] = FAST, behind: int = 3) -> tuple[Calls, Trial]:
    """Calls, and a trial on them."""
    calls = Calls(step_ns, behind)
    return calls, Trial(calls, LocalChannel(), 1.0, "t")  # type: ignore[arg-type]


@contextlib.contextmanager
def signalled(hold: Hold, number: signal.Signals, error: BaseException) -> Iterator[threading.Event]:
    """Work whose call must outlast signals is under way, and sends one whose handler, the script's, raises ``error``.
    The event: the work went on to its end."""
    asked, ended = threading.Event(), threading.Event()

    def work() -> None:
        with hold.held(lambda: False):
            hold.outlasts = True
            os.kill(os.getpid(), number)
            asked.wait(60)
            ended.set()

    def handler(*_: object) -> None:
        asked.set()
        raise error

    before = signal.signal(number, handler)
    thread = threading.Thread(target=work)
    try:
        thread.start()
        yield ended
    finally:
        signal.signal(number, before)
        thread.join()


def test_a_call_whose_state_is_elsewhere_outlasts_ctrl_c_which_comes_after_it() -> None:
    hold = Hold("comparing", contextlib.nullcontext)
    with signalled(hold, signal.SIGINT, KeyboardInterrupt()) as ended:
        hold.wait()
        assert ended.is_set(), "the call did not go on before the state was back"
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait(60)


def test_a_call_whose_state_is_elsewhere_outlasts_what_a_handler_raises_until_it_is_back() -> None:
    """A script may have an alarm of its own. Its call would go on with deleted arguments, while others run on them."""
    hold = Hold("profiling", contextlib.nullcontext)
    with signalled(hold, signal.SIGUSR1, TimeoutError("the script's own")) as ended:
        with pytest.raises(FromScript) as passed:
            hold.wait()
        assert str(passed.value.error) == "the script's own"
        assert ended.is_set()


def test_what_has_ended_is_not_offered_to_the_other_ranks_again() -> None:
    """One of them might have the next one ready by then, under the same name, and begin alone."""
    calls, trial = tried()
    hold = Hold("profiling", contextlib.nullcontext)
    assert hold.ready()
    with contextlib.suppress(ActivationError), hold.held(lambda: True):
        pytest.fail("no call came")
    assert not hold.ready()
    trial.hold = hold
    calls.call(FIRST_MEETING + 1)
    assert trial._stretch.hold == ""


def test_the_next_hold_may_be_ready_before_a_traced_call_goes_on() -> None:
    calls, trial = tried()
    following = Hold("comparing", contextlib.nullcontext)

    class Traced(Hold):
        def wait(self) -> None:
            self.calls = 1

        def after_call(self) -> bool:
            trial.hold = following
            return True

    trial.hold = Traced("profiling", contextlib.nullcontext)
    following.wait = lambda: None  # type: ignore[method-assign]
    calls.call(FIRST_MEETING + 2)
    assert trial.hold is following


def test_default_and_candidates_take_turns_until_the_order_is_clear() -> None:
    calls, trial = tried()
    assert calls.call(FIRST_MEETING) == [DEFAULT] * FIRST_MEETING
    for name in ("fast", "near", "slow"):
        trial.offer(name, object())
    turns = [DEFAULT, "fast", "near", "slow"]
    # Six rounds, the first to warm up; the last calls have not ended when ranks meet, so there is a seventh.
    assert calls.call(28) == turns * 7
    # What lost runs no more, and the winner alone until there is something new.
    assert calls.call(10) == ["fast"] * 10
    assert trial.outcome is None
    trial.complete()
    calls.call(20)
    assert trial.outcome == "fast"


def test_a_candidate_that_comes_later_is_tried_against_default_and_winner() -> None:
    calls, trial = tried({**FAST, "faster": 5 * 10**7})
    trial.offer("fast", object())
    calls.call(60)
    assert calls.ran[-5:] == ["fast"] * 5
    trial.offer("faster", object())
    trial.complete()
    ran = calls.call(100)
    first = ran.index("faster")
    assert ran[first - 2 : first + 4] == [DEFAULT, "fast", "faster"] * 2
    assert trial.outcome == "faster"


def test_a_search_begins_once_and_where_it_failed_the_default_stays() -> None:
    calls, trial = tried()
    begun: list[int] = []
    trial.due = lambda _: len(calls.ran) > FIRST_MEETING
    trial.begin = lambda _: begun.append(len(calls.ran))
    calls.call(100)
    [first] = begun
    assert first > FIRST_MEETING
    trial.offer("fast", object())
    trial.give_up("rank 0 has no room")
    assert set(calls.call(100)) == {DEFAULT}
    assert trial.outcome == DEFAULT


def test_a_call_waits_for_what_needs_the_devices() -> None:
    calls, trial = tried()
    calls.call(FIRST_MEETING)
    hold = Hold("profiling", contextlib.nullcontext)
    trial.hold = hold
    ran: list[int] = []

    def work() -> None:
        with hold.held(lambda: False):
            ran.append(len(calls.ran))

    thread = threading.Thread(target=work)
    thread.start()
    calls.call(1)
    assert ran == [FIRST_MEETING]
    thread.join()


def test_calls_are_held_for_no_more_than_their_share_since_the_search_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_ns = [10**9]
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
    calls, trial = tried()
    trial.share, trial.due = 0.05, lambda _: True
    calls.call(FIRST_MEETING + 1)
    now_ns[0] += 6 * 10**9  # in which nobody holds a call
    held: list[int] = []

    def wait() -> None:
        now_ns[0] += 10**8
        held.append(now_ns[0])

    trial.hold = Hold("profiling", contextlib.nullcontext)
    trial.hold.wait = wait  # type: ignore[method-assign]
    for _ in range(100):
        calls.call()
        now_ns[0] += 10**8
    apart_s = [(later - earlier) / 1e9 for earlier, later in itertools.pairwise(held)]
    # They follow one another until all holds are a twentieth of the time; a call takes as long as a hold here.
    assert [round(one, 9) for one in apart_s] == [0.2, 0.4, 0.4, 0.4, 1.7, 2.0, 2.0, 2.0]


def test_ranks_meet_as_often_where_the_script_takes_longer_than_the_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step that takes 3 ms every 100 ms, as its data came no faster, had a search held 36 times less often than it
    may be; it had not ended after 90 s."""
    now_ns = [10**9]
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter_ns=lambda: now_ns[0]))
    calls, trial = tried({DEFAULT: 3 * 10**6})
    asked_s: list[float] = []
    trial.due = lambda _: bool(asked_s.append(now_ns[0] / 1e9)) or len(asked_s) > 2
    held_s: list[float] = []
    trial.hold = Hold("profiling", contextlib.nullcontext)
    trial.hold.wait = lambda: held_s.append(now_ns[0] / 1e9)  # type: ignore[method-assign]
    for _ in range(60):
        calls.call()
        now_ns[0] += 10**8
    assert max(after - before for before, after in itertools.pairwise(asked_s)) <= 1.01
    assert max(after - before for before, after in itertools.pairwise(held_s[-6:])) <= 0.31


def test_work_that_no_call_will_wait_for_is_not_done() -> None:
    hold = Hold("profiling", contextlib.nullcontext)
    with (
        pytest.raises(ActivationError, match="profiling: the step is not called any more"),
        hold.held(lambda: True),
    ):
        pytest.fail("it was done")
    hold.wait()  # a call that comes nonetheless is not kept


def test_without_a_better_one_the_default_stays() -> None:
    calls, trial = tried()
    trial.offer("slow", object())
    trial.offer("near", object())
    trial.complete()
    calls.call(200)
    assert trial.outcome == DEFAULT
    assert calls.ran.count("slow") <= 8


def test_what_was_asked_for_is_taken_whatever_the_clock_says() -> None:
    calls, trial = tried()
    trial.asked_for = "slow"
    trial.offer("fast", object())
    trial.offer("slow", object())
    trial.complete()
    calls.call(200)
    assert (trial.outcome, trial.why) == ("slow", "it was asked for")
    assert len([one for one in trial.rounds if {DEFAULT, "slow"} <= one.keys()]) >= FEWEST_ROUNDS, (
        "it is timed"
    )


def test_where_what_was_asked_for_cannot_be_run_the_clock_decides() -> None:
    calls, trial = tried()
    trial.asked_for = "slow"
    trial.offer("fast", object())
    trial.refuse("slow", "it is banned")
    trial.complete()
    calls.call(200)
    assert trial.outcome == "fast"


def test_what_cannot_be_called_alike_or_fails_is_not_run_on() -> None:
    calls, trial = tried()
    trial.offer("other", None)
    trial.offer("slow", object())
    calls.call(12)
    assert "slow" in calls.ran
    calls.failures["slow"] = "out of memory"
    ran = len(calls.ran)
    trial.complete()
    calls.call(100)
    assert set(calls.ran[ran:]) == {DEFAULT}
    assert "other" not in calls.ran
    assert trial.outcome == DEFAULT


def test_a_module_that_takes_little_of_the_devices_time_is_given_back() -> None:
    calls, trial = tried()
    calls.share = lambda: 0.5 if len(calls.ran) < 10 else 0.01
    calls.call(100)
    assert trial.outcome == DEFAULT
    # After the first meeting it waits for a second of training.
    assert len(calls.ran) == 2 * FIRST_MEETING + 2 + 1


def test_a_module_none_of_whose_calls_has_ended_yet_is_not_judged() -> None:
    """Small steps are dispatched by the dozen before the first has ended: nothing is known of their time then."""
    calls, trial = tried(behind=12)
    calls.share = lambda: 1.0 if calls.timed else 0.0
    met: list[int] = []
    trial.due = lambda _: met.append(len(calls.ran)) or False  # type: ignore[func-returns-value]
    calls.call(2 * FIRST_MEETING + 1)
    assert trial.outcome is None
    assert met == [FIRST_MEETING, 2 * FIRST_MEETING]


def test_alone_among_two_ranks_all_calls_are_the_defaults() -> None:
    calls = Calls(FAST)
    store = MemoryStore()
    trial = Trial(calls, KvChannel(0, 2, "job", store), 0.01, "t")  # type: ignore[arg-type]
    trial.offer("fast", object())
    assert calls.call(20) == [DEFAULT] * (FIRST_MEETING + 1)
    assert trial.outcome == DEFAULT
    # The other one comes when that is decided.
    late = Calls(FAST)
    other = Trial(late, KvChannel(1, 2, "job", store), 0.01, "t")  # type: ignore[arg-type]
    other.offer("fast", object())
    assert late.call(20) == [DEFAULT] * (FIRST_MEETING + 1)
    assert other.outcome == DEFAULT
