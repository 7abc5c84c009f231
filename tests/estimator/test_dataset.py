"""The data set: what goes in comes out, what is broken is refused; labels, splits, noise."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.dataset import (
    Dataset,
    Measurement,
    TrainingData,
    label_ns,
    load,
    model_split,
    noise,
    random_split,
)
from disco_hlo.estimator.samples import FusedOp, single_ops
from tests.captured import captured, stored
from tests.estimator import synthetic

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


def test_claimed_are_those_measured_too_seldom_that_did_not_fail(path: Path) -> None:
    with filled(path) as data:
        first, second, third = data.samples()
        data.record(data.begin([first]), {first.id: measured(100)})
        data.fail(second, "XLA refused it")
        assert data.claim(1, lambda ids: ids) == (2, [third.id])
        data.forget(2)
        assert data.claim(2, lambda ids: ids) == (2, [first.id, third.id])
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


def test_samples_of_a_loop_body_are_read_by_its_own_graph(path: Path) -> None:
    step = captured("h200_models/rnnlm")
    body = step.computations["loop1"].graph
    assert len(body) < len(step.graph)
    with Dataset(path) as data:
        data.describe({"backend": "gpu", "config": synthetic.CONFIG})
        source = data.add_source("rnnlm", "rnnlm full, loop1", body.fingerprint, stored("h200_models/rnnlm"))
        ops = single_ops(body)
        data.add_samples(source, {body.nodes[op.members[0]].key: op for op in ops})
        samples = data.samples()
        data.record(data.begin(samples), {sample.id: measured(900) for sample in samples})
        read = load(data)
        assert data.computation(source).graph.fingerprint == body.fingerprint
    last = read.known.op[read.known.node_start[1:] - 1]  # what reads comes behind what is read
    opcodes = [body.nodes[op.members[0]].opcode for op in ops]
    assert last.tolist() == [spec.VOCABULARY.index(one) if one in spec.VOCABULARY else 0 for one in opcodes]
    assert set(read.group.tolist()) == {"rnnlm, loop bodies"}


def test_a_source_whose_canonical_form_is_another_now_is_refused(path: Path) -> None:
    with Dataset(path) as data:
        source = data.add_source("rnnlm", "rnnlm full", "0ld", stored("h200_models/rnnlm"))
        with pytest.raises(ProfileError, match="no computation of rnnlm full has the fingerprint 0ld"):
            data.computation(source)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.sqlite"
    synthetic.write(path)
    return path


@pytest.fixture(scope="module")
def data(written: Path) -> TrainingData:
    with Dataset(written) as dataset:
        return load(dataset)


def test_rows_are_the_measured_samples(written: Path, data: TrainingData) -> None:
    with Dataset(written) as dataset:
        measured, samples = dataset.measurements(), dataset.samples()
    assert len(data) == len(samples) == len(data.known.estimate_ns) == len(data.blind.estimate_ns)
    expected = [
        np.log(label_ns(measured[s.id], "gpu")) for s in sorted(samples, key=lambda s: (s.source, s.id))
    ]
    np.testing.assert_allclose(data.log_ns, expected)
    assert sorted(set(data.model.tolist())) == ["one", "two"]
    assert data.is_single.sum() == 60
    assert data.about["device_kind"] == "Test GPU"


def test_known_features_hold_the_measured_single_ops_and_blind_ones_do_not(data: TrainingData) -> None:
    column = spec.NODE.index("is_measured")
    assert data.known.node[:, column].mean() > 0.3
    assert data.blind.node[:, column].max() == 0
    np.testing.assert_array_equal(data.known.estimate_ns, data.blind.estimate_ns)


def test_the_label_is_the_middle_of_the_packs_and_the_least_where_other_work_disturbs() -> None:
    times = [Measurement(low, low + 10, 1, 30, 0.0) for low in (100, 300, 110)]
    assert label_ns(times, "gpu") == 110
    assert label_ns(times[:2], "gpu") == 200
    assert label_ns(times[::-1], "cpu") == 100


def test_a_random_split_tests_fused_ops_that_training_never_sees(data: TrainingData) -> None:
    split = random_split(data, seed=1, test=50, validation=20)
    parts = [set(part.tolist()) for part in (split.train, split.validation, split.test)]
    assert [len(part) for part in parts] == [len(data) - 70, 20, 50]
    assert len(set.union(*parts)) == len(data)
    assert not data.is_single[split.test].any()
    assert random_split(data, 1, 50, 20).test.tolist() == split.test.tolist()
    assert random_split(data, 2, 50, 20).test.tolist() != split.test.tolist()


def test_a_model_left_out_is_left_out_whole(data: TrainingData) -> None:
    split = model_split(data, "one", seed=1, validation=20)
    assert set(data.model[split.test].tolist()) == {"one"}
    assert set(data.model[np.concatenate([split.train, split.validation])].tolist()) == {"two"}
    assert not data.is_single[split.test].any()
    assert len(split.test) == int((data.model == "one").sum() - 60)


def test_too_few_samples_are_an_error_that_says_so(data: TrainingData) -> None:
    with pytest.raises(ProfileError, match="240 fused samples are too few"):
        random_split(data, 1, 100, 50)
    with pytest.raises(ProfileError, match="cannot leave out nobody: 0 fused samples"):
        model_split(data, "nobody", 1, 20)


def test_noise_is_what_one_measurement_says_of_another(data: TrainingData) -> None:
    np.testing.assert_allclose(noise(data, data.fused), 0.02, atol=1e-3)


def test_a_data_set_without_measurements_or_provenance_is_refused(tmp_path: Path, written: Path) -> None:
    with (
        Dataset(tmp_path / "empty.sqlite") as dataset,
        pytest.raises(ProfileError, match="holds no measured samples"),
    ):
        load(dataset)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(written.read_bytes())
    with sqlite3.connect(copy) as connection:
        connection.execute("DELETE FROM about WHERE name = 'config'")
    connection.close()
    with (
        Dataset(copy) as dataset,
        pytest.raises(ProfileError, match="does not say what it was measured with"),
    ):
        load(dataset)
