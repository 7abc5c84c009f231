"""Two hundred changed files, each read by a command: it works, or says in one line why it does not.

``python -m tests.mutate.run --count 20000`` runs as many as one likes, in a process whose memory is bounded.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from random import Random

import pytest

from disco_hlo.errors import DiscoError
from tests.captured import CASES, CPU_MODULE
from tests.cli.conftest import Disco
from tests.mutate import mutations
from tests.mutate.cases import KINDS, WEIGHTS
from tests.mutate.run import Case, Runner

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("mutate"), seed=7)


def test_changed_files_are_read_or_refused_in_one_line(runner: Runner) -> None:
    # Searches and the larger module take longest, and are left to the script.
    quick = [
        n for n in range(240) if (case := Case.of(n, 7)[0]).label != "search" and "gpu" not in case.kind.name
    ]
    results = [runner.run(number) for number in quick]
    wrong = [one for one in results if one.outcome not in ("0", "2")]
    assert not wrong, wrong[0].text
    assert {one.outcome for one in results} == {"0", "2"}
    assert {one.kind for one in results} == {kind.name for kind in KINDS if "gpu" not in kind.name}


def test_what_is_changed_follows_from_the_seed() -> None:
    data = CPU_MODULE.read_bytes()
    changed = [mutations.of_module(Random(seed), data) for seed in (1, 1, 2)]
    assert changed[0] == changed[1] != changed[2]
    assert changed[0] != data


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("negative_dimension", "has the dimensions"),
        ("damaged_1", "computation 0 is listed twice"),
        ("damaged_2", "has 2 dimensions in the order"),
        ("twice", "lists instruction 257698037760 twice"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "search"])
def test_a_damaged_module_is_refused_in_one_line(
    disco: Disco, tmp_path: Path, name: str, why: str, command: str
) -> None:
    output = ("-o", tmp_path / "out") if command == "search" else ()
    outcome = disco(command, CASES / f"{name}.hlo.pb", *output)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert why in line


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
def test_a_profile_that_is_no_file_is_refused(disco: Disco, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "pipe"
    if kind == "pipe":
        os.mkfifo(place)
    place = {"device": Path("/dev/zero"), "pipe": place, "folder": tmp_path}[kind]
    outcome = disco("simulate", CPU_MODULE, "--profile", place)
    assert (outcome.code, outcome.out) == (2, "")
    (line,) = outcome.err.splitlines()
    assert "cannot read the profile" in line


def test_neither_settings_nor_a_store_is_read_from_a_device(tmp_path: Path) -> None:
    from disco_hlo.plugin.settings import Settings
    from disco_hlo.profiler.store import ProfileStore

    with pytest.raises(DiscoError, match="/dev/zero: it is not a regular file"):
        Settings.from_environment({"DISCO_CONFIG": "/dev/zero", "ENABLE_SEARCH": "1", "HOME": str(tmp_path)})
    with pytest.raises(DiscoError, match="the profile store /dev/zero: it is no file"):
        ProfileStore(Path("/dev/zero"))


@pytest.mark.parametrize(
    ("part", "name", "value", "why"),
    [
        ("architecture", "dense", [64], "of length 2, got 1 - at `$.dense`"),
        ("architecture", "dense", [64, 32, 16], "of length 2, got 3 - at `$.dense`"),
        ("architecture", "layers", 10**12, "<= 65536 - at `$.layers`"),
        ("architecture", "uses_edges", 1, "Expected `bool`, got `int` - at `$.uses_edges`"),
        ("device", "element_ns", [1, 2], "Expected `object`, got `array` - at `$.element_ns`"),
        ("device", "streaming", [[1, 2, 3]], "of length 2, got 3 - at `$.streaming[0]`"),
        ("device", "memory_bandwidth", "fast", "Expected `float`, got `str` - at `$.memory_bandwidth`"),
    ],
)
def test_weights_of_another_make_are_refused(part: str, name: str, value: object, why: str) -> None:
    from disco_hlo.estimator.weights import from_bytes

    data = (ROOT / WEIGHTS).read_bytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(data[8 : 8 + length])
    own = json.loads(head["__metadata__"]["disco_hlo"])
    own[part][name] = value
    head["__metadata__"]["disco_hlo"] = json.dumps(own)
    text = json.dumps(head).encode()
    with pytest.raises(DiscoError, match="damaged") as caught:
        from_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :], "weights")
    assert why in str(caught.value)


def test_a_gzip_file_is_unpacked_piece_by_piece() -> None:
    from disco_hlo.regular_file import unzipped

    packed = gzip.compress(bytes(3 << 20))
    assert unzipped(packed, 3 << 20) == bytes(3 << 20)
    assert unzipped(packed + gzip.compress(b"more"), 4 << 20) == bytes(3 << 20) + b"more"
    for damaged, why in (
        (packed, "unzips to more than"),
        (packed[:-9], "ended before the end"),
        (b"\x1f\x8b", "ended before the end"),
    ):
        with pytest.raises(OSError, match=why):
            unzipped(damaged, 2 << 20 if damaged is packed else 4 << 20)
