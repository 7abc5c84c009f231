"""The estimator as a cost model: its interface, what it does without weights, the table of what was computed before."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest

from disco_hlo.errors import ProfileError
from disco_hlo.estimator import gnn
from disco_hlo.estimator.analytic import AnalyticModel, DeviceModel
from disco_hlo.estimator.features import encode, graph_features, selected
from disco_hlo.estimator.gnn import (
    GnnModel,
    Known,
    digests,
    estimator_for,
    new_space,
    nothing_known,
    times_ns,
    with_room,
)
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.hlo.cost_model import Kernels
from disco_hlo.hlo.graph import Kind
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from tests.estimator.steps import DEVICE, random_weights, transformer
from tests.estimator.test_features import many
from tests.graphs import graph_of

GRAPH = transformer().graph
KERNELS = unit_graph(GRAPH, read(transformer())).kernels(GRAPH)


@pytest.fixture(scope="module")
def model() -> GnnModel:
    return GnnModel(random_weights())


def test_kernels_are_the_network_s_correction_of_the_analytical_estimate(model: GnnModel) -> None:
    times = model.kernels_ns(GRAPH, KERNELS)
    ratio = times / AnalyticModel(DEVICE).kernels_ns(GRAPH, KERNELS)
    assert times.dtype == np.int64
    assert len(times) == len(KERNELS) > 256
    assert np.exp(-3.01) < ratio.min() < ratio.max() < np.exp(3.01)
    assert len(set(np.round(ratio, 3))) > 20


def test_what_moving_bytes_takes_is_the_analytical_estimate_s(model: GnnModel) -> None:
    least = model.moving_ns(GRAPH, KERNELS)
    assert least.tolist() == AnalyticModel(DEVICE).moving_ns(GRAPH, KERNELS).tolist()
    assert least.min() > 0
    assert (least <= AnalyticModel(DEVICE).kernels_ns(GRAPH, KERNELS)).all()


def test_one_kernel_costs_the_same_alone_and_among_others(model: GnnModel) -> None:
    times = model.kernels_ns(GRAPH, KERNELS)
    fresh = GnnModel(random_weights())
    for place in (0, 7, len(KERNELS) - 1):
        assert fresh.kernels_ns(GRAPH, KERNELS.chosen(np.array([place])))[0] == times[place]


def test_a_model_that_has_been_asked_goes_to_another_process(model: GnnModel) -> None:
    """It did not once it had been asked, and the search's other seeds ran in the process of the first."""
    times = model.kernels_ns(GRAPH, KERNELS)
    copy = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
    assert copy.kernels_ns(GRAPH, KERNELS).tolist() == times.tolist()


def test_layers_share_one_prediction() -> None:
    model = GnnModel(random_weights())
    model.kernels_ns(GRAPH, KERNELS)
    assert model._known.used[0] < len(KERNELS) / 2


def test_single_ops_are_estimated_too(model: GnnModel) -> None:
    times = model.op_ns(GRAPH)
    analytic = AnalyticModel(DEVICE).op_ns(GRAPH)
    for node in GRAPH.nodes:
        if node.kind in (Kind.PARAMETER, Kind.CONSTANT, Kind.FREE, Kind.COLLECTIVE):
            assert times[node.id] == 0
        if node.kind is Kind.FIXED:
            assert times[node.id] == analytic[node.id]
    fusible = [node.id for node in GRAPH.nodes if node.kind is Kind.FUSIBLE]
    alone = model.kernels_ns(GRAPH, Kernels.of_lists(*[[(node,) for node in fusible[:50]]] * 2))
    assert times[fusible[:50]].tolist() == alone.tolist()


def test_a_graph_without_fusible_ops_is_no_trouble(model: GnnModel) -> None:
    graph = graph_of("param\ntuple 0")
    assert model.op_ns(graph).tolist() == [0, 0]
    assert model.kernels_ns(graph, Kernels.of_lists([], [])).tolist() == []


def test_measured_times_of_single_ops_are_heard() -> None:
    first = KERNELS.chosen(np.array([0]))
    key = GRAPH.nodes[first.flat.members[0]].key
    told = GnnModel(random_weights(), {key: 1e6})
    assert told.kernels_ns(GRAPH, first)[0] != GnnModel(random_weights()).kernels_ns(GRAPH, first)[0]


def test_a_full_memory_is_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gnn, "_MOST_KNOWN", 3)
    model = GnnModel(random_weights())
    times = model.kernels_ns(GRAPH, KERNELS)
    assert times.tolist() == GnnModel(random_weights()).kernels_ns(GRAPH, KERNELS).tolist()


def test_kernels_of_different_features_have_different_digests() -> None:
    predictions = predicted_ns(network(random_weights()), many())
    found = {tuple(row) for row in digests(many()).tolist()}
    assert len(found) == len(set(predictions.tolist()))


LOCAL = AnalyticModel(DeviceModel(2e11, 1e12, hoists=True))


@pytest.fixture(autouse=True)
def nothing_said() -> None:
    gnn._say_once.cache_clear()


def test_a_device_without_weights_gets_the_analytical_model_and_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = estimator_for("gpu", "Nobody's GPU", LOCAL)
    assert found is LOCAL
    assert "Nobody's GPU are estimated analytically: no estimator was trained for it" in caplog.text


def test_a_gpu_of_the_same_processor_takes_its_network(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="disco_hlo"):
        estimator_for("gpu", "NVIDIA H100 NVL", LOCAL)
        found = estimator_for("gpu", "NVIDIA H100 NVL", LOCAL)
    assert isinstance(found, GnnModel)
    assert found.analytic.device == found.weights.device, "as it was trained; measured kernels put it right"
    assert caplog.text.count("estimated as on NVIDIA H100 80GB HBM3") == 1, (
        "a search asks for its estimator several times"
    )


def test_damaged_weights_do_not_stop_anything(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(backend: str, device_kind: str) -> None:
        raise ProfileError("the package's cpu.safetensors is damaged")

    monkeypatch.setattr(gnn, "shipped", refuse)
    assert isinstance(estimator_for("cpu", "Some CPU", LOCAL), AnalyticModel)
    assert "the package's cpu.safetensors is damaged" in caplog.text


def test_on_its_own_device_the_estimator_corrects_the_estimate_it_was_trained_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gnn, "shipped", lambda *_: random_weights())
    found = estimator_for("gpu", "Test GPU", LOCAL)
    assert isinstance(found, GnnModel)
    assert found.analytic.device == DEVICE


def test_on_another_cpu_it_corrects_that_machine_s_own_estimate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "disco_hlo")
    monkeypatch.setattr(gnn, "shipped", lambda *_: random_weights(device_kind="Old CPU, 2 cores"))
    found = estimator_for("cpu", "New CPU, 64 cores", LOCAL)
    assert isinstance(found, GnnModel)
    assert found.analytic is LOCAL
    assert "New CPU, 64 cores: the estimator trained on Old CPU, 2 cores corrects" in caplog.text


ANALYTIC = AnalyticModel(DEVICE)
FEATURES = graph_features(GRAPH, ANALYTIC, {})
NET = network(random_weights())


def priced(known: Known) -> list[int]:
    found, space = np.zeros(len(KERNELS), np.int64), new_space(NET, 1, 1)
    wanted = times_ns(FEATURES, KERNELS.flat, ANALYTIC.scratch(GRAPH), NET, known, space, found)
    assert not found.any()
    assert min(wanted) > 1
    space = new_space(NET, *wanted)
    assert times_ns(FEATURES, KERNELS.flat, ANALYTIC.scratch(GRAPH), NET, known, space, found) == (0, 0)
    return found.tolist()


def test_one_after_the_other_is_what_a_batch_is() -> None:
    known = with_room(nothing_known(2), len(KERNELS))
    found = priced(known)
    batch = encode(FEATURES, KERNELS, ANALYTIC.scratch(GRAPH))
    assert found == np.maximum(np.rint(predicted_ns(NET, batch)), 1).tolist()
    assert known.used[0] == len({tuple(row) for row in digests(batch).tolist()})


def test_what_is_known_is_not_computed_again() -> None:
    known = with_room(nothing_known(2), len(KERNELS))
    priced(known)
    known.time_ns[known.time_ns > 0] = 7
    larger = with_room(known, 10_000)
    assert larger.time_ns.size > known.time_ns.size
    assert larger.used[0] == known.used[0] == np.count_nonzero(larger.time_ns)
    assert set(priced(larger)) == {7}


def test_every_number_of_a_kernel_counts() -> None:
    one = selected(many(), np.array([len(many().estimate_ns) - 1]))
    found = {digests(one).tobytes()}
    changes = 0
    for name in ("node", "edge", "kernel"):
        numbers = getattr(one, name)
        for row in range(min(len(numbers), 3)):
            for column in range(numbers.shape[1]):
                changed = numbers.copy()
                changed[row, column] += 1
                found.add(digests(one._replace(**{name: changed})).tobytes())
                changes += 1
    op, neighbour = one.op.copy(), one.neighbour.copy()
    op[0] += 1
    neighbour[0] += 1
    found |= {digests(one._replace(op=op)).tobytes(), digests(one._replace(neighbour=neighbour)).tobytes()}
    assert len(found) == changes + 3
