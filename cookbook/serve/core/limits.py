"""Quotas and lifetimes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Quotas of a tenant, and how long things are kept."""

    max_sessions: int = 64
    """Sessions of a tenant that have not ended."""
    max_queued: int = 4096
    """Operations of a tenant that are accepted and not finished."""
    max_snapshots: int = 16
    """Snapshots of a session that are kept in memory for sampling."""
    session_timeout_s: float = 600.0
    """A session expires after this time without a request, a heartbeat or a running operation."""
    gap_timeout_s: float = 120.0
    """How long operations wait for one with a smaller sequence number that has not arrived."""
    kept_s: float = 900.0
    """How long a result is kept."""
    kept_after_fetch_s: float = 60.0
    """How long it is kept after it was fetched."""
    max_sample_rows: int = 512
    """Sequences that are sampled in one turn of the scheduler."""
