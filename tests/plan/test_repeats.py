"""Kernels of XLA's own that compute again what others compute."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from disco_hlo.hlo.proto import Instruction
from disco_hlo.plan.read import Repeat, read, repeats
from tests.captured import captured
from tests.plan.small_graphs import graph

STEP = graph("param\nmul 0\nneg 1\nadd 2\nexp 3\ntuple 3 4")


def kernel(*nodes: int, returns: int, role: str = "fusion", name: str = "") -> Any:
    return Namespace(
        name=name or f"{role}.{nodes}.{returns}",
        role=role,
        proto=Instruction(opcode="fusion", fusion_kind="kLoop"),
        nodes=nodes,
        results=(returns,),
        transfer_order=nodes,
    )


def test_a_kernel_that_owns_nothing_is_a_repeat_and_runs_before_the_next_that_does() -> None:
    again = kernel(1, 2, returns=2, name="again")
    twice = kernel(2, returns=2, name="twice")
    source: Any = Namespace(
        graph=STEP,
        cut=(),
        origins=(kernel(1, 2, returns=2), again, kernel(3, returns=3), twice, kernel(4, returns=4)),
    )
    assert repeats(source) == (Repeat((1, 2), (2,), before=3), Repeat((2,), (2,), before=4))


def test_a_repeat_at_the_end_runs_before_nothing_and_another_before_an_op_alone() -> None:
    again = kernel(1, 2, returns=2, name="again")
    last = kernel(3, returns=3, name="last")
    source: Any = Namespace(
        graph=STEP,
        cut=(),
        origins=(
            kernel(1, 2, returns=2), kernel(3, returns=3), again, kernel(4, returns=4, role="op"), last,
        ),
    )  # fmt: skip
    assert repeats(source) == (Repeat((1, 2), (2,), before=4), Repeat((3,), (3,), before=-1))


def test_a_kernel_that_owns_something_is_none() -> None:
    kernels = (kernel(1, 2, returns=2), kernel(3, returns=3), kernel(1, 2, 3, 4, returns=4))
    source: Any = Namespace(graph=STEP, cut=(), origins=kernels)
    assert repeats(source) == ()


def test_a_kernel_that_only_cuts_a_gradient_out_of_its_bucket_runs_before_the_first_that_reads_it() -> None:
    step = graph("param\nmul 0\nallreduce 1\nneg 2\nexp 2\nadd 3 4")
    source: Any = Namespace(graph=step, cut=(2,), origins=(kernel(1, returns=1), kernel(3, 4, 5, returns=5)))
    assert repeats(source) == (Repeat((), (2,), before=3),)


def test_xla_cuts_every_gradient_of_its_own_buckets_of_several_once() -> None:
    source = captured("h200_models/vgg19")
    packed = {
        node for bucket in read(source).buckets if len(bucket.all_reduces) > 1 for node in bucket.all_reduces
    }
    assert packed
    assert sorted(source.cut) == sorted(packed)
