from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from disco_hlo.printable import counted, printable, size_text, time_text


def test_what_a_terminal_would_obey_is_escaped() -> None:
    assert printable("a\x1b[31mred\x07\n\u202ereversed\ud800") == r"a\x1b[31mred\x07\n\u202ereversed\ud800"
    assert printable("<b>größe</b> 'x'") == "<b>größe</b> 'x'"


def test_what_is_too_long_is_cut_and_its_length_told() -> None:
    assert printable("x" * 10_000, 5) == "xxxxx… (10000 characters)"
    assert printable("x" * 5, 5) == "xxxxx"


@given(st.text(alphabet=st.characters(codec=None)))
def test_every_text_becomes_printable_and_can_be_encoded(text: str) -> None:
    shown = printable(text, 50)
    assert shown.isprintable()
    json.dumps(shown).encode("ascii")
    shown.encode()


def test_times_and_sizes_are_written_for_people() -> None:
    assert [time_text(ns) for ns in (0, 999, 1500, 2_345_678, 5e9)] == [
        "0 ns", "999 ns", "1.5 µs", "2.346 ms", "5 s",
    ]  # fmt: skip
    assert [size_text(n) for n in (0, 1023, 1536, 3 << 20, 5 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3 MiB", "5 TiB",
    ]  # fmt: skip


def test_one_of_something_is_in_the_singular() -> None:
    """ "1 ops are not in the profile", "in 1 processes"."""
    assert [counted(n, "op") for n in (0, 1, 2)] == ["0 ops", "1 op", "2 ops"]
    assert [counted(n, "process") for n in (1, 2)] == ["1 process", "2 processes"]
    assert [counted(n, "time") for n in (1.0, 1.5, 1e7)] == ["1 time", "1.5 times", "10000000 times"]


def test_a_group_that_costs_traffic_has_its_bytes_in_units_too() -> None:
    assert [size_text(n) for n in (-1, -1536, -9_204_224)] == ["-1 B", "-1.5 KiB", "-8.778 MiB"]
