"""JAX's persistent compilation cache, whose keys know nothing of us, never decides what a run executes."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.e2e.conftest import CACHED
from tests.e2e.executed import assert_same_losses, is_ours
from tests.e2e.jobs import Job, Run

PHASES = {"search": {"ENABLE_SEARCH": "1"}, "enact": {"ENABLE_SEARCH": "0"}, "unset": {}}


def test_in_one_cache_directory_every_run_executes_what_its_environment_says(
    searched: tuple[Job, Run], copied: Job, default: Run, tmp_path: Path
) -> None:
    # It starts as a search left it. That each may follow each other, tests/plugin/test_compiles.py shows.
    cache = tmp_path / "cache"
    shutil.copytree(searched[0].directory.parent / "cache", cache)
    kept = {"JAX_COMPILATION_CACHE_DIR": str(cache), **CACHED}
    for phase in ("unset", "enact", "search"):
        run = copied.train(fault="plan_wins" if phase == "search" else "", **PHASES[phase], **kept)
        assert is_ours(run) is (phase != "unset"), phase
        assert_same_losses(run, default)
    names = [path.name for path in cache.iterdir()]
    assert [name for name in names if name.startswith("jit_train_step")], names
