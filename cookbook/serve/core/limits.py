"""Quotas, and how long things are kept."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """What one tenant may have, and how long things are kept."""

    max_sessions: int = 64
    """Sessions of a tenant that have not ended."""
    max_queued: int = 4096
    """Operations of a tenant that are accepted and not done."""
    max_snapshots: int = 16
    """Snapshots of a session that are kept in memory to sample from."""
    session_timeout_s: float = 600.0
    """A session without a request, a heartbeat or a running operation for so long has expired."""
    gap_timeout_s: float = 120.0
    """How long operations wait for one with a smaller sequence number that has not arrived."""
    kept_s: float = 900.0
    """How long a result is kept."""
    kept_after_fetch_s: float = 60.0
    """How long it is kept once it was fetched."""
    max_sample_rows: int = 512
    """Sequences that are drawn in one turn of the scheduler."""
