"""What every test runs under: four CPU devices, no setting of the caller's, mpiexec that works anywhere.

This file is imported before any test module, hence before jax, which reads these variables once.
"""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

for name in list(os.environ):
    if name == "ENABLE_SEARCH" or name.startswith("DISCO_") or name == "JAX_COMPILATION_CACHE_DIR":
        del os.environ[name]

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in flags:
    flags += " --xla_force_host_platform_device_count=4"
# LLVM's optimizations take a third to a half of every compile; what XLA executes is settled before them.
if "xla_backend_optimization_level" not in flags:
    flags += " --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = flags.strip()

# Images often have Python keep no compiled files: each process that a test starts would compile the package anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Without it DGL writes a configuration file into the home folder.
os.environ.setdefault("DGLBACKEND", "pytorch")

# The Makefile gives the reasons; a pytest started by hand needs the same.
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
os.environ.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":oversubscribe")
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

# No deadline: the first example pays for compilation. Derandomized: a red run is red again.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


BOTH = (
    "e2e/test_enact.py", "e2e/test_ranks.py", "e2e/test_structure.py", "e2e/test_unset.py",
    "estimator/test_train.py", "estimator/test_training_script.py", "fuzz/test_found.py", "kernels/",
    "plan/test_apply.py", "plan/test_storage_steps.py", "plugin/calls/", "plugin/test_compiles.py",
    "plugin/test_contexts.py",
    "plugin/test_decisions.py", "plugin/test_hook.py", "plugin/test_indices.py",
    "plugin/test_install.py", "plugin/test_jaxlink.py", "plugin/test_job.py", "plugin/test_lockstep.py",
    "plugin/test_microbenchmarks.py", "plugin/test_profiling.py",
    "plugin/test_refused_modules.py", "plugin/test_runner.py", "plugin/test_signs.py",
    "plugin/test_step.py", "plugin/test_structure.py", "profiler/test_timeline.py",
    "profiler/test_trace.py", "structure/test_program.py", "structure/test_random.py",
    "structure/test_sharded.py", "test_package.py", "test_training_stack.py",
)  # fmt: skip
"""Files and folders that both legs run: what joins the rest to JAX, XLA, torch and DGL, and so differs between their
versions. Within them, the mark ``product_only`` leaves out what shows the same on either leg."""


TOGETHER = {"e2e": "trainings", "cli": "plans", "report": "plans"}
"""Folders whose files share what takes long to make: one worker has all of them."""


LONGEST_FIRST = (
    "e2e/test_ranks.py",  # compiles the search, a minute on a fresh machine; the next ones need none, on either leg
    "plan/test_apply.py", "estimator/test_training_script.py", "examples/test_models.py",
    "examples/test_modern_steps.py", "examples/test_scripts.py", "examples/test_planned_loops.py",
    "examples/test_memory.py", "structure/test_loops.py", "structure/test_schedules.py",
    "kernels/test_kernels.py", "plugin/test_searched_trainings.py", "plugin/test_comparing.py",
    "plugin/calls/test_watch.py", "plugin/calls/test_two_processes.py", "cli/test_capture.py",
    "search/test_moves.py", "search/test_joint.py", "search/test_strategies.py",
    "scripts/test_sample_fused_ops.py", "plugin/test_search_in_training.py", "test_compiled.py",
    "profiler/test_collectives.py", "activation/test_mpi.py", "plugin/test_lockstep.py",
    "optimize/test_same_plan.py", "scripts/test_benchmark.py", "plugin/calls/test_real_inputs.py",
    "plugin/test_second_trial.py", "optimize/test_ablations.py", "plan/test_captured_models.py",
    "scripts/test_structured.py", "scripts/test_bench_kernels.py", "search/test_numbers.py",
    "plan/test_storage_steps.py", "plugin/test_install.py", "plan/test_apply_gpu.py",
    "structure/test_keep.py", "structure/test_random.py", "structure/test_choose.py",
    "plugin/calls/test_observing.py", "plugin/test_keeping.py",
)  # fmt: skip
"""Files that take more than ten seconds, and the first of folders that do: begun last, one of them would leave the
other worker idle."""


class ByFile(LoadFileScheduling):
    """What ``--dist loadfile`` does, some folders as if each were one file."""

    def _split_scope(self, nodeid: str) -> str:
        folder = nodeid.removeprefix("tests/").partition("/")[0]
        return TOGETHER.get(folder) or super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """The one above for ``--dist loadfile``, and xdist's own for others."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None  # type: ignore[arg-type]


def runs_on_both_legs(path: Path) -> bool:
    """Whether a file is among those above."""
    return path.relative_to(Path(__file__).parent).as_posix().startswith(BOTH)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where one leg is enough, the other does not even import the file: reading all of them takes a quarter minute."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    older = config.option.markexpr == "not product_only"
    return True if older and is_test and not runs_on_both_legs(collection_path) else None


def pytest_collection_finish() -> None:
    """What was imported stays: the collector need not go through it again and again, a tenth of the suite's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files; mark what one leg is enough for."""
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
    for item in items:
        if not runs_on_both_legs(item.path):
            item.add_marker("product_only")
