"""The package as a whole: what a wheel holds, who may import what, and what importing the plugin costs."""

import ast
import importlib
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Where each folder is installed.
FOLDERS = {
    "disco_hlo": "disco_hlo",
    "estimator": "disco_hlo/estimator",
    "profiler": "disco_hlo/profiler",
    "search": "disco_hlo/search",
}

# Names that belong to one place each: (what, the only files that may import it).
JAXLINK = {
    f"disco_hlo/plugin/xla/jaxlink/{name}.py"
    for name in ("calls", "contexts", "process", "profiling", "requests")
}
TRAINING_FILES = {"estimator/train.py"}
RESERVED = {
    "jax._src": JAXLINK,
    "jaxlib": {*JAXLINK, "disco_hlo/plugin/xla/executables.py"},
    "mpi4py": {"disco_hlo/activation/mpi.py"},
    "dgl": TRAINING_FILES,
    "torch": TRAINING_FILES,
}

# All that jaxlib offers to everyone is its version.
PUBLIC = {"jaxlib", "jaxlib.__version__", "jaxlib.version", "jaxlib.version.__version__"}


def source_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from (p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts)


def installed_name(path: Path) -> str:
    folder, *rest = path.relative_to(ROOT).parts
    return "/".join([FOLDERS[folder], *rest])


def imported_names(path: Path) -> set[str]:
    """Every dotted name that `path` imports, at whatever depth: `from a import b` counts as `a` and `a.b`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(path: Path, place: str) -> list[str]:
    names = imported_names(path) - PUBLIC
    return [
        f"{place} imports {name}, which only {', '.join(sorted(allowed))} may"
        for reserved, allowed in RESERVED.items()
        if place not in allowed
        for name in sorted(names)
        if name == reserved or name.startswith(f"{reserved}.")
    ]


@pytest.mark.product_only
def test_reserved_names_are_imported_in_their_one_place_only() -> None:
    found = [v for p in source_files() if p.suffix == ".py" for v in violations(p, str(p.relative_to(ROOT)))]
    assert found == []


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "from jaxlib import _hlo",
        "def f(): import jaxlib._hlo",
    ],
)
def test_every_spelling_of_a_reserved_import_is_seen(line: str, tmp_path: Path) -> None:
    path = tmp_path / "intruder.py"
    path.write_text(line)
    assert violations(path, "search/intruder.py") != []


def test_the_version_of_jaxlib_is_no_private_name(tmp_path: Path) -> None:
    path = tmp_path / "polite.py"
    path.write_text("import jaxlib.version\nfrom jaxlib import __version__")
    assert violations(path, "disco_hlo/cli/polite.py") == []


# Only disco_hlo/backends.py says which backend; elsewhere these words are something else.
BACKEND_NAMES = {"cpu", "gpu", "cuda", "is_cpu", "is_gpu", "on_cpu", "on_gpu"}
OTHER_MEANINGS = {
    "disco_hlo/elsewhere.py": "what JAX_PLATFORMS of the search's process says",
    "disco_hlo/whatif/": "the field of a file that describes a machine",
}


def names_of_backends(source: str) -> list[str]:
    """Where a file compares, looks up or passes on a backend by name: strings, variables and keywords."""
    found = []
    for node in ast.walk(ast.parse(source)):
        said = {
            ast.Constant: lambda one: one.value,
            ast.Name: lambda one: one.id,
            ast.keyword: lambda one: one.arg,
            ast.arg: lambda one: one.arg,
        }.get(type(node), lambda _: None)(node)
        if isinstance(said, str) and said in BACKEND_NAMES:
            found.append(f"line {node.lineno}: {said}")
    return found


@pytest.mark.product_only
def test_backends_are_told_apart_by_their_records_alone() -> None:
    found = [
        f"{place}, {where}"
        for path in source_files()
        if path.suffix == ".py"
        for place in [str(path.relative_to(ROOT))]
        if not place.startswith(("disco_hlo/backends.py", *OTHER_MEANINGS))
        for where in names_of_backends(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "line",
    ['x = graph.backend == "gpu"', 'y = RUNS["cpu"]', "check(gpu=True)", "on_cpu = 1", "def f(*, gpu): pass"],
)
def test_every_way_to_name_a_backend_is_seen(line: str) -> None:
    assert names_of_backends(line) != []


def test_the_packages_listed_are_the_packages_there() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {
        str(p.parent.relative_to(ROOT)).replace("/", ".") for p in source_files() if p.name == "__init__.py"
    }
    assert sorted(listed) == sorted(p if p.startswith("disco_hlo") else f"disco_hlo.{p}" for p in there)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing stale in the tree's own build folder can slip in."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return next((source / "dist").glob("*.whl"))


@pytest.mark.product_only
def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    expected = {installed_name(path) for path in source_files()}
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert "disco_hlo/py.typed" in files
    assert files == expected


@pytest.mark.product_only
def test_the_wheel_imports_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    code = "import disco_hlo, disco_hlo.search; print(disco_hlo.__file__)"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(wheel)!r}); {code}"]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"{wheel}/disco_hlo/__init__.py"


def test_every_module_can_be_imported() -> None:
    """On Python 3.11 too, where most tests of what needs neither JAX nor torch do not run."""
    names = {
        installed_name(path).removesuffix(".py").replace("/", ".")
        for path in source_files()
        if path.suffix == ".py"
    }
    if sys.version_info >= (3, 12):
        names.discard("disco_hlo.estimator.train")  # torch and DGL
    for name in sorted(names):
        importlib.import_module(name.removesuffix(".__init__"))


def test_the_entry_points_load() -> None:
    (plugin,) = [e for e in entry_points(group="jax_plugins") if e.name == "disco_hlo"]
    assert plugin.value == "disco_hlo.plugin"
    plugin.load()


def test_importing_the_plugin_imports_nothing_heavy() -> None:
    """Every JAX process on the machine imports the plugin, searching or not."""
    heavy = ["google.protobuf", "jax", "jaxlib", "mpi4py", "numba", "numpy", "rich", "safetensors", "typer"]
    code = f"import sys, disco_hlo.plugin; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


@pytest.mark.mpi
def test_mpiexec_runs_more_ranks_than_cores_from_pip_alone() -> None:
    code = "from mpi4py import MPI; w = MPI.COMM_WORLD; print(w.allreduce(w.rank), flush=True)"
    ranks = (os.cpu_count() or 1) + 1
    command = ["mpiexec", "-n", str(ranks), sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert printed.split() == [str(ranks * (ranks - 1) // 2)] * ranks
