"""Key-value stores for tests: in memory for ranks that are threads, in a folder for ranks that are processes.

Neither lives in rank 0's process, as jax.distributed's does: what ranks do without rank 0 can be seen.
"""

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from disco_hlo.activation.kvstore import KvChannel


class MemoryStore:
    """Shared by threads. It answers nobody before the keys ``after`` are there, so that a rank whose thread
    comes late to a short wait does not count as one that never came."""

    def __init__(self, *after: str) -> None:
        self.values: dict[str, bytes] = {}
        self._after = set(after)
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> bool:
        with self._changed:
            if key in self.values:
                return False
            self.values[key] = value
            self._changed.notify_all()
            return True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._after <= set(self.values), 60)
            self._after.clear()
            self._changed.wait_for(lambda: key in self.values, timeout_s)
            return self.values.get(key)

    def names(self, directory: str) -> list[str]:
        with self._changed:
            return [key.rsplit("/", 1)[1] for key in self.values if key.startswith(directory + "/")]

    def delete(self, directory: str) -> None:
        with self._changed:
            for key in [key for key in self.values if key == directory or key.startswith(directory + "/")]:
                del self.values[key]


class FolderStore:
    """Shared by processes of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, key: str, value: bytes) -> bool:
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".{path.name}.{os.getpid()}")
        fresh.write_bytes(value)
        try:
            os.link(fresh, path)
        except FileExistsError:
            return False
        finally:
            fresh.unlink(missing_ok=True)  # whoever saw the value may have deleted the folder by now
        return True

    def get(self, key: str, timeout_s: float) -> bytes | None:
        end = time.monotonic() + timeout_s
        while True:
            try:
                return self._path(key).read_bytes()
            except FileNotFoundError:
                if time.monotonic() >= end:
                    return None
                time.sleep(0.005)

    def names(self, directory: str) -> list[str]:
        folder = self._folder / directory
        files = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [name.removesuffix(".value") for name in files if name.endswith(".value")]

    def delete(self, directory: str) -> None:
        shutil.rmtree(self._folder / directory, ignore_errors=True)
        self._path(directory).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.value"


def on_ranks(size: int, step: Callable[[KvChannel], Any], store: MemoryStore | None = None) -> list[Any]:
    """What ``step`` returns on each rank; the ranks run at the same time."""
    shared = store if store is not None else MemoryStore()
    channels = [KvChannel(rank, size, "job", shared) for rank in range(size)]
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(step, channels))
