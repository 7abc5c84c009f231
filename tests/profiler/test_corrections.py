"""What measured kernels tell of others: on two layers of a tanh, an add and a dot, all corrections by hand."""

import numpy as np
import pytest

from disco_hlo.hlo.graph import flat_lists
from disco_hlo.profiler.corrections import NONE, Seen, corrections
from tests.profiler.test_keys import TWO_LAYERS

TANH, ADD, DOT, LATER_TANH, LATER_ADD = 1, 2, 3, 4, 5


def factors(known, *kernels):
    return known.factors(known.of_nodes(TWO_LAYERS), *flat_lists(kernels)).tolist()


def test_a_kernel_is_off_by_what_those_with_its_ops_are_off():
    known = corrections(TWO_LAYERS, [Seen((TANH, ADD), 1000, 1500, False)])
    same, alike, one_op, unknown = factors(known, (TANH, ADD), (LATER_TANH, LATER_ADD), (ADD,), (DOT,))
    assert (same, alike, one_op, unknown) == pytest.approx((1.5, 1.5, 1.5, 1.0))


def test_a_rare_op_tells_more_than_one_in_every_kernel():
    # Half of each kernel's time is the tanh's: 500 + 1000 ns in two kernels, which weighs 1500 / 2 / 4; the dot in one
    # weighs 1000. The tanh is off by the mean of ln 1 and ln 2 that weighs 500 and 1000, the dot by ln 2.
    seen = [Seen((TANH, ADD), 1000, 1000, False), Seen((LATER_TANH, DOT), 2000, 4000, False)]
    tanh, both = factors(corrections(TWO_LAYERS, seen), (TANH,), (TANH, DOT))
    assert tanh == pytest.approx(2 ** (2 / 3))
    assert both == pytest.approx(2 ** ((187.5 * 2 / 3 + 1000) / 1187.5))


def test_chosen_kernels_raise_all_by_what_the_others_do_not_explain():
    # Without itself the chosen one would be corrected by 1.2, to 1200; it took 1500.
    seen = [Seen((TANH,), 1000, 1200, False), Seen((TANH, ADD), 1000, 1500, True)]
    known = corrections(TWO_LAYERS, seen)
    assert known.shortfall == pytest.approx(1.25)
    assert factors(known, (DOT,)) == pytest.approx([1.25])
    assert corrections(TWO_LAYERS, [seen[0]]).shortfall == 1.0
    kept = Seen((TANH, ADD), 1000, 900, True)
    assert corrections(TWO_LAYERS, [seen[0], kept]).shortfall == 1.0
    hopeless = Seen((TANH, ADD), 1000, 9000, True)
    assert corrections(TWO_LAYERS, [seen[0], hopeless]).shortfall == 2.0


def test_an_estimate_of_something_else_corrects_by_four_at_most():
    known = corrections(TWO_LAYERS, [Seen((TANH,), 10, 9000, False), Seen((DOT,), 9000, 10, False)])
    assert factors(known, (TANH,), (DOT,)) == pytest.approx([4.0, 0.25])


def test_nothing_seen_corrects_nothing():
    assert corrections(TWO_LAYERS, []) is NONE
    assert corrections(TWO_LAYERS, [Seen((TANH,), 1000, 0, False)]) is NONE


def test_the_order_in_which_kernels_were_seen_does_not_matter():
    random = np.random.default_rng(0)
    seen = [
        Seen(members, int(random.integers(1, 5000)), int(random.integers(1, 5000)), chosen)
        for members in ((TANH,), (ADD, DOT), (DOT, LATER_TANH), (TANH, ADD))
        for chosen in (False, True)
    ]
    known, turned = corrections(TWO_LAYERS, seen), corrections(TWO_LAYERS, seen[::-1])
    kernels = (TANH, ADD), (DOT,), (ADD, DOT, LATER_TANH)
    assert factors(known, *kernels) == pytest.approx(factors(turned, *kernels))
