from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from disco_hlo import plugin
from disco_hlo.errors import UnsupportedError
from disco_hlo.plugin import install, logs
from disco_hlo.plugin import phases as phases_package
from disco_hlo.plugin.settings import Settings
from disco_hlo.plugin.xla import jaxlink
from disco_hlo.plugin.xla.jaxlink import CompileRequest

TRAINING = """
import json, sys
import jax
from jax._src import compiler
result = float(jax.jit(lambda x: x * 2)(21.0))
ours = sorted(name for name in sys.modules if name.split(".")[0] == "disco_hlo")
print(json.dumps([result, ours, hasattr(compiler.compile_or_get_cached, "_disco_hlo_original")]))
"""

WATCHES = "disco_hlo.plugin.phases.training_phase"
ALONE = "nothing was compiled for more than one device, and no plan in {} is for a step on one"
NO_TRAIN_STEP = (
    "disco: warning: no training step was found: no module is called train_step (DISCO_MODULE); "
    "compiled were "
)

FORKS = """
import os, sys, jax

@jax.jit
def lonely(x):
    return x + 1

lonely(1)
if os.fork() == 0:
    sys.exit()
os.wait()
"""

LOADING = """
import multiprocessing
import jax

def load(number):
    return float(jax.jit(lambda x: x * 2)(float(number)))

if __name__ == "__main__":
    load(2)
    with multiprocessing.get_context("spawn").Pool(1) as workers:
        print(workers.map(load, range(2)))
        workers.close()
        workers.join()
"""


TRANSFORMING = """
import multiprocessing, threading
import jax, jax.numpy as jnp

@jax.jit
def transform(x):
    for _ in range(9):
        x = jnp.tanh(x @ x) + x
    return x

def load(number):
    x = jnp.ones((8, 8))
    for _ in range(50):
        x = transform(x)
    return any(one.name.startswith("disco-") for one in threading.enumerate())

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as workers:
        print(workers.map(load, range(2)))
        workers.close()
        workers.join()
"""


def run(*script: str | Path, **environment: str) -> tuple[str, str]:
    """What a script that knows nothing of us writes to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, *script], env={**os.environ, **environment}, capture_output=True, text=True, timeout=200,
        check=True,
    )  # fmt: skip
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "1", "ENABLE_SEARCH": "0"}, ALONE),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "ENABLE_SEARCH": "1"},
            "2 processes were started together, but their script does not call jax.distributed.initialize(): each "
            "trains for itself",
        ),
    ],
    ids=["enact", "search, started together"],
)
def test_switched_on_compiles_are_intercepted_and_no_phase_but_what_watches_is_imported_for_one_device(
    environment: dict[str, str], reason: str, tmp_path: Path
) -> None:
    stdout, stderr = run("-c", TRAINING, DISCO_DIR=str(tmp_path), **environment)
    found = json.loads(stdout)
    assert found[0] == 42.0
    assert found[2] is True
    watches = {WATCHES} if environment["ENABLE_SEARCH"] == "1" and jaxlink.keeps_donation() else set()
    assert {name for name in found[1] if name.startswith("disco_hlo.plugin.phases.")} == watches
    assert stderr == f"disco: warning: no training step was found: {reason.format(tmp_path)}\n"


def test_workers_that_load_data_say_nothing(tmp_path: Path) -> None:
    script = tmp_path / "loads.py"
    script.write_text(LOADING)
    said = run(script, ENABLE_SEARCH="0", DISCO_MODULE="train_step")
    assert said == ("[0.0, 2.0]\n", NO_TRAIN_STEP + "jit__lambda\n")


def test_workers_that_transform_data_by_jit_are_not_searched(tmp_path: Path) -> None:
    """What transforms a batch returns one, as a step returns its state: each worker began a search of its own."""
    script = tmp_path / "transforms.py"
    script.write_text(TRANSFORMING)
    assert run(script, ENABLE_SEARCH="1", DISCO_DIR=str(tmp_path / "plans")) == ("[False, False]\n", "")


def test_a_fork_of_the_training_says_nothing_at_its_end() -> None:
    said = run("-W", "ignore", "-c", FORKS, ENABLE_SEARCH="0", DISCO_MODULE="train_step")
    assert said == ("", NO_TRAIN_STEP + "jit_lonely\n")


def on_devices(count: int) -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:count]), ("data",)), PartitionSpec("data"))


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str, Settings]]]:
    """Phases that note what they are asked, in the place of the real ones."""
    asked: list[tuple[str, str, Settings]] = []
    for name in ("search_phase", "training_phase", "enact_phase"):
        phase = ModuleType(name)

        def handle(request: CompileRequest, settings: Settings, name: str = name) -> None:
            asked.append((name, request.module_name, settings))

        phase.handle = handle  # type: ignore[attr-defined]
        phase.observe = lambda _: None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"disco_hlo.plugin.phases.{name}", phase)
        monkeypatch.setattr(phases_package, name, phase, raising=False)
    before = (logs.LOGGER.level, logs.LOGGER.propagate, list(logs.LOGGER.handlers))
    yield asked
    jaxlink.uninstall()
    atexit.unregister(install._say_if_nothing_was_found)
    logs.LOGGER.level, logs.LOGGER.propagate, logs.LOGGER.handlers = before
    logs.LOGGER.setLevel(before[0])


@pytest.mark.parametrize(
    ("switch", "when", "donates", "phase"),
    [
        ("1", "", True, "training_phase"),
        ("1", "", False, "search_phase"),
        ("1", "compile", True, "search_phase"),
        ("0", "", True, "enact_phase"),
    ],
    ids=["the default", "a jax that loses donation", "DISCO_WHEN=compile", "enact"],
)
def test_the_switch_names_the_phase_that_sees_modules_on_several_devices(
    switch: str,
    when: str,
    donates: bool,
    phase: str,
    phases: list[tuple[str, str, Settings]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_four(x: jax.Array) -> jax.Array:
        return x + len(phase) + len(when)

    def on_one(x: jax.Array) -> jax.Array:
        return x + 2

    monkeypatch.setenv("ENABLE_SEARCH", switch)
    monkeypatch.setenv("DISCO_DIR", "/plans")
    monkeypatch.setenv("DISCO_WHEN", when)
    monkeypatch.setattr(jaxlink, "keeps_donation", lambda: donates)
    plugin.initialize()
    jax.jit(on_four, in_shardings=on_devices(4))(np.zeros(4, np.float32))
    jax.jit(on_one)(np.zeros(4, np.float32))
    seen = [(phase, "jit_on_four")]
    if phase == "training_phase":  # its calls tell whether it is a step
        seen.append((phase, "jit_on_one"))
    assert [(name, module) for name, module, _ in phases] == seen
    decided = {"training_phase": "training", "search_phase": "compile"}.get(phase, "auto")
    assert phases[0][2] == Settings(search=switch == "1", directory=Path("/plans"), when=decided)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({}, "training"), ({"explain": True}, "compile"), ({"explain": True, "when": "training"}, "training")],
)
def test_what_only_a_search_before_the_first_step_measures_is_measured_there(
    asked: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxlink, "keeps_donation", lambda: True)
    assert install.when_to_search(Settings(search=True, directory=Path("/plans"), **asked)) == expected


@pytest.mark.parametrize(("when", "said"), [("", ""), ("training", "disco: off: no calls are shown\n")])
def test_where_calls_cannot_be_watched_the_default_searches_before_the_first_step(
    when: str,
    said: str,
    phases: list[tuple[str, str, Settings]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def unwatched(_: Settings) -> None:
        raise UnsupportedError("no calls are shown")

    monkeypatch.setattr(sys.modules[WATCHES], "observe", unwatched)
    monkeypatch.setattr(jaxlink, "keeps_donation", lambda: True)
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    monkeypatch.setenv("DISCO_WHEN", when)
    plugin.initialize()
    jax.jit(lambda x: x + len(said), in_shardings=on_devices(4))(np.zeros(4, np.float32))
    assert [name for name, _, _ in phases] == ["training_phase" if said else "search_phase"]
    assert capsys.readouterr().err == said


def test_a_named_module_is_seen_on_one_device_too(
    phases: list[tuple[str, str, Settings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    monkeypatch.setenv("DISCO_MODULE", "lonely")
    monkeypatch.setenv("DISCO_WHEN", "compile")
    plugin.initialize()
    jax.jit(lonely)(np.zeros(4, np.float32))
    assert [module for _, module, _ in phases] == ["jit_lonely"]


def lonely(x: jax.Array) -> jax.Array:
    return x + 1


@pytest.mark.parametrize(("processes", "seen"), [("1", ["jit_lonely"]), ("2", [])])
def test_calls_on_one_device_are_watched_where_one_process_trains_alone(
    processes: str, seen: list[str], phases: list[tuple[str, str, Settings]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    monkeypatch.setenv("DISCO_WHEN", "training")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", processes)
    plugin.initialize()
    jax.jit(lonely)(np.zeros(5, np.float32))
    assert [module for _, module, _ in phases] == seen


@pytest.mark.parametrize("planned", ["jit_lonely", "jit_another"])
def test_of_modules_on_one_device_those_are_enacted_whose_names_have_plans(
    planned: str,
    phases: list[tuple[str, str, Settings]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for folder, name in (("cpu-cpu-x1", planned), ("cpu-cpu-x4", "jit_lonely")):
        target = {
            "key": "ab" * 32, "fingerprint": "ab" * 32, "module_name": name, "backend": "cpu",
            "device_kind": "cpu", "device_count": 1, "process_count": 1,
        }  # fmt: skip
        (tmp_path / "abababababababab" / folder).mkdir(parents=True)
        (tmp_path / "abababababababab" / folder / "plan.json").write_text(json.dumps({"target": target}))
    monkeypatch.setenv("ENABLE_SEARCH", "0")
    monkeypatch.setenv("DISCO_DIR", str(tmp_path))
    plugin.initialize()
    jax.jit(lonely)(np.zeros(6, np.float32))
    assert [module for _, module, _ in phases] == [planned] * (planned == "jit_lonely")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ENABLE_SEARCH": ""}, ""),
        (
            {"ENABLE_SEARCH": "true"},
            "disco: off: ENABLE_SEARCH is 'true'; expected 1 (search), 0 (enact) or unset\n",
        ),
        (
            {"ENABLE_SEARCH": "1", "DISCO_PATIENCE": "0.5"},
            "disco: off: DISCO_PATIENCE is '0.5'; expected a whole number, 1 or more\n",
        ),
    ],
    ids=["empty", "another value", "bad setting"],
)
def test_what_switches_nothing_on_is_one_line_at_most(
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from jax._src import compiler

    own = compiler.compile_or_get_cached
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin.initialize()
    assert compiler.compile_or_get_cached is own
    assert capsys.readouterr().err == said


def test_an_unsupported_jax_is_one_line_and_nothing_is_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jax._src import compiler

    own = compiler.compile_or_get_cached
    monkeypatch.setenv("ENABLE_SEARCH", "1")
    with monkeypatch.context() as without:
        without.delattr(compiler, "backend_compile_and_load")
        plugin.initialize()
    assert compiler.compile_or_get_cached is own
    assert capsys.readouterr().err == (
        f"disco: off: jax {jax.__version__} is not supported: jax._src.compiler.backend_compile_and_load is "
        "missing; use jax 0.10.2 to 0.12\n"
    )


def test_what_cannot_be_said_of_a_setting_does_not_stop_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENABLE_SEARCH", "yes")
    monkeypatch.setattr(sys, "stderr", None)
    plugin.initialize()
