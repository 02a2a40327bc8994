"""Live sessions: what a client has made, and what is held in memory for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from cookbook.core.clients import SamplingClient, TrainingClient
from cookbook.serve.core.errors import Gone
from cookbook.serve.core.store import ENDED, ModelRecord, SessionRecord, SessionState, Store
from cookbook.serve.core.tickets import ReorderBuffer, Ticket

CREATION = 0
"""The sequence number of a model's creation; its clients count from 1."""


@dataclass(eq=False)
class Sampler:
    """Something to draw from: a base model, a checkpoint, or a snapshot of a model that only lives in memory.

    `base_model` is the model below in all three cases. A sampler answers any number of samples at once, so their sequence numbers only
    tell repeats apart.
    """

    id: str
    tenant: str
    session_id: str
    base_model: str
    model_path: str | None = None
    snapshot: bool = False
    client: SamplingClient | None = None
    """Of a snapshot, once it was made."""
    evicted: bool = False
    """A snapshot that made room for newer ones, or whose session has ended."""
    tickets: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveSampler:
    """A snapshot of a version of a model, for clients that name the model itself; `ticket` is that of its making."""

    version: int
    sampler: Sampler
    ticket: Ticket


@dataclass(eq=False)
class Model:
    """An adapter in training, with the order of its operations. `client` is there once the first of them has run."""

    record: ModelRecord
    client: TrainingClient | None = None
    order: ReorderBuffer = field(default_factory=lambda: ReorderBuffer(first=CREATION))
    version: int = 0
    """Counts the operations that change the weights, when they are accepted."""
    live: LiveSampler | None = None

    @property
    def id(self) -> str:
        return self.record.id


class Session:
    """One client's session: models, samplers, a state. `lock` guards all of it."""

    def __init__(self, record: SessionRecord, store: Store, max_snapshots: int) -> None:
        self._store = store
        self._max_snapshots = max_snapshots
        self.record = record
        self.lock = threading.RLock()
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, Sampler] = {}
        self.pending = 0
        """Accepted operations that are not settled."""
        self.last_active = time.monotonic()
        self.final_state: tuple[SessionState, str] | None = None
        """What it is about to become, and why, once nothing of it runs."""
        self._snapshots: OrderedDict[str, Sampler] = OrderedDict()

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def tenant(self) -> str:
        return self.record.tenant

    @property
    def state(self) -> SessionState:
        return self.record.state

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def touch(self) -> None:
        self.last_active = time.monotonic()

    def enter(self, state: SessionState, reason: str = "") -> None:
        """Change the state, on disk too."""
        with self.lock:
            if self.ended or self.state == state:
                return
            self.record = dataclasses.replace(self.record, state=state, reason=reason, updated=time.time())
            self._store.put_session(self.record)

    def check_open(self) -> None:
        """Raises Gone when the session is ending or has ended."""
        if self.ended or self.state == "Stopping":
            raise Gone(ended_message(self.record))

    def add_snapshot(self, sampler: Sampler) -> None:
        """Keep a snapshot in memory; the one that was longest without use makes room."""
        with self.lock:
            self._snapshots[sampler.id] = sampler
            while len(self._snapshots) > self._max_snapshots:
                _, oldest = self._snapshots.popitem(last=False)
                oldest.client, oldest.evicted = None, True

    def use_snapshot(self, sampler: Sampler) -> None:
        with self.lock:
            if sampler.id in self._snapshots:
                self._snapshots.move_to_end(sampler.id)

    def release(self) -> None:
        """Let go of everything held in memory; for a session whose operations have all ended."""
        with self.lock:
            for model in self.models.values():
                if model.client is not None:
                    model.client.stop()
                model.client, model.live = None, None
            for sampler in self.samplers.values():
                sampler.client, sampler.evicted = None, True
            self._snapshots.clear()


def ended_message(record: SessionRecord, last_checkpoint: str | None = None) -> str:
    """What became of a session, and what to do."""
    reason = f" ({record.reason})" if record.reason else ""
    message = f"session {record.id} is {record.state}{reason}; create a new session"
    return message if last_checkpoint is None else f"{message}, and load its newest checkpoint {last_checkpoint}"
