"""What outlives the process: sessions, models, checkpoints and usage, in one SQLite file."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.serve.core.errors import NotFound
from cookbook.serve.core.operations import CheckpointKind, Usage

SessionState = Literal["Created", "Running", "Stopping", "Stopped", "Failed", "Expired"]

ENDED: tuple[SessionState, ...] = ("Stopped", "Failed", "Expired")

SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, base_model TEXT NOT NULL, rank INTEGER, alpha REAL NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    path TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, folder TEXT NOT NULL,
    base_model TEXT NOT NULL, rank INTEGER, bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL);
CREATE TABLE IF NOT EXISTS usage (
    operation TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, kind TEXT NOT NULL,
    prefill INTEGER NOT NULL, sampled INTEGER NOT NULL, trained INTEGER NOT NULL, created REAL NOT NULL);
CREATE INDEX IF NOT EXISTS usage_of_session ON usage (tenant, session);
CREATE INDEX IF NOT EXISTS checkpoints_of_model ON checkpoints (tenant, model);
"""


@dataclass(frozen=True)
class SessionRecord:
    id: str
    tenant: str
    name: str
    state: SessionState
    reason: str
    created: float
    updated: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelRecord:
    """A training run: an adapter of a session."""

    id: str
    session: str
    tenant: str
    base_model: str
    rank: int | None
    alpha: float
    created: float
    updated: float
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointRecord:
    """`path` is the `tinker://` path, `folder` where the files are; `expires` is a time, None for never."""

    path: str
    tenant: str
    model: str
    kind: CheckpointKind
    name: str
    folder: str
    base_model: str
    rank: int | None
    bytes: int
    created: float
    expires: float | None = None


class Store:
    """All times are seconds since the epoch. Every write is committed before it returns, and survives the end of the process.

    A power cut may lose the last moments (SQLite in WAL mode without a sync per commit), never the consistency of the file.
    """

    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.executescript(SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
            except BaseException:
                self._connection.execute("ROLLBACK")
                raise
            self._connection.execute("COMMIT")

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    # Sessions

    def put_session(self, session: SessionRecord) -> None:
        values = (
            *(getattr(session, name) for name in ("id", "tenant", "name", "state", "reason", "created", "updated")),
        )
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO sessions VALUES (?,?,?,?,?,?,?,?)",
                (*values, json.dumps(dict(session.metadata))),
            )

    def session(self, tenant: str, session_id: str) -> SessionRecord | None:
        rows = self._rows("SELECT * FROM sessions WHERE tenant=? AND id=?", tenant, session_id)
        return _session(rows[0]) if rows else None

    def sessions(self, tenant: str) -> list[SessionRecord]:
        """Newest first."""
        return [
            _session(row) for row in self._rows("SELECT * FROM sessions WHERE tenant=? ORDER BY created DESC", tenant)
        ]

    def fail_unfinished_sessions(self, reason: str) -> int:
        """Mark every session that had not ended as failed; returns how many. For the start of a server: nobody holds their weights."""
        with self._transaction() as connection:
            return connection.execute(
                "UPDATE sessions SET state='Failed', reason=?, updated=? WHERE state NOT IN ('Stopped','Failed','Expired')",
                (reason, time.time()),
            ).rowcount

    # Models

    def put_model(self, model: ModelRecord) -> None:
        values = (
            *(
                getattr(model, name)
                for name in ("id", "session", "tenant", "base_model", "rank", "alpha", "created", "updated")
            ),
        )
        with self._transaction() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO models VALUES (?,?,?,?,?,?,?,?,?)", (*values, json.dumps(dict(model.metadata)))
            )

    def model(self, tenant: str, model_id: str) -> ModelRecord | None:
        rows = self._rows("SELECT * FROM models WHERE tenant=? AND id=?", tenant, model_id)
        return _model(rows[0]) if rows else None

    def models(self, tenant: str, session_id: str | None = None) -> list[ModelRecord]:
        """Newest first."""
        if session_id is None:
            rows = self._rows("SELECT * FROM models WHERE tenant=? ORDER BY created DESC", tenant)
        else:
            rows = self._rows(
                "SELECT * FROM models WHERE tenant=? AND session=? ORDER BY created DESC", tenant, session_id
            )
        return [_model(row) for row in rows]

    # Checkpoints

    def put_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        names = (
            "path",
            "tenant",
            "model",
            "kind",
            "name",
            "folder",
            "base_model",
            "rank",
            "bytes",
            "created",
            "expires",
        )
        with self._transaction() as connection:
            connection.execute(
                f"INSERT OR REPLACE INTO checkpoints VALUES ({','.join('?' * len(names))})",
                [getattr(checkpoint, name) for name in names],
            )

    def checkpoint(self, tenant: str, path: str) -> CheckpointRecord | None:
        rows = self._rows("SELECT * FROM checkpoints WHERE tenant=? AND path=?", tenant, path)
        return CheckpointRecord(**dict(rows[0])) if rows else None

    def existing_checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        """Raises NotFound."""
        record = self.checkpoint(tenant, path)
        if record is None:
            raise NotFound(f"there is no checkpoint {path}; list the checkpoints to see those that there are")
        return record

    def checkpoints(self, tenant: str, model_id: str | None = None) -> list[CheckpointRecord]:
        """Newest first."""
        if model_id is None:
            rows = self._rows("SELECT * FROM checkpoints WHERE tenant=? ORDER BY created DESC", tenant)
        else:
            rows = self._rows(
                "SELECT * FROM checkpoints WHERE tenant=? AND model=? ORDER BY created DESC", tenant, model_id
            )
        return [CheckpointRecord(**dict(row)) for row in rows]

    def expired_checkpoints(self, now: float) -> list[CheckpointRecord]:
        return [
            CheckpointRecord(**dict(row)) for row in self._rows("SELECT * FROM checkpoints WHERE expires <= ?", now)
        ]

    def checkpoint_folder_names(self) -> frozenset[str]:
        """The names, without their parents, of the folders of all tenants' checkpoints."""
        return frozenset(Path(row["folder"]).name for row in self._rows("SELECT folder FROM checkpoints"))

    def delete_checkpoint(self, tenant: str, path: str) -> None:
        with self._transaction() as connection:
            connection.execute("DELETE FROM checkpoints WHERE tenant=? AND path=?", (tenant, path))

    # Usage

    def bill(self, operation_id: str, tenant: str, session_id: str, kind: str, usage: Usage) -> None:
        """Record an operation's tokens. An operation is billed once, however often this is called for it."""
        row = (operation_id, tenant, session_id, kind, usage.prefill, usage.sampled, usage.trained, time.time())
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO usage VALUES (?,?,?,?,?,?,?,?)", row)

    def usage(self, tenant: str, session_id: str | None = None) -> Usage:
        query = "SELECT coalesce(sum(prefill),0), coalesce(sum(sampled),0), coalesce(sum(trained),0) FROM usage WHERE tenant=?"
        rows = (
            self._rows(query, tenant)
            if session_id is None
            else self._rows(query + " AND session=?", tenant, session_id)
        )
        return Usage(*rows[0])


def _session(row: sqlite3.Row) -> SessionRecord:
    return SessionRecord(**{**dict(row), "metadata": json.loads(row["metadata"])})


def _model(row: sqlite3.Row) -> ModelRecord:
    return ModelRecord(**{**dict(row), "metadata": json.loads(row["metadata"])})
