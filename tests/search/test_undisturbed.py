"""The collector rests while a search is prepared, and is left as it was."""

from __future__ import annotations

import gc

import pytest

from disco_hlo.search.interpreter import without_collector


def fail_undisturbed() -> None:
    with without_collector():
        assert not gc.isenabled()
        raise KeyError


def test_the_collector_rests_meanwhile_and_goes_on_even_after_an_error() -> None:
    with pytest.raises(KeyError):
        fail_undisturbed()
    assert gc.isenabled()


def test_a_collector_that_the_user_turned_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
