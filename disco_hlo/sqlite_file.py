"""An SQLite file of this package's own: how it is opened, recognised, written and closed.

Several processes may use one file at once. A file that is something else, is damaged or of another version is refused
and left as it is.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from disco_hlo.errors import ProfileError

_BUSY_MS = 30_000
_DISK_ERRORS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
"""Of these the file is not to blame."""


class SqliteFile:
    """The file ``path``, created where it does not exist. Where it cannot be written it is opened for reading.

    Raises:
        ProfileError: the file is of another kind or version, or damaged.
    """

    KIND: ClassVar[str]
    """How messages call it."""
    APPLICATION_ID: ClassVar[int]
    VERSION: ClassVar[int]
    TABLES: ClassVar[Sequence[str]]
    """The statements that make the tables."""
    WRITE_AHEAD: ClassVar[bool] = False
    """Whether readers and writers need not wait for each other, at the price of two more files beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writable = True
        with self._errors():
            self._connection = self._opened()
        try:
            with self._errors():
                self._prepare()
        except ProfileError:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the object is of no use afterwards."""
        self._connection.close()

    def _opened(self) -> sqlite3.Connection:
        """Open for writing where the file allows, else for reading, else without locks or journal."""
        if self.path.exists() and not self.path.is_file():
            raise ProfileError(f"cannot open or create the {self.KIND} {self.path}: it is no file")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return self._probed("rwc", "BEGIN IMMEDIATE")
        except (OSError, sqlite3.OperationalError) as error:
            if not self.path.is_file() or "locked" in str(error):
                raise ProfileError(f"cannot open or create the {self.KIND} {self.path}: {error}") from error
        self.writable = False
        with suppress(sqlite3.OperationalError):
            return self._probed("ro", "SELECT count(*) FROM sqlite_master")
        return self._connected("ro&immutable=1")

    def _probed(self, mode: str, statement: str) -> sqlite3.Connection:
        connection = self._connected(mode)
        try:
            connection.execute(statement).fetchall()
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def _connected(self, mode: str) -> sqlite3.Connection:
        address = f"{self.path.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(address, uri=True, timeout=_BUSY_MS / 1000, isolation_level=None)
        connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        connection.execute("PRAGMA foreign_keys = ON")
        return connection

    def _prepare(self) -> None:
        if self._is_empty() and self.writable:
            self._create()
        ((application,),) = self._rows("PRAGMA application_id")
        ((version,),) = self._rows("PRAGMA user_version")
        if application != self.APPLICATION_ID:
            raise ProfileError(f"{self.path} is an SQLite file, but is no {self.KIND}; name another file")
        if version != self.VERSION:
            raise ProfileError(
                f"the {self.KIND} {self.path} is of version {version}; this program reads version "
                f"{self.VERSION}; remove it or name another file"
            )

    def _create(self) -> None:
        if self.WRITE_AHEAD:
            # Refused by a file system without shared memory, or someone else was first.
            with suppress(sqlite3.OperationalError):
                self._connection.execute("PRAGMA journal_mode = WAL").fetchone()
        with self._writing() as connection:
            if not self._is_empty():
                return
            for statement in self.TABLES:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {self.APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {self.VERSION}")

    def _is_empty(self) -> bool:
        ((objects,),) = self._rows("SELECT count(*) FROM sqlite_master")
        return int(objects) == 0

    def _rows(self, query: str, values: Sequence[object] = ()) -> list[Any]:
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction: all of the body's changes, or none."""
        if not self.writable:
            raise ProfileError(f"the {self.KIND} {self.path} is read-only here; nothing is added to it")
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        # Of a damaged file sqlite's own words may be no text.
        except (sqlite3.Error, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            advice = "" if code in _DISK_ERRORS else "; remove it or name another file"
            raise ProfileError(f"{self.path} cannot be used as a {self.KIND}: {error}{advice}") from error
