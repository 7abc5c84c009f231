"""The torch model: what it computes, what training learns, and where an interrupted training goes on."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

if sys.version_info >= (3, 12):
    pytest.skip("DGL has no wheel past Python 3.11; the 3.11 leg runs this", allow_module_level=True)

import torch

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import architecture as spec
from disco_hlo.estimator.architecture import PAPER, Architecture
from disco_hlo.estimator.dataset import Dataset, TrainingData, load, random_split
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.estimator.train import (
    FusedOpNet,
    GraphBatch,
    TrainSettings,
    exported,
    imported,
    learning_rate,
    loss_of,
    predict,
    train,
)
from disco_hlo.estimator.weights import expected_shapes, to_bytes
from tests.estimator import synthetic
from tests.estimator.steps import random_weights
from tests.estimator.test_features import many
from tests.estimator.test_network import WIDE

SMALL = Architecture(layers=2, heads=2, width=16, dense=(16, 8))
SETTINGS = TrainSettings(epochs=12, batch=16, learning_rate=5e-3, architecture=SMALL)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TrainingData:
    path = tmp_path_factory.mktemp("data") / "samples.sqlite"
    synthetic.write(path)
    with Dataset(path) as dataset:
        return load(dataset)


def test_it_learns_what_the_estimate_does_not_know(data: TrainingData) -> None:
    split = random_split(data, 0, 40, 30)
    net, curve = train(data, split, SETTINGS)
    truth = data.log_ns[split.test]
    before = np.abs(np.log(data.known.estimate_ns[split.test]) - truth).mean()
    after = np.abs(predict(net, data, split.test) - truth).mean()
    assert after < 0.35 * before
    assert curve[-1].train_loss < 0.5 * curve[0].train_loss
    assert np.abs(predict(net, data, split.test, blind=True) - truth).mean() < 0.5 * before


def test_an_interrupted_training_ends_as_if_nothing_had_happened(data: TrainingData, tmp_path: Path) -> None:
    split = random_split(data, 0, 40, 30)
    settings = replace(SETTINGS, epochs=4)
    whole, whole_curve = train(data, split, settings)
    checkpoint = tmp_path / "run.pt"

    class StoppedError(Exception):
        pass

    def stop(epoch: object) -> None:
        raise StoppedError

    for _ in range(2):
        with pytest.raises(StoppedError):
            train(data, split, settings, checkpoint=checkpoint, on_epoch=stop)
    resumed, curve = train(data, split, settings, checkpoint=checkpoint)
    assert [e.validation_error for e in curve] == [e.validation_error for e in whole_curve]
    assert to_bytes(exported(resumed, data, {})) == to_bytes(exported(whole, data, {}))
    assert list(tmp_path.iterdir()) == [checkpoint]


def test_a_checkpoint_of_another_training_or_a_broken_one_is_refused(
    data: TrainingData, tmp_path: Path
) -> None:
    split = random_split(data, 0, 40, 30)
    settings = replace(SETTINGS, epochs=1)
    checkpoint = tmp_path / "run.pt"
    train(data, split, settings, checkpoint=checkpoint)
    with pytest.raises(ProfileError, match="is of another training"):
        train(data, split, replace(settings, seed=1), checkpoint=checkpoint)
    checkpoint.write_bytes(checkpoint.read_bytes()[:-8])
    with pytest.raises(ProfileError, match="is no usable checkpoint"):
        train(data, split, settings, checkpoint=checkpoint)


def test_a_checkpoint_of_another_split_or_another_start_is_refused(
    data: TrainingData, tmp_path: Path
) -> None:
    split, other = random_split(data, 0, 40, 30), random_split(data, 1, 40, 30)
    settings = replace(SETTINGS, epochs=1)
    first, _ = train(data, split, settings, checkpoint=tmp_path / "first.pt")
    with pytest.raises(ProfileError, match="is of another training"):  # it has learned from the test samples
        train(data, other, settings, checkpoint=tmp_path / "first.pt")
    second, _ = train(data, other, settings)
    tuned = tmp_path / "tuned.pt"
    train(data, split, settings, checkpoint=tuned, start=first)
    for start in (second, None):
        with pytest.raises(ProfileError, match="is of another training"):
            train(data, split, settings, checkpoint=tuned, start=start)
    _, curve = train(data, split, settings, checkpoint=tuned, start=first)
    assert len(curve) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("huber_delta", -1.0), ("huber_delta", float("nan")), ("learning_rate", float("inf"))]
)
def test_settings_that_no_loss_can_do_with_are_refused(name: str, value: float) -> None:
    with pytest.raises(ProfileError, match="expected"):
        TrainSettings(**{name: value})  # type: ignore[arg-type]


def test_training_stops_when_nothing_improves(data: TrainingData) -> None:
    split = random_split(data, 0, 40, 30)
    frozen = replace(SETTINGS, learning_rate=1e-12, patience=2, weight_decay=0.0)
    _, curve = train(data, split, frozen)
    assert len(curve) < SETTINGS.epochs


def test_fine_tuning_starts_from_the_given_network_and_leaves_it_as_it_was(data: TrainingData) -> None:
    split = random_split(data, 0, 40, 30)
    start, _ = train(data, split, replace(SETTINGS, epochs=2))
    weights = exported(start, data, {})
    tuned, curve = train(
        data, split, replace(SETTINGS, epochs=1, learning_rate=1e-6), start=imported(weights)
    )
    assert to_bytes(exported(start, data, {})) == to_bytes(weights)
    np.testing.assert_allclose(predict(tuned, data, split.test), predict(start, data, split.test), atol=1e-2)
    assert len(curve) == 1


def test_the_paper_s_model_trains_on_the_paper_s_loss(data: TrainingData) -> None:
    split = random_split(data, 0, 40, 30)
    _, curve = train(
        data, split, replace(SETTINGS, epochs=5, loss="paper", architecture=replace(PAPER, width=16))
    )
    assert curve[-1].train_loss < curve[0].train_loss


def test_losses_by_hand() -> None:
    truth = torch.log(torch.tensor([1000.0, 2000.0]))
    predicted = torch.log(torch.tensor([1100.0, 2000.0]))
    gap = float(np.log(1.1))
    values = {
        name: loss_of(predicted, truth, replace(SETTINGS, loss=name, huber_delta=0.05)).item()
        for name in ("huber", "paper")
    }
    assert values["huber"] == pytest.approx((gap - 0.025) / 2, rel=1e-4)
    # log of the squared difference in microseconds: exact predictions are cut off at a nanosecond.
    assert values["paper"] == pytest.approx((np.log(0.1**2 + 1e-6) + np.log(1e-6)) / 2, rel=1e-3)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(SETTINGS, share) for share in (0.0, 0.05, 0.1, 0.5, 1.0)]
    assert rates[0] < rates[1] < rates[2] == pytest.approx(SETTINGS.learning_rate)
    assert rates[2] > rates[3] > rates[4] > 0


@pytest.mark.parametrize("changes", [{"loss": "hinge"}, {"epochs": 0}, {"learning_rate": 0.0}])
def test_impossible_settings_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProfileError):
        replace(SETTINGS, **changes)


@pytest.mark.parametrize("architecture", [Architecture(), WIDE])
def test_the_exported_network_is_the_trained_one(architecture: Architecture) -> None:
    weights = random_weights(architecture, seed=3)
    with torch.no_grad():
        trained = imported(weights).log_times(GraphBatch.of(many())).double().numpy()
    np.testing.assert_allclose(np.log(predicted_ns(network(weights), many())), trained, atol=1e-5)


@pytest.mark.parametrize("architecture", [Architecture(), PAPER])
def test_weights_hold_exactly_what_the_network_has(architecture: Architecture) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in FusedOpNet(architecture).state_dict().items()}
    assert found == expected_shapes(architecture)


def test_the_paper_s_network_has_six_attention_layers_and_three_dense_ones() -> None:
    net = FusedOpNet(PAPER)
    assert [type(layer).__name__ for layer in net.layers] == ["AttentionLayer"] * 6
    assert all(layer.heads > 1 for layer in net.layers)
    assert net.dense3.out_features == 1
    batch = GraphBatch.of(many())
    with torch.no_grad():
        assert torch.equal(net.eval().log_times(batch), net(batch))


def test_the_paper_s_network_sees_types_sizes_times_and_edges_only() -> None:
    net = FusedOpNet(PAPER).eval()
    given = [spec.NODE.index(name) for name in spec.PAPER_NODE]
    others = [column for column in range(len(spec.NODE)) if column not in given]
    node = many().node.copy()
    node[:, others] = 0.5
    blurred = many()._replace(node=node, edge=np.zeros_like(many().edge), kernel=np.zeros_like(many().kernel))
    with torch.no_grad():
        assert torch.equal(net(GraphBatch.of(blurred)), net(GraphBatch.of(many())))
        node[:, given] += 1
        assert not torch.equal(net(GraphBatch.of(blurred._replace(node=node))), net(GraphBatch.of(many())))


def test_standardised_inputs_have_mean_zero_and_deviation_one() -> None:
    net = FusedOpNet(Architecture())
    net.standardise(many(), np.linspace(-1, 2, len(many().estimate_ns)))
    standard = (torch.from_numpy(many().edge) - net.edge_mean) * net.edge_scale
    varying = torch.from_numpy(many().edge).std(0) > 1e-3
    assert standard.mean(0).abs().max() < 1e-4
    assert (standard.std(0)[varying] - 1).abs().max() < 1e-2
    assert net.output_mean.item() == 0.5
    np.testing.assert_allclose(net.output_range.numpy(), [-1.2, 2.2], atol=1e-6)
