"""The store of measured times: merging, sharing, damage."""

import multiprocessing
import os
import sqlite3
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec.structs import replace as replace_in

from disco_hlo.errors import ProfileError
from disco_hlo.hlo.collectives import CollectiveKind
from disco_hlo.profiler.calibrate import DeviceConstants
from disco_hlo.profiler.collectives import InStep, SweepPoint
from disco_hlo.profiler.profile import (
    Contention,
    DeviceFacts,
    Link,
    LinkFacts,
    OpTime,
    Platform,
    StepFacts,
    place_of,
)
from disco_hlo.profiler.store import KEPT_MEASUREMENTS, ProfileStore

CPU = Platform("some cpu, 2 cores", "cpu", "", "0.12.0", "0.12.0")
LINK = Link(2, 2, "gloo")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profile.sqlite"


def test_a_second_model_finds_what_the_first_measured(path):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"dot": OpTime(100, 4, 10), "add": OpTime(7, 1, 10)})
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"dot": OpTime(110, 6, 10), "tanh": OpTime(30, 2, 10)})
        store.add_ops(CPU, {"dot": OpTime(900, 1, 3)})
        assert store.ops(CPU) == {
            "add": OpTime(7, 1, 10),
            "dot": OpTime(110, 10, 23),
            "tanh": OpTime(30, 2, 10),
        }


@pytest.mark.parametrize("other", [{"device_kind": "other"}, {"driver": "9"}, {"jaxlib": "0.10.2"}])
def test_times_of_another_platform_are_not_mixed_in(path, other):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"dot": OpTime(100, 4, 10)})
        assert store.ops(replace(CPU, **other)) == {}


def test_the_newest_measurements_are_kept(path):
    with ProfileStore(path) as store:
        for median in range(KEPT_MEASUREMENTS + 5):
            store.add_ops(CPU, {"dot": OpTime(median, 0, 1)})
        assert store.ops(CPU)["dot"].samples == KEPT_MEASUREMENTS
        assert store.ops(CPU)["dot"].median_ns == 5 + KEPT_MEASUREMENTS // 2 - 1


def test_sweeps_are_kept_by_link(path):
    measured = (SweepPoint(1024, 900, 10, 9), SweepPoint(4096, 1200, 15, 9))
    with ProfileStore(path) as store:
        store.add_sweep(CPU, LINK, measured)
        store.add_sweep(CPU, LINK, (SweepPoint(1024, 1000, 10, 9),))
        assert store.sweep(CPU, LINK) == (SweepPoint(1024, 950, 50, 18), measured[1])
        assert store.sweep(CPU, replace(LINK, process_count=1)) == ()


def test_steps_are_kept_by_module(path):
    with ProfileStore(path) as store:
        store.add_step(CPU, "f00", OpTime(5_000_000, 9, 5))
        store.add_step(CPU, "f01", OpTime(1, 0, 5))
        assert store.step(CPU, "f00") == OpTime(5_000_000, 9, 5)
        assert store.step(CPU, "f02") is None


def test_a_bad_measurement_leaves_nothing_of_its_batch(path):
    with ProfileStore(path) as store:
        with pytest.raises(ProfileError, match=r"op \[-5, 0, 1\]: Expected `int` >= 0 - at `\$\[0\]`"):
            store.add_ops(CPU, {"a": OpTime(5, 0, 1), "b": OpTime(-5, 0, 1)})
        assert store.ops(CPU) == {}
        store.add_ops(CPU, {"a": OpTime(5, 0, 1)})
        assert store.ops(CPU) == {"a": OpTime(5, 0, 1)}


def _add_many(path, name):
    with ProfileStore(path) as store:
        for index in range(20):
            store.add_ops(CPU, {f"{name}{index}": OpTime(index, 0, 1), "shared": OpTime(index, 0, 1)})


def test_processes_share_one_file(path):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_add_many, args=(path, name)) for name in "ab"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0]
    with ProfileStore(path) as store:
        times = store.ops(CPU)
    assert len(times) == 2 * 20 + 1
    assert times["shared"].samples == KEPT_MEASUREMENTS


def _die_while_writing(path):
    store = ProfileStore(path)
    with store._writing():
        store._connection.execute("DELETE FROM op")
        os._exit(9)


def test_a_process_that_dies_while_writing_leaves_the_last_whole_state(path):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"a": OpTime(5, 0, 1)})
    child = multiprocessing.get_context("spawn").Process(target=_die_while_writing, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 9
    with ProfileStore(path) as store:
        assert store.ops(CPU) == {"a": OpTime(5, 0, 1)}
        store.add_ops(CPU, {"b": OpTime(6, 0, 1)})


def refuse_to_write(monkeypatch):
    whole = ProfileStore._connected

    def refusing(self, mode):
        if mode == "rwc":
            raise sqlite3.OperationalError("attempt to write a readonly database")
        return whole(self, mode)

    monkeypatch.setattr(ProfileStore, "_connected", refusing)


def test_a_read_only_file_can_be_read(path, monkeypatch):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"a": OpTime(5, 0, 1)})
    refuse_to_write(monkeypatch)
    with ProfileStore(path) as store:
        assert not store.writable
        assert store.ops(CPU) == {"a": OpTime(5, 0, 1)}
        with pytest.raises(ProfileError, match="read-only"):
            store.add_ops(CPU, {"b": OpTime(6, 0, 1)})


def test_a_place_that_cannot_hold_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="cannot open or create"):
        ProfileStore(tmp_path / "file" / "profile.sqlite")
    with pytest.raises(ProfileError, match="cannot open or create"):
        ProfileStore(tmp_path)


@pytest.mark.parametrize(
    "content", [b"not a database, but long enough to look like one" * 50, b"SQLite format 3\0" * 100]
)
def test_a_file_that_is_no_database_is_refused_and_left_alone(path, content):
    path.write_bytes(content)
    with pytest.raises(ProfileError, match="cannot be used"):
        ProfileStore(path)
    assert path.read_bytes() == content


def test_a_foreign_database_is_refused_and_left_alone(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE mine (a)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ProfileError, match="no profile store"):
        ProfileStore(path)
    assert path.read_bytes() == before


def test_a_newer_store_is_refused(path):
    with ProfileStore(path) as store:
        store._connection.execute("PRAGMA user_version = 7")
    with pytest.raises(ProfileError, match="is of version 7; this program reads version 4"):
        ProfileStore(path)


def test_facts_are_kept_by_kind_and_place(path):
    step, other = place_of(LINK, "f00d"), place_of(LINK, "cafe")
    contention = Contention(1.1, 1.2, 300, products=1.5, others=1.0, hold=0.25)
    found = StepFacts(launch_ns=300, contention=contention, apart={"all-gather": InStep(((64, 2),), 9, 1, 3)})
    with ProfileStore(path) as store:
        store.change(CPU, DeviceFacts, "", lambda _: DeviceFacts(DeviceConstants(400, 1e10 / 3, 1e11, 0.01)))
        store.change(CPU, StepFacts, step, lambda known: replace_in(known, launch_ns=300))
        store.change(CPU, StepFacts, step, lambda known: replace_in(found, launch_ns=known.launch_ns))
    with ProfileStore(path) as store:
        assert store.facts(CPU, DeviceFacts).constants == DeviceConstants(400, 1e10 / 3, 1e11, 0.01)
        assert store.facts(CPU, StepFacts, step) == found
        assert store.facts(CPU, StepFacts, other) == StepFacts()
        assert store.facts(CPU, LinkFacts, place_of(LINK)) == LinkFacts()
        assert store.facts(replace(CPU, driver="9"), StepFacts, step) == StepFacts()


@pytest.mark.parametrize(
    "body", ["", "7", '{"launch_ns": -1}', '{"contention": {"compute": 1}}', '{"more": 1}']
)
def test_facts_that_are_none_are_refused(path, body):
    with ProfileStore(path) as store:
        store.change(CPU, StepFacts, "here", lambda known: known)
        store._connection.execute("UPDATE fact SET body = ?", (body,))
        with pytest.raises(ProfileError, match=r"StepFacts: .*; measure again or name another file"):
            store.facts(CPU, StepFacts, "here")


def test_nobody_is_told_to_remove_a_store_because_the_disk_is_full(path):
    with ProfileStore(path) as store:
        store._connection.execute("PRAGMA max_page_count = 1")
        with pytest.raises(ProfileError, match=r"database or disk is full$"):
            store.add_ops(CPU, {f"op{index}": OpTime(index, 0, 1) for index in range(500)})


def test_a_truncated_store_is_refused(path):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {f"op{index}": OpTime(index, 0, 1) for index in range(500)})
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ProfileError, match="cannot be used"), ProfileStore(path) as store:
        store.ops(CPU)


@pytest.mark.parametrize("value", ["-5", "'fast'", "1e99", "9223372036854775807"])
def test_values_that_are_no_times_are_refused(path, value):
    with ProfileStore(path) as store:
        store.add_ops(CPU, {"a": OpTime(5, 0, 1)})
        store._connection.execute(f"UPDATE op SET median_ns = {value}")
        with pytest.raises(ProfileError, match=r"a \(.*, 0, 1\): Expected `int`"):
            store.ops(CPU)


def test_a_damage_that_sqlite_tells_in_no_text_is_one_message(path):
    """Its own words hold pieces of the file: a UnicodeDecodeError ended the search."""
    store = ProfileStore(path)
    connection = store._connection

    def execute(*_):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    store._connection = SimpleNamespace(execute=execute)
    with pytest.raises(ProfileError, match=r"cannot be used as a .*remove it or name another file"):
        store.ops(CPU)
    connection.close()


def test_sweeps_are_of_one_kind(path):
    gather = CollectiveKind("all-gather", ((0, 1), (2, 3)))
    points = (SweepPoint(1024, 900, 10, 9),)
    with ProfileStore(path) as store:
        store.add_sweep(CPU, LINK, points)
        store.add_sweep(CPU, LINK, (SweepPoint(64, 7, 0, 1),), gather)
        assert store.sweep(CPU, LINK) == points
        assert store.sweep(CPU, LINK, gather) == (SweepPoint(64, 7, 0, 1),)
