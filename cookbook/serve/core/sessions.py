"""A live session: the models and samplers of one client, and what is held in memory for them."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from cookbook.core.clients import SamplingClient, TrainingClient
from cookbook.serve.core.checkpoints import CheckpointKey
from cookbook.serve.core.errors import Gone
from cookbook.serve.core.store import ENDED, ModelRecord, SessionRecord, SessionState, Store
from cookbook.serve.core.tickets import ReorderBuffer, Ticket

CREATION = 0
"""The sequence number of a model's creation; clients number a model's operations from 1."""


@dataclass(eq=False)
class Sampler:
    """A base model, a checkpoint, or a snapshot in memory of a model, to sample from.

    `base_model` is set in all three cases. Samples of a sampler have no order, so their sequence numbers serve only to
    recognize repeats.
    """

    id: str
    tenant: str
    session_id: str
    base_model: str
    checkpoint: CheckpointKey | None = None
    snapshot: bool = False
    client: SamplingClient | None = None
    """Of a snapshot, once it has been made."""
    evicted: bool = False
    """The snapshot is no longer in memory: newer ones replaced it, or its session has ended."""
    tickets: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveSampler:
    """A snapshot of a version of a model, for clients that name the model itself; `ticket` is that of the snapshot."""

    version: int
    sampler: Sampler
    ticket: Ticket


@dataclass(eq=False)
class Model:
    """A model in training, with the order of its operations. `client` is set once the first of them has run."""

    record: ModelRecord
    client: TrainingClient | None = None
    order: ReorderBuffer = field(default_factory=lambda: ReorderBuffer(first=CREATION))
    version: int = 0
    """The number of accepted operations that change the weights."""
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
        """The state to enter, and the reason, once no operation of the session is running."""
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
        """Change the state, in the database too."""
        with self.lock:
            if self.ended or self.state == state:
                return
            self.record = dataclasses.replace(self.record, state=state, reason=reason, updated=time.time())
            self._store.put_session(self.record)

    def check_open(self) -> None:
        """Raises Gone when the session is ending or has ended."""
        if self.ended or self.state == "Stopping":
            raise session_ended(self.record)

    def add_snapshot(self, sampler: Sampler) -> None:
        """Keep a snapshot in memory; the least recently used one is evicted if there are too many."""
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
        """Free everything held in memory; for a session whose operations have all finished."""
        with self.lock:
            for model in self.models.values():
                if model.client is not None:
                    model.client.stop()
                model.client, model.live = None, None
            for sampler in self.samplers.values():
                sampler.client, sampler.evicted = None, True
            self._snapshots.clear()


def session_ended(record: SessionRecord, newest: CheckpointKey | None = None) -> Gone:
    """The error that says how a session ended and what to do; `newest` is its newest checkpoint."""
    reason = f" ({record.reason})" if record.reason else ""
    message = f"session {record.id} is {record.state}{reason}; create a new session"
    return Gone(message) if newest is None else Gone(message, ", and load its newest checkpoint ", newest)
