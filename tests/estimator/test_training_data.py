"""From a data set to rows to learn from: labels, splits, noise."""

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
from tests.estimator import synthetic


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "samples.sqlite"
    synthetic.write(path)
    return path


@pytest.fixture(scope="module")
def data(path: Path) -> TrainingData:
    with Dataset(path) as dataset:
        return load(dataset)


def test_rows_are_the_measured_samples(path: Path, data: TrainingData) -> None:
    with Dataset(path) as dataset:
        measured, samples = dataset.measurements(), dataset.samples()
    assert len(data) == len(samples) == len(data.known.estimate_ns) == len(data.blind.estimate_ns)
    expected = [
        np.log(label_ns(measured[s.id], "gpu")) for s in sorted(samples, key=lambda s: (s.source, s.id))
    ]
    np.testing.assert_allclose(data.log_ns, expected)
    assert sorted(set(data.model.tolist())) == ["one", "two"]
    assert data.is_single.sum() == 60
    assert all(len(held) == 1 for held, alone in zip(data.opcodes, data.is_single, strict=True) if alone)
    assert data.about["device_kind"] == "Test GPU"


def test_known_features_hold_the_measured_single_ops_and_blind_ones_do_not(data: TrainingData) -> None:
    column = spec.NODE.index("is_measured")
    assert data.known.node[:, column].mean() > 0.3
    assert data.blind.node[:, column].max() == 0
    np.testing.assert_array_equal(data.known.estimate_ns, data.blind.estimate_ns)


def test_the_label_is_the_middle_of_the_packs() -> None:
    times = [Measurement(low, low + 10, 1, 30, 0.0) for low in (100, 300, 110)]
    assert label_ns(times, "gpu") == 110
    assert label_ns(times[:2], "gpu") == 200


def test_the_label_is_the_least_of_the_packs_where_other_work_disturbs() -> None:
    times = [Measurement(low, low + 10, 1, 30, 0.5) for low in (110, 300, 100)]
    assert label_ns(times, "cpu") == 100


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


def test_a_data_set_without_measurements_or_provenance_is_refused(tmp_path: Path, path: Path) -> None:
    with (
        Dataset(tmp_path / "empty.sqlite") as dataset,
        pytest.raises(ProfileError, match="holds no measured samples"),
    ):
        load(dataset)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(path.read_bytes())
    with sqlite3.connect(copy) as connection:
        connection.execute("DELETE FROM about WHERE name = 'config'")
    connection.close()
    with (
        Dataset(copy) as dataset,
        pytest.raises(ProfileError, match="does not say what it was measured with"),
    ):
        load(dataset)
