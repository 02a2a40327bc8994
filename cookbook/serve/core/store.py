"""The database: sessions, models, checkpoints and usage, in one SQLite file."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cookbook.core.errors import ConfigError
from cookbook.serve.core.checkpoints import CheckpointKey, CheckpointKind
from cookbook.serve.core.errors import NotFound
from cookbook.serve.core.operations import Usage

SessionState = Literal["Created", "Running", "Stopping", "Stopped", "Failed", "Expired"]

ENDED: tuple[SessionState, ...] = ("Stopped", "Failed", "Expired")

SCHEMA_VERSION = 1

SCHEMA = f"""
BEGIN;
CREATE TABLE IF NOT EXISTS sessions (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, name TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    created REAL NOT NULL, updated REAL NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS models (
    id TEXT PRIMARY KEY, session TEXT NOT NULL, tenant TEXT NOT NULL, base_model TEXT NOT NULL, rank INTEGER,
    alpha REAL NOT NULL, created REAL NOT NULL, updated REAL NOT NULL, metadata TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints (
    model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL, tenant TEXT NOT NULL, folder TEXT NOT NULL,
    base_model TEXT NOT NULL, rank INTEGER, bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL,
    PRIMARY KEY (model, kind, name));
CREATE TABLE IF NOT EXISTS usage (
    operation TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, kind TEXT NOT NULL,
    prefill INTEGER NOT NULL, sampled INTEGER NOT NULL, trained INTEGER NOT NULL, created REAL NOT NULL);
CREATE INDEX IF NOT EXISTS usage_of_session ON usage (tenant, session);
CREATE INDEX IF NOT EXISTS checkpoints_of_model ON checkpoints (tenant, model);
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
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
    """A model in training, which belongs to a session."""

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
    """`folder` has the files; `expires` is a time, None for never."""

    model: str
    kind: CheckpointKind
    name: str
    tenant: str
    folder: str
    base_model: str
    rank: int | None
    bytes: int
    created: float
    expires: float | None = None

    @property
    def key(self) -> CheckpointKey:
        return CheckpointKey(self.model, self.kind, self.name)


class Store:
    """Records of all tenants. All times are seconds since the epoch.

    Every write is committed before it returns and survives a killed process. A power cut may lose the last writes
    (SQLite in WAL mode without a sync per commit), but does not damage the file.
    """

    def __init__(self, file: Path) -> None:
        """Open the file, or create it. Raises ConfigError: another version of the server wrote it."""
        file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._connection.row_factory = sqlite3.Row
        version = self._rows("PRAGMA user_version")[0][0]
        if version != SCHEMA_VERSION and self._rows("SELECT name FROM sqlite_master"):
            self.close()
            raise ConfigError(f"{file}: was written by another version of the server; use another --state-dir")
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

    def _put(self, table: str, values: Mapping[str, Any]) -> None:
        columns, places = ",".join(values), ",".join("?" * len(values))
        with self._transaction() as connection:
            connection.execute(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({places})", [*values.values()])

    # Sessions

    def put_session(self, session: SessionRecord) -> None:
        self._put("sessions", {**vars(session), "metadata": json.dumps(dict(session.metadata))})

    def session(self, tenant: str, session_id: str) -> SessionRecord | None:
        rows = self._rows("SELECT * FROM sessions WHERE tenant=? AND id=?", tenant, session_id)
        return _session(rows[0]) if rows else None

    def sessions(self, tenant: str) -> list[SessionRecord]:
        """Newest first."""
        return [
            _session(row) for row in self._rows("SELECT * FROM sessions WHERE tenant=? ORDER BY created DESC", tenant)
        ]

    def fail_unfinished_sessions(self, reason: str) -> int:
        """Mark every session that had not ended as failed; returns how many.

        For the start of a server: the weights of earlier sessions are lost.
        """
        unfinished = f"state NOT IN ({','.join('?' * len(ENDED))})"
        with self._transaction() as connection:
            return connection.execute(
                f"UPDATE sessions SET state='Failed', reason=?, updated=? WHERE {unfinished}",
                (reason, time.time(), *ENDED),
            ).rowcount

    # Models

    def put_model(self, model: ModelRecord) -> None:
        self._put("models", {**vars(model), "metadata": json.dumps(dict(model.metadata))})

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
        self._put("checkpoints", vars(checkpoint))

    def checkpoint(self, tenant: str, key: CheckpointKey) -> CheckpointRecord | None:
        query = "SELECT * FROM checkpoints WHERE tenant=? AND model=? AND kind=? AND name=?"
        rows = self._rows(query, tenant, key.model, key.kind, key.name)
        return CheckpointRecord(**dict(rows[0])) if rows else None

    def existing_checkpoint(self, tenant: str, key: CheckpointKey) -> CheckpointRecord:
        """Raises NotFound."""
        record = self.checkpoint(tenant, key)
        if record is None:
            raise NotFound("there is no checkpoint ", key, "; list the checkpoints to see which exist")
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

    def delete_checkpoint(self, checkpoint: CheckpointRecord) -> None:
        """Delete the record, then the files."""
        with self._transaction() as connection:
            connection.execute(
                "DELETE FROM checkpoints WHERE model=? AND kind=? AND name=?",
                (checkpoint.model, checkpoint.kind, checkpoint.name),
            )
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    # Usage

    def record_usage(self, operation_id: str, tenant: str, session_id: str, kind: str, usage: Usage) -> None:
        """Record the usage of an operation. Each operation counts once, however often this is called for it."""
        row = (operation_id, tenant, session_id, kind, usage.prefill, usage.sampled, usage.trained, time.time())
        with self._transaction() as connection:
            connection.execute("INSERT OR IGNORE INTO usage VALUES (?,?,?,?,?,?,?,?)", row)

    def usage(self, tenant: str, session_id: str | None = None) -> Usage:
        """The usage of a tenant, or of one of its sessions."""
        query = (
            "SELECT coalesce(sum(prefill),0), coalesce(sum(sampled),0), coalesce(sum(trained),0)"
            " FROM usage WHERE tenant=?"
        )
        if session_id is None:
            return Usage(*self._rows(query, tenant)[0])
        return Usage(*self._rows(query + " AND session=?", tenant, session_id)[0])


def _session(row: sqlite3.Row) -> SessionRecord:
    return SessionRecord(**{**dict(row), "metadata": json.loads(row["metadata"])})


def _model(row: sqlite3.Row) -> ModelRecord:
    return ModelRecord(**{**dict(row), "metadata": json.loads(row["metadata"])})
