"""From members to times in one go, and the table of what was computed before."""

import numpy as np

from disco_hlo.estimator.analytic import AnalyticModel
from disco_hlo.estimator.features import encode, graph_features, selected
from disco_hlo.estimator.gnn import Known, digests, new_space, nothing_known, times_ns, with_room
from disco_hlo.estimator.network import network, predicted_ns
from disco_hlo.plan.read import read
from disco_hlo.plan.units import unit_graph
from tests.estimator.steps import DEVICE, random_weights, transformer
from tests.estimator.test_features import MANY

GRAPH = transformer().graph
ANALYTIC = AnalyticModel(DEVICE)
FEATURES = graph_features(GRAPH, ANALYTIC, {})
KERNELS = unit_graph(GRAPH, read(transformer())).kernels(GRAPH)
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


def test_a_table_with_room_is_left_alone() -> None:
    known = nothing_known(16)
    assert with_room(known, 8) is known
    assert with_room(known, 9).time_ns.size == 32


def test_every_number_of_a_kernel_counts() -> None:
    one = selected(MANY, np.array([len(MANY.estimate_ns) - 1]))
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
