"""A progress bar for the search, on terminals only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from disco_hlo.search.api import OnProgress, Progress


@contextlib.contextmanager
def search_progress(wanted: bool) -> Iterator[OnProgress | None]:
    """Show how the best predicted step time falls; yields what the search calls, or None where nobody looks."""
    if not wanted:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("disco: searching"), BarColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn(),
    )  # fmt: skip
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("search", total=None, state="")

        def show(progress: Progress) -> None:
            gain = 100 * (1 - progress.best_ns / max(progress.start_ns, 1))
            state = f"{progress.evaluations} candidates, {progress.best_ns / 1e6:.2f} ms predicted (-{gain:.1f} %)"
            bar.update(task, state=state)

        yield show
