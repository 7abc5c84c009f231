"""How much memory is left on CPU: of the host, of its control groups, shared by devices and processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disco_hlo.errors import UnsupportedError
from disco_hlo.hlo.canonical import canonicalize
from disco_hlo.plan.plan import DEFAULT
from disco_hlo.plan.read import read
from disco_hlo.plugin.measuring import room
from disco_hlo.plugin.measuring.candidates import Trial, compile_trials, measure
from disco_hlo.plugin.measuring.room import RankMemory, least_bytes, room_bytes
from disco_hlo.plugin.session import join
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import compiles
from disco_hlo.plugin.xla.executables import Memory
from disco_hlo.plugin.xla.jaxlink import CompileRequest
from disco_hlo.plugin.xla.job import free_host_bytes
from tests.steps import models
from tests.steps.intercept import intercept

GIB = 1 << 30


def system(root: Path, groups: str, **files: str) -> int | None:
    """What is free on a system with 8 GiB available, and such files of control groups."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: {9 << 20} kB\nMemAvailable: {8 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_host_bytes(root)


def test_a_host_without_limits_has_what_is_available(tmp_path: Path) -> None:
    assert system(tmp_path, "0::/\n", memory_dot_max="max\n", memory_dot_current="5\n") == 8 * GIB
    assert free_host_bytes(tmp_path / "nothing here") is None


def test_a_control_group_leaves_less_than_the_host(tmp_path: Path) -> None:
    """Its files' cache counts as used, and is given back when memory is asked for."""
    free = system(
        tmp_path, "0::/job/step\n", job__memory_dot_max=f"{4 * GIB}\n", job__memory_dot_current=f"{3 * GIB}\n",
        job__memory_dot_stat=f"anon 5\ninactive_file {GIB}\n", job__step__memory_dot_max="max\n",
        job__step__memory_dot_current="7\n",
    )  # fmt: skip
    assert free == 2 * GIB


def test_a_container_with_control_groups_of_version_1_sees_its_own_at_the_mount(tmp_path: Path) -> None:
    files = {"memory__memory.limit_in_bytes": f"{3 * GIB}", "memory__memory.usage_in_bytes": f"{2 * GIB}"}
    assert system(tmp_path, "5:cpu:/\n4:memory:/docker/3f\n0::/\n", **files) == GIB


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([RankMemory("a", 2, None, 8 * GIB)], 4 * GIB),
        ([RankMemory("a", 1, None, 8 * GIB), RankMemory("a", 3, None, 6 * GIB)], 6 * GIB // 4),
        ([RankMemory("a", 1, None, 8 * GIB), RankMemory("b", 1, None, 3 * GIB)], 3 * GIB),
        ([RankMemory("a", 8, 2 * GIB, None), RankMemory("a", 8, GIB, None)], GIB),
        ([RankMemory("a", 1, None, None)], None),
    ],
)
def test_devices_and_processes_of_a_host_share_its_memory(
    ranks: list[RankMemory], expected: int | None
) -> None:
    assert least_bytes(ranks) == expected


def test_a_candidate_without_room_is_not_run_and_the_others_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was run, whatever it needed: on CPU the process is killed then."""

    def body(request: CompileRequest) -> list[Trial]:
        source = canonicalize(compiles.capture(request))
        session = join(request, Settings(search=True, directory=tmp_path))
        assert (room_bytes(session) or 0) > 1 << 20
        trials = [Trial(DEFAULT, None, 1), Trial("plan", read(source), 1), Trial("large", read(source), 1)]
        compile_trials(session, source, trials, tag="test")
        really = room.memory
        large = trials[2].executable

        def memory(executable: Any) -> Memory:
            return Memory(0, 0, 1 << 50, 0) if executable is large else really(executable)

        monkeypatch.setattr(room, "memory", memory)
        assert measure(session, trials, budget_s=0.01)
        return trials

    default, plan, large = intercept(*models.mlp(), body)
    assert default.times_ns
    assert plan.times_ns
    assert large.times_ns == []
    assert large.error.startswith("rank 0: it needs 1073741824 MiB a device, ")


def test_a_step_without_room_for_made_up_inputs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "room_bytes", lambda _session: 0)

    def body(request: CompileRequest) -> None:
        source = canonicalize(compiles.capture(request))
        session = join(request, Settings(search=True, directory=tmp_path))
        trials = [Trial(DEFAULT, None, 1)]
        compile_trials(session, source, trials, tag="test")
        measure(session, trials, budget_s=0.01)

    with pytest.raises(
        UnsupportedError, match=r"^XLA default has no room on made-up inputs: rank 0: it needs "
    ):
        intercept(*models.mlp(), body)
