"""Where an all-reduce may overwrite its operand, on graphs small enough to draw."""

from __future__ import annotations

from disco_hlo.plan.apply import may_overwrite
from tests.plan.small_graphs import Pairs, graph


def overwrites(text: str, all_reduce: int, inplace: Pairs = ()) -> bool:
    return may_overwrite(graph(text, inplace=inplace, backend="gpu"), all_reduce)


def test_a_gradient_that_only_its_all_reduce_reads_is_overwritten() -> None:
    assert overwrites("""
        param
        add 0 0
        all-reduce 1
        add 2 0
    """, 2)  # fmt: skip


def test_bitcasts_and_results_of_library_calls_are_buffers_like_others() -> None:
    assert overwrites("""
        param
        custom-call 0 0
        get-tuple-element 1
        bitcast 2
        all-reduce 3
        add 4 0
    """, 4)  # fmt: skip


def test_a_second_reader_forbids_it_also_behind_a_bitcast() -> None:
    assert not overwrites("""
        param
        add 0 0
        all-reduce 1
        bitcast 1
        add 3 2
    """, 2)  # fmt: skip


def test_a_returned_gradient_stays() -> None:
    assert not overwrites("""
        param
        add 0 0
        all-reduce 1
        tuple 1 2
    """, 2)  # fmt: skip


def test_a_parameter_or_another_all_reduces_result_stays() -> None:
    step = """
        param
        all-reduce 0
        all-reduce 1
        tuple 2
    """
    assert not overwrites(step, 1)
    assert not overwrites(step, 2)


def test_a_result_that_must_end_up_in_a_donated_parameter_is_not_moved_elsewhere() -> None:
    step = """
        param
        add 0 0
        all-reduce 1
        tuple 2
    """
    assert overwrites(step, 2)
    assert not overwrites(step, 2, inplace=((0, 2),))


def test_what_was_updated_in_place_is_judged_by_the_buffer_it_was_updated_in() -> None:
    step = """
        param
        broadcast 0
        scatter 1 0
        all-reduce 2
        tuple 3
    """
    assert overwrites(step, 3, inplace=((1, 2),))
    assert not overwrites(step, 3, inplace=((0, 2),))
