"""The plan directory under rivals, crashes, full disks and hostile content; what it remembers of comparisons."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disco_hlo.errors import PlanError
from disco_hlo.plan import files, store
from disco_hlo.plan.plan import Candidate
from disco_hlo.plan.store import PlanSlot, PlanStore, note_compared, was_compared, was_measured
from tests.plan.test_plan import small_plan

FINGERPRINT = "0123456789abcdef" * 4
MODULE = b"\x0a\x04step" * 1000


def plan_for(module: bytes, **fields: object) -> bytes:
    return json.dumps({"module_sha256": sha256(module), **fields}).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def slot(tmp_path: Path) -> PlanSlot:
    return PlanStore(tmp_path / "plans").slot(FINGERPRINT, "cpu", "cpu", 2)


@pytest.fixture
def saved(slot: PlanSlot) -> PlanSlot:
    slot.save(plan_for(MODULE), MODULE, "HloModule step", b"default module")
    return slot


def names(slot: PlanSlot) -> list[str]:
    return sorted(path.name for path in slot.path.iterdir())


FOUR_FILES = ["default.hlo.pb.gz", "module.hlo.pb", "module.hlo.txt", "plan.json"]


def test_a_plan_lies_where_the_layout_says_and_is_loaded(saved: PlanSlot, tmp_path: Path) -> None:
    assert saved.path == tmp_path / "plans/0123456789abcdef/cpu-cpu-x2"
    assert names(saved) == FOUR_FILES
    assert (saved.path / "module.hlo.txt").read_text() == "HloModule step"
    assert gzip.decompress((saved.path / "default.hlo.pb.gz").read_bytes()) == b"default module"
    stored = saved.load()
    assert stored is not None
    assert (stored.plan_json, stored.module) == (plan_for(MODULE), MODULE)


def test_an_empty_slot_has_no_plan_and_reading_it_creates_nothing(slot: PlanSlot, tmp_path: Path) -> None:
    assert slot.load() is None
    assert slot.bans.all() == []
    assert PlanStore(tmp_path / "plans").list_plans() == []
    assert list(tmp_path.iterdir()) == []


def target(name: str) -> dict[str, object]:
    return {
        "key": FINGERPRINT, "fingerprint": FINGERPRINT, "module_name": name, "backend": "cpu", "device_kind": "cpu",
        "device_count": 2, "process_count": 1,
    }  # fmt: skip


def test_plans_beside_are_those_of_the_same_name_on_as_many_devices_of_the_kind(
    slot: PlanSlot, tmp_path: Path
) -> None:
    assert slot.beside("jit_step") == 0
    plan_store = PlanStore(tmp_path / "plans")
    for digit, kind, devices, processes, name in (
        ("1", "cpu", 2, 1, "jit_step"),
        ("2", "cpu", 2, 2, "jit_step"),
        ("3", "cpu", 4, 1, "jit_step"),
        ("4", "cpu", 20, 1, "jit_step"),
        ("5", "other", 2, 1, "jit_step"),
        ("6", "cpu", 2, 1, "jit_other"),
    ):
        beside = plan_store.slot(digit * 64, "cpu", kind, devices, processes)
        beside.save(plan_for(MODULE, target=target(name)), MODULE)
    assert slot.beside("jit_step") == 2
    assert PlanStore(tmp_path / "plans").slot("1" * 64, "cpu", "cpu", 2).beside("jit_step") == 1


def test_plans_beside_that_cannot_be_read_do_not_count(slot: PlanSlot, tmp_path: Path) -> None:
    plan_store = PlanStore(tmp_path / "plans")
    for digit, content in (
        ("1", b""),
        ("2", b"[1]"),
        ("3", b'{"target": {"module_name": "jit_step"}}'),
        ("4", b"\xff"),
    ):
        folder = plan_store.slot(digit * 64, "cpu", "cpu", 2).path
        folder.mkdir(parents=True)
        (folder / "plan.json").write_bytes(content)
    os.mkfifo(tmp_path / "pipe")
    for digit, place in (("5", tmp_path / "nothing"), ("6", tmp_path / "pipe")):
        folder = plan_store.slot(digit * 64, "cpu", "cpu", 2).path
        folder.mkdir(parents=True)
        (folder / "plan.json").symlink_to(place)
    assert slot.beside("jit_step") == 0
    plan_store.slot("7" * 64, "cpu", "cpu", 2).save(plan_for(MODULE, target=target("jit_step")), MODULE)
    assert slot.beside("jit_step") == 1


def test_of_many_plans_beside_a_few_dozen_are_read(
    slot: PlanSlot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        beside = PlanStore(tmp_path / "plans").slot(f"{number:064x}"[::-1], "cpu", "cpu", 2)
        beside.save(plan_for(MODULE, target=target("jit_step")), MODULE)
    read: list[Path] = []
    bounded = store.read_bounded
    monkeypatch.setattr(
        store, "read_bounded", lambda path, limit: (read.append(path), bounded(path, limit))[1]
    )
    assert slot.beside("jit_step") == 32
    assert {path.name for path in read} == {"plan.json"}


def test_a_plan_directory_that_is_none_is_not_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="file: Not a directory"):
        PlanStore(tmp_path / "file").list_plans()
    with pytest.raises(PlanError, match=r"cannot create the plan folder .*file"):
        PlanStore(tmp_path / "file").slot(FINGERPRINT, "cpu", "cpu", 2).save(plan_for(MODULE), MODULE)


def test_files_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        slot = PlanStore(tmp_path / "plans").slot(FINGERPRINT, "cpu", "cpu", 2)
        slot.save(plan_for(MODULE), MODULE)
        with slot.bans.trying("0" * 64, "compile", 1):
            modes = {oct(path.stat().st_mode & 0o777) for path in slot.path.iterdir()}
    finally:
        os.umask(before)
    folders = [slot.root, slot.path.parent, slot.path]
    assert [oct(path.stat().st_mode & 0o777) for path in folders] == ["0o700"] * 3
    assert modes == {"0o600"}


@pytest.mark.parametrize(
    ("fingerprint", "backend", "kind", "count"),
    [
        ("../../../../etc/passwd", "cpu", "cpu", 2),
        ("0123", "cpu", "cpu", 2),
        (FINGERPRINT.upper(), "cpu", "cpu", 2),
        (FINGERPRINT, "../cpu", "cpu", 2),
        (FINGERPRINT, "", "cpu", 2),
        (FINGERPRINT, "cpu", "cpu", 0),
    ],
)
def test_arguments_that_could_lead_elsewhere_are_refused(
    tmp_path: Path, fingerprint: str, backend: str, kind: str, count: int
) -> None:
    with pytest.raises(PlanError, match="expected"):
        PlanStore(tmp_path).slot(fingerprint, backend, kind, count)


@pytest.mark.parametrize(
    ("kind", "processes", "folder"),
    [
        ("NVIDIA H200", 1, "gpu-nvidia-h200-x8"),
        ("../..//x", 1, "gpu-x-x8"),
        ("", 1, "gpu-unknown-x8"),
        ("é", 1, "gpu-unknown-x8"),
        # A search in one process with two GPUs took the plan away from two processes with one each.
        ("NVIDIA H200", 4, "gpu-nvidia-h200-x8-p4"),
    ],
)
def test_kind_count_and_processes_become_one_path_component(
    tmp_path: Path, kind: str, processes: int, folder: str
) -> None:
    slot = PlanStore(tmp_path).slot(FINGERPRINT, "gpu", kind, 8, processes)
    assert slot.path == tmp_path / "0123456789abcdef" / folder


def test_a_plan_that_names_another_module_is_not_saved(saved: PlanSlot) -> None:
    with pytest.raises(PlanError, match="names another module"):
        saved.save(plan_for(b"other"), MODULE)
    assert saved.load().plan_json == plan_for(MODULE)


def pipe_instead(plan: Path) -> None:
    plan.unlink()
    os.mkfifo(plan)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        *(
            ("plan.json", content, r"plan\.json: expected a plan as JSON: ")
            for content in (b"", b"{", b"[" * 100_000)
        ),
        *(
            ("plan.json", content, r"plan\.json is not a plan: expected an object with module_sha256")
            for content in (b"[]", b"7", b"{}", b'{"module_sha256": 3}')
        ),
        *(
            ("module.hlo.pb", content, r"not the module that plan\.json was saved with")
            for content in (b"", MODULE[:-1], MODULE + b"x")
        ),
        ("module.hlo.pb", Path.unlink, r"module\.hlo\.pb is missing beside plan\.json; delete the folder"),
        ("plan.json", pipe_instead, "not a regular file"),
    ],
)
def test_what_is_no_saved_plan_is_refused(saved: PlanSlot, name: str, damage: Any, message: str) -> None:
    (saved.path / name).write_bytes(damage) if isinstance(damage, bytes) else damage(saved.path / name)
    with pytest.raises(PlanError, match=message):
        saved.load()


def test_files_too_large_are_not_read(saved: PlanSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_MODULE_BYTES", 100)
    with pytest.raises(PlanError, match="has 6000 bytes, more than the 100 allowed"):
        saved.load()


def test_links_out_of_the_plan_directory_are_not_followed(saved: PlanSlot, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(MODULE)
    module = saved.path / "module.hlo.pb"
    module.unlink()
    module.symlink_to(secret)
    with pytest.raises(PlanError, match="cannot read"):
        saved.load()
    saved.save(plan_for(b"new"), b"new")
    assert secret.read_bytes() == MODULE
    assert not module.is_symlink()


def test_a_linked_folder_is_refused_for_reading_and_writing(slot: PlanSlot, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    slot.path.parent.mkdir(parents=True)
    slot.path.symlink_to(elsewhere)
    with pytest.raises(PlanError, match="symbolic link"):
        slot.load()
    with pytest.raises(PlanError, match="symbolic link"):
        slot.save(plan_for(MODULE), MODULE)
    assert list(elsewhere.iterdir()) == []


def test_a_place_that_cannot_even_be_looked_at_says_so(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="File name too long"):
        PlanStore(tmp_path / ("x" * 300)).slot(FINGERPRINT, "cpu", "cpu", 2).load()


def test_a_disk_that_fills_up_leaves_the_old_plan_and_nothing_else(
    saved: PlanSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, room = os.write, [8000]

    def write(descriptor: int, data: bytes) -> int:
        count = min(len(data), room[0], 1000)
        if count == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        room[0] -= count
        return real_write(descriptor, data[:count])

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "write", write)
        with pytest.raises(PlanError, match="No space left on device"):
            saved.save(plan_for(MODULE * 2), MODULE * 2)
    assert names(saved) == FOUR_FILES
    assert saved.load().plan_json == plan_for(MODULE)


def test_from_a_read_only_directory_plans_are_read_and_compiled(
    saved: PlanSlot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real_open = os.open

    def read_only(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real_open(path, flags, *args, **kwargs)

    def refuse(*_: Any, **__: Any) -> None:  # it does so for a file that is not there, too
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "unlink", refuse)
    assert saved.load().module == MODULE
    for _ in range(2):
        with saved.bans.trying(sha256(MODULE), "compile", 1):
            assert names(saved) == FOUR_FILES
    [line] = caplog.messages
    assert "Read-only file system" in line
    with pytest.raises(PlanError, match="Read-only file system"):
        saved.save(plan_for(MODULE), MODULE)


def test_readers_and_two_savers_at_once_see_whole_plans_only(slot: PlanSlot) -> None:
    modules = {turn: bytes([turn]) * 50_000 for turn in range(20)}
    slot.save(plan_for(modules[0]), modules[0])

    def save(turns: range) -> None:
        for turn in turns:
            slot.save(plan_for(modules[turn]), modules[turn])

    def read(_: int) -> None:
        for _ in range(40):
            stored = slot.load()
            assert stored is not None
            assert stored.module in modules.values()

    with ThreadPoolExecutor(4) as pool:
        work = [pool.submit(save, range(1, 10)), pool.submit(save, range(10, 20))]
        work += [pool.submit(read, reader) for reader in range(2)]
        for one in work:
            one.result()
    assert names(slot) == FOUR_FILES


def test_plans_are_listed_with_the_damaged_ones_reasons(saved: PlanSlot, tmp_path: Path) -> None:
    other = PlanStore(tmp_path / "plans").slot("f" * 32, "gpu", "NVIDIA H200", 8)
    other.save(plan_for(b"m"), b"m")
    (other.path / "plan.json").write_text("{")
    (tmp_path / "plans/notes").mkdir()
    listed = PlanStore(tmp_path / "plans").list_plans()
    assert [(one.path, one.plan_json) for one in listed] == [
        (saved.path, plan_for(MODULE)),
        (other.path, b""),
    ]
    assert listed[0].problem == ""
    assert "expected a plan as JSON" in listed[1].problem


def test_a_plan_that_nobody_may_look_at_does_not_keep_the_others_from_being_listed(
    saved: PlanSlot, tmp_path: Path
) -> None:
    """Another user's folder ended the whole list."""
    hidden = tmp_path / "plans" / ("f" * 16) / "gpu-nvidia-h200-x8"
    hidden.parent.mkdir()
    hidden.symlink_to(hidden)  # which nobody may look through, root included
    listed = PlanStore(tmp_path / "plans").list_plans()
    assert [(one.path, bool(one.problem)) for one in listed] == [(saved.path, False), (hidden, True)]


def test_one_search_at_a_time_and_the_second_hears_who(slot: PlanSlot) -> None:
    lock = slot.search_lock().acquire()
    with pytest.raises(PlanError, match=rf"another search holds .*process {os.getpid()} on "):
        slot.search_lock().acquire()
    lock.remove()
    with slot.search_lock().held():
        assert names(slot) == ["search.lock"]
    assert names(slot) == []


def child(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs ``code`` with ``slot`` at hand, says so and waits to be killed."""
    program = (
        "import os, sys, time; from pathlib import Path; from disco_hlo.plan.store import PlanStore\n"
        f"slot = PlanStore(Path(sys.argv[1])).slot({FINGERPRINT!r}, 'cpu', 'cpu', 2)\n{code}\n"
        "print('ready', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.stdout.close()
    return process


def test_a_killed_holders_lock_is_taken_over_at_once(slot: PlanSlot) -> None:
    holder = child("lock = slot.search_lock().acquire()", slot.root)
    with pytest.raises(PlanError, match=rf"process {holder.pid} on "):
        slot.search_lock().acquire()
    holder.send_signal(signal.SIGKILL)
    # Killed but not waited for by its parent: a zombie holds nothing.
    end = time.monotonic() + 60
    while files.OwnedFile(slot.path / "search.lock").is_alive() and time.monotonic() < end:
        time.sleep(0.01)
    with slot.search_lock().held():
        assert names(slot) == ["search.lock"]
    holder.wait()


def test_many_rivals_for_a_dead_holders_lock_get_it_one_after_the_other(slot: PlanSlot) -> None:
    holder = child("lock = slot.search_lock().acquire()", slot.root)
    holder.kill()
    holder.wait()
    holding: list[int] = []

    def compete(number: int) -> None:
        with slot.search_lock().held(wait_s=30):
            holding.append(number)
            assert len(holding) == 1
            time.sleep(0.01)
            holding.remove(number)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(compete, range(6)))
    assert names(slot) == []


def rewrite_owner(path: Path, age_s: float = 0.0, **changes: object) -> None:
    """Make an owned file look as if another machine or process had written it some time ago."""
    owner = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps(owner))
    moment_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(moment_ns, moment_ns))


@pytest.mark.parametrize(("age_s", "alive"), [(0.0, True), (100.0, True), (130.0, False), (-86400.0, False)])
def test_another_machines_lock_lives_as_long_as_it_is_renewed(
    slot: PlanSlot, age_s: float, alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WATCH_S", 0.2)
    slot.search_lock().acquire()
    rewrite_owner(slot.path / "search.lock", age_s, machine="elsewhere", host="elsewhere", pid=1)
    if alive:
        with pytest.raises(PlanError, match="process 1 on elsewhere"):
            slot.search_lock().acquire()
        return
    with slot.search_lock().held():
        assert json.loads((slot.path / "search.lock").read_bytes())["pid"] == os.getpid()


@pytest.mark.parametrize("age_s", [86400.0, -86400.0])
def test_a_servers_clock_that_is_set_takes_no_lock_away_from_who_lives(
    slot: PlanSlot, age_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leap of more than two minutes made every lock of other machines free until its owner renewed it."""
    monkeypatch.setattr(files, "RENEW_S", 0.01)
    monkeypatch.setattr(files, "WATCH_S", 60.0)
    lock = slot.search_lock().acquire()
    really = json.loads(lock.path.read_bytes())
    offset_ns, now_ns = int(age_s * 1e9), files.server_now_ns
    monkeypatch.setattr(files, "server_now_ns", lambda folder: now_ns(folder) + offset_ns)
    elsewhere = lock.path.with_name("elsewhere")
    elsewhere.write_text(json.dumps(really | {"machine": "elsewhere", "host": "elsewhere", "pid": 1}))
    # At once: a renewer that finds half of it takes the lock for lost.
    elsewhere.replace(lock.path)
    with pytest.raises(PlanError, match="process 1 on elsewhere"):
        slot.search_lock().acquire()
    lock.remove()


def test_a_process_number_used_again_does_not_keep_a_dead_owners_lock(slot: PlanSlot) -> None:
    slot.search_lock().acquire()
    rewrite_owner(slot.path / "search.lock", started="1")
    with slot.search_lock().held():
        pass


def test_a_lock_is_renewed_while_it_is_held(slot: PlanSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "RENEW_S", 0.01)
    lock = slot.search_lock().acquire()
    os.utime(lock.path, ns=(0, 0))
    end = time.monotonic() + 60
    while lock.path.stat().st_mtime_ns == 0 and time.monotonic() < end:
        time.sleep(0.01)
    assert lock.path.stat().st_mtime_ns > 0
    lock.remove()


def test_who_lost_the_lock_does_not_remove_the_next_holders(
    slot: PlanSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WATCH_S", 0.2)
    lost = slot.search_lock().acquire()
    assert lost.is_ours()
    rewrite_owner(lost.path, 200.0, machine="elsewhere")
    winner = slot.search_lock().acquire()
    assert not lost.is_ours()
    lost.remove()
    assert winner.is_ours()
    assert names(slot) == ["search.lock"]


def test_without_hard_links_locks_work_too(slot: PlanSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(files.os, "link", no_links)
    lock = slot.search_lock().acquire()
    with pytest.raises(PlanError, match="another search"):
        slot.search_lock().acquire()
    lock.remove()
    assert names(slot) == []


def test_leftovers_of_killed_savers_are_cleaned_up_when_they_are_old(saved: PlanSlot) -> None:
    for name, age_s in ((".new-1-abc", 4000), (".claim-1-abc", 4000), (".new-2-abc", 10)):
        (saved.path / name).write_bytes(b"half")
        moment_ns = time.time_ns() - age_s * 10**9
        os.utime(saved.path / name, ns=(moment_ns, moment_ns))
    saved.search_lock()
    assert names(saved) == sorted([".new-2-abc", *FOUR_FILES])


NOW = {"jax": "0.12.0", "jaxlib": "0.12.0", "disco_hlo": "1"}
ONE, OTHER = "a" * 64, "b" * 64


@pytest.fixture
def made_slot(tmp_path: Path) -> PlanSlot:
    made = PlanStore(tmp_path).slot("0" * 16, "cpu", "cpu", 2)
    made.path.mkdir(parents=True)
    return made


def test_what_was_compared_is_known_under_the_same_software_alone(made_slot: PlanSlot) -> None:
    assert not was_compared(made_slot, ONE, NOW)
    note_compared(made_slot, ONE, NOW)
    note_compared(made_slot, ONE, NOW)
    assert was_compared(made_slot, ONE, NOW)
    assert not was_compared(made_slot, OTHER, NOW)
    assert not was_compared(made_slot, ONE, NOW | {"jaxlib": "0.12.1"})
    note_compared(made_slot, OTHER, NOW)
    assert was_compared(made_slot, ONE, NOW)
    assert was_compared(made_slot, OTHER, NOW)
    assert len(store.compared_modules((made_slot.path / "compared.json").read_bytes())) == 2


def test_the_oldest_of_many_are_forgotten(made_slot: PlanSlot) -> None:
    for number in range(70):
        note_compared(made_slot, f"{number:064x}", NOW)
    assert not was_compared(made_slot, f"{5:064x}", NOW)
    assert was_compared(made_slot, f"{6:064x}", NOW)
    assert was_compared(made_slot, f"{69:064x}", NOW)


@pytest.mark.parametrize(
    "text",
    [
        b"", b"[]", b"{", b"\xff", b"[" * 100_000,
        b'{"format": "disco-hlo compared", "version": 2, "entries": []}',
        b'{"format": "disco-hlo compared", "version": 1, "entries": [{"module_sha256": "x", "versions": {}}]}',
        b'{"format": "disco-hlo compared", "version": 1, "entries": [], "more": 1}',
    ],
)  # fmt: skip
def test_a_damaged_record_says_nothing_and_is_replaced(text: bytes, made_slot: PlanSlot) -> None:
    (made_slot.path / "compared.json").write_bytes(text)
    assert not was_compared(made_slot, ONE, NOW)
    note_compared(made_slot, ONE, NOW)
    assert was_compared(made_slot, ONE, NOW)


def test_a_record_that_is_a_link_or_too_large_is_not_read(made_slot: PlanSlot, tmp_path: Path) -> None:
    record = made_slot.path / "compared.json"
    note_compared(made_slot, ONE, NOW)
    record.rename(tmp_path / "elsewhere.json")
    record.symlink_to(tmp_path / "elsewhere.json")
    assert not was_compared(made_slot, ONE, NOW)
    record.unlink()
    record.write_bytes(b" " * ((1 << 20) + 1))
    assert not was_compared(made_slot, ONE, NOW)
    with pytest.raises(PlanError):
        note_compared(made_slot, ONE, NOW)


def test_a_plan_was_measured_where_its_own_module_ran_under_this_software() -> None:
    plan = msgspec.structs.replace(small_plan(), versions=NOW)
    assert plan.measured is not None
    assert was_measured(plan, plan.module_sha256, NOW)
    assert not was_measured(plan, "c" * 64, NOW)
    assert not was_measured(plan, plan.module_sha256, NOW | {"jax": "0.12.1"})
    assert not was_measured(msgspec.structs.replace(plan, measured=None), plan.module_sha256, NOW)
    assert not was_measured(msgspec.structs.replace(plan, chosen="another"), plan.module_sha256, NOW)
    timed = tuple(msgspec.structs.replace(one, only_timed=True) for one in plan.measured.candidates)
    only_timed = msgspec.structs.replace(plan.measured, candidates=timed)
    assert not was_measured(msgspec.structs.replace(plan, measured=only_timed), plan.module_sha256, NOW)
    unmeasured = msgspec.structs.replace(plan.measured, candidates=(Candidate("plan", 1, 0, 0, 0),))
    assert not was_measured(msgspec.structs.replace(plan, measured=unmeasured), plan.module_sha256, NOW)
