"""How long the devices took for each call, without making the training wait.

Every execution has a token that is ready when it has ended on all local devices. A thread waits for them in the order
of dispatch, and the training runs ahead as it would. The devices run one execution after the other: one that was
dispatched while another ran has the time since that one ended.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Report = Callable[[int | None], None]
"""Told of an execution's time on the devices in ns; None where it failed there."""

_END_S = 5.0
"""How long the end of the process waits for executions under way."""


@dataclass(frozen=True, slots=True)
class _Execution:
    token: Any
    dispatched_ns: int
    devices: Sequence[int]
    report: Report


def device_ns(done_ns: int, dispatched_ns: int, ended_ns: Mapping[int, int], devices: Sequence[int]) -> int:
    """Time that an execution had on its devices.

    Args:
        done_ns: when it ended.
        dispatched_ns: when it was handed to the devices.
        ended_ns: when the last execution before it ended, by device.
        devices: that it ran on.
    """
    return done_ns - max(dispatched_ns, *(ended_ns.get(device, 0) for device in devices))


class DeviceTimes:
    """Times executions in a thread of its own, which the first one starts."""

    def __init__(self) -> None:
        self._executions: queue.Queue[_Execution | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self.total_ns = 0
        """Of all executions that were timed."""

    def note(self, token: Any, dispatched_ns: int, devices: Sequence[int], report: Report) -> None:
        """Have ``report`` told, in the other thread, how long the execution with this token took.

        Args:
            token: of the execution; nobody else waits for it.
            dispatched_ns: ``time.perf_counter_ns()`` before it was dispatched.
            devices: identities of the local devices it runs on.
        """
        if self._thread is None:
            self._start()
        self._executions.put(_Execution(token, dispatched_ns, devices, report))

    def drain(self) -> None:
        """Return when every execution noted so far has ended and was reported."""
        self._executions.join()

    def close(self) -> None:
        """End the thread once the executions noted so far have ended, or go on without it after 5 s."""
        with self._starting:
            thread, self._thread = self._thread, None
        if thread is not None:
            atexit.unregister(self.close)
            self._executions.put(None)
            thread.join(_END_S)

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._time, name="disco-device-times", daemon=True)
                thread.start()
                # Before JAX takes its clients down: a thread must not wait inside of one then.
                atexit.register(self.close)
                self._thread = thread

    def _time(self) -> None:
        ended_ns: dict[int, int] = {}
        while (one := self._executions.get()) is not None:
            try:
                one.token.block_until_ready()
                done_ns = time.perf_counter_ns()
                taken_ns = device_ns(done_ns, one.dispatched_ns, ended_ns, one.devices)
                ended_ns.update(dict.fromkeys(one.devices, done_ns))
                self.total_ns += taken_ns
            except Exception:  # the training meets the same error where it reads the results
                taken_ns = None
            one.report(taken_ns)
            del one
            self._executions.task_done()
        self._executions.task_done()
