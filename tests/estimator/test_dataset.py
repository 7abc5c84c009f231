"""The data set: what goes in comes out, what is broken is refused, what was interrupted is known."""

import sqlite3
from pathlib import Path

import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator.dataset import Dataset, Measurement
from disco_hlo.estimator.samples import FusedOp

PAIR = FusedOp((3, 4), (4,))
WIDE = FusedOp((3, 4, 5, 300), (4, 5), "triton", '{"num_warps":"4"}')
ALONE = FusedOp((7,), (7,), "input")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.sqlite"


def filled(path: Path) -> Dataset:
    data = Dataset(path)
    source = data.add_source("bert", "bert tiny", "f00d", b"module" * 100)
    assert data.add_samples(source, {"g:1": PAIR, "g:2": WIDE, "k": ALONE}) == 3
    return data


def measured(low_ns: int) -> Measurement:
    return Measurement(low_ns, low_ns + 5, 3, 40, 0.5)


def test_what_is_stored_comes_back_from_another_connection(path: Path) -> None:
    with filled(path) as data:
        first = data.samples()[0]
        data.record(data.begin([first]), {first.id: measured(100)})
        data.describe({"backend": "cpu", "config": {"seed": 1}})
    with Dataset(path) as data:
        (source,) = data.sources()
        assert (source.model, source.name, source.fingerprint) == ("bert", "bert tiny", "f00d")
        assert data.module(source) == b"module" * 100
        assert [(s.key, s.op) for s in data.samples()] == [("g:1", PAIR), ("g:2", WIDE), ("k", ALONE)]
        assert data.measurements() == {first.id: [measured(100)]}
        assert data.about() == {"backend": "cpu", "config": {"seed": 1}}


def test_a_structure_is_stored_once_whatever_model_it_comes_from(path: Path) -> None:
    with filled(path) as data:
        other = data.add_source("gpt", "gpt tiny", "beef", b"other")
        assert data.add_samples(other, {"g:1": FusedOp((8, 9), (9,)), "g:9": PAIR}) == 1
        assert [s.key for s in data.samples(other)] == ["g:9"]


def test_a_source_of_the_same_name_must_be_the_same_step(path: Path) -> None:
    with filled(path) as data:
        assert data.add_source("bert", "bert tiny", "f00d", b"whatever") == data.sources()[0]
        with pytest.raises(ProfileError, match="the model has changed"):
            data.add_source("bert", "bert tiny", "beef", b"module")


def test_pending_are_those_measured_too_seldom_that_did_not_fail(path: Path) -> None:
    with filled(path) as data:
        first, second, third = data.samples()
        data.record(data.begin([first]), {first.id: measured(100)})
        data.fail(second, "XLA refused it")
        assert data.pending() == [third]
        assert data.pending(times=2) == [first, third]
        assert data.failures() == {second.id: "XLA refused it"}


def test_a_pack_that_never_ended_is_known_when_the_file_is_opened_again(path: Path) -> None:
    with filled(path) as data:
        first, second, third = data.samples()
        assert data.begin([first]) == 1
        data.forget(1)
        data.begin([first, second])
        data.begin([third])
    with Dataset(path) as data:
        assert data.interrupted() == [[first, second], [third]]
        data.fail(third, "it killed the process")
        data.record(data.begin([first, second]), {first.id: measured(1), second.id: measured(2)})
        assert data.interrupted() == []


def test_processes_that_claim_at_once_get_different_samples(path: Path) -> None:
    with filled(path) as data, Dataset(path) as other:
        first, second, third = data.samples()
        assert data.claim(1, lambda ids: ids[:2], worker=0) == (1, [first.id, second.id])
        assert other.claim(1, lambda ids: ids[:2], worker=1) == (2, [third.id])
        assert data.claim(1, lambda ids: ids) == (3, [])
        assert data.interrupted(worker=1, workers=2) == [[third]]
        assert data.interrupted(worker=0, workers=2) == [[first, second]]


def test_samples_to_measure_again_can_be_claimed_alone(path: Path) -> None:
    with filled(path) as data:
        first, *_ = data.samples()
        data.record(data.begin([first]), {first.id: measured(100)})
        assert data.claim(2, lambda ids: ids, at_least=1) == (2, [first.id])


def test_times_measured_otherwise_are_not_mixed_in(path: Path) -> None:
    with filled(path) as data:
        data.describe({"device_kind": "A"})
        data.describe({"device_kind": "A", "jax": "1"})
        with pytest.raises(ProfileError, match="device_kind = 'A', this is 'B'"):
            data.describe({"device_kind": "B"})


def test_a_file_of_something_else_is_refused(path: Path) -> None:
    path.write_text("not a database at all" * 100)
    with pytest.raises(ProfileError, match="cannot be used as a data set"):
        Dataset(path)


def test_another_program_s_database_is_refused(path: Path) -> None:
    with sqlite3.connect(path) as other:
        other.execute("CREATE TABLE mine (a)")
    other.close()
    with pytest.raises(ProfileError, match="is no data set of fused ops"):
        Dataset(path)


def test_a_newer_version_is_refused(path: Path) -> None:
    filled(path).close()
    with sqlite3.connect(path) as other:
        other.execute("PRAGMA user_version = 9")
    other.close()
    with pytest.raises(ProfileError, match="is of version 9; this program reads version 1"):
        Dataset(path)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE source SET module = x'00ff'", "does not unpack"),
        ("UPDATE sample SET members = x'010203'", "is damaged"),
        ("UPDATE about SET value = '{'", "provenance is no JSON"),
    ],
)
def test_damage_inside_is_named(path: Path, statement: str, message: str) -> None:
    with filled(path) as data:
        data.describe({"backend": "cpu"})
    with sqlite3.connect(path) as other:
        other.execute(statement)
    other.close()
    with Dataset(path) as data, pytest.raises(ProfileError, match=message):
        read_all(data)


def read_all(data: Dataset) -> None:
    data.module(data.sources()[0])
    data.samples()
    data.about()
