"""The core of the server, which the adapters call. It does not know HTTP; adapters do not know the backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from cookbook.core.clients import Capabilities, ServiceClient
from cookbook.core.suggest import did_you_mean
from cookbook.serve.core.checkpoints import CheckpointKey
from cookbook.serve.core.errors import InvalidRequest, NotFound
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import (
    CreateModel,
    CreateModelFromState,
    Load,
    LoadTokenizer,
    Operation,
    OptimStep,
    Rejected,
    Sample,
    Snapshot,
)
from cookbook.serve.core.registry import SessionRegistry, session_of
from cookbook.serve.core.sessions import CREATION, LiveSampler, Model, Sampler, Session
from cookbook.serve.core.store import CheckpointRecord, ModelRecord, Store
from cookbook.serve.core.tickets import Ticket
from cookbook.serve.core.worker import Worker


class TrainingService:
    """Models, samplers and checkpoints of all tenants over one backend; their sessions and tickets are in `sessions`.

    Methods with a `tenant` see only what belongs to that tenant; anything else is NotFound. They return at once;
    results come with tickets. All errors are ServiceErrors.

    Args:
        backend: does the work; used from one thread. The service stops it.
        store: the database.
        base_models: names for clients, and the backend's name for each.
        limits: quotas and times.
        observe: called with every finished ticket and the seconds that it ran.
    """

    def __init__(
        self,
        backend: ServiceClient,
        store: Store,
        base_models: Mapping[str, str],
        limits: Limits | None = None,
        observe: Callable[[Ticket, float], None] = lambda ticket, seconds: None,
    ) -> None:
        self.store = store
        self.base_models = dict(base_models)
        self._backend = backend
        worker = Worker(backend, store, self.base_models, observe)
        self.sessions = SessionRegistry(store, worker, limits or Limits())

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def close(self) -> None:
        """End all sessions, then stop the backend. Idempotent; tickets can still be fetched."""
        self.sessions.close()
        self._backend.stop()

    # Models

    def create_model(
        self,
        tenant: str,
        session_id: str,
        sequence: int,
        operation: CreateModel | CreateModelFromState,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """The id of the ticket that creates model `<session>:train:<sequence>`; the same id for a repeated request."""
        session = self.sessions.get_open(tenant, session_id)
        if isinstance(operation, CreateModel):
            base_model, rank, alpha = self.check_base_model(operation.base_model), operation.rank, operation.alpha
        else:
            checkpoint = self.checkpoint(tenant, operation.checkpoint)
            base_model, rank, alpha = checkpoint.base_model, checkpoint.rank, 0.0
        model_id = f"{session_id}:train:{sequence}"
        with session.lock:
            if model_id not in session.models:
                self.sessions.check_quota(tenant)
                now = time.time()
                record = ModelRecord(model_id, session_id, tenant, base_model, rank, alpha, now, now, metadata or {})
                self.store.put_model(record)
                session.models[model_id] = Model(record)
            return self._submit(session, session.models[model_id], CREATION, operation)

    def model(self, tenant: str, model_id: str) -> Model:
        """A live model. Raises NotFound, or Gone if its session has ended."""
        session = self.sessions.get(tenant, session_of(model_id))
        if model_id not in session.models:
            raise NotFound(f"there is no model {model_id}; create one in session {session.id}")
        return session.models[model_id]

    def submit(self, tenant: str, model_id: str, sequence: int | None, operation: Operation) -> str:
        """Accept an operation of a model: the id of its ticket, and the same id for a sequence number seen before.

        Operations run in the order of their numbers, from 1, in whatever order they arrive. None is the next number.
        """
        session = self.sessions.get_open(tenant, session_of(model_id))
        model = self.model(tenant, model_id)
        with session.lock:
            if isinstance(operation, Snapshot) and operation.sampler_id not in session.samplers:
                session.samplers[operation.sampler_id] = Sampler(
                    operation.sampler_id, tenant, session.id, model.record.base_model, snapshot=True
                )
            return self._submit(session, model, sequence, operation)

    def _submit(self, session: Session, model: Model, sequence: int | None, operation: Operation) -> str:
        def make_ticket() -> Ticket:
            if not model.order.awaits(sequence):
                self.sessions.check_quota(session.tenant)
            if isinstance(operation, OptimStep | Load):
                model.version += 1
            return self.sessions.new_ticket(session, model.id, operation)

        ticket_id, released = model.order.accept(sequence, make_ticket)
        self.sessions.enqueue(released)
        return ticket_id

    # Samplers

    def create_sampler(self, tenant: str, session_id: str, sequence: int, source: str | CheckpointKey) -> Sampler:
        """The sampler `<session>:sample:<sequence>`; the same one for a repeated request.

        `source` is the name of a base model or the key of a checkpoint.
        """
        session = self.sessions.get_open(tenant, session_id)
        if isinstance(source, CheckpointKey):
            base_model, checkpoint = self.checkpoint(tenant, source).base_model, source
        else:
            base_model, checkpoint = self.check_base_model(source), None
        sampler = Sampler(self.sampler_id(session_id, sequence), tenant, session_id, base_model, checkpoint)
        with session.lock:
            return session.samplers.setdefault(sampler.id, sampler)

    @staticmethod
    def sampler_id(session_id: str, sequence: int) -> str:
        return f"{session_id}:sample:{sequence}"

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound, or Gone if its session has ended."""
        session = self.sessions.get(tenant, session_of(sampler_id))
        if sampler_id not in session.samplers:
            raise NotFound(f"there is no sampler {sampler_id}; create one in session {session.id}")
        return session.samplers[sampler_id]

    def live_sampler(self, tenant: str, model_id: str) -> tuple[Sampler, Ticket]:
        """A sampler of a model's weights after all operations accepted so far, and the ticket of its snapshot.

        Wait for the ticket before using the sampler. A new snapshot is made only if the weights have changed.
        """
        session = self.sessions.get_open(tenant, session_of(model_id))
        model = self.model(tenant, model_id)
        with session.lock:
            live = model.live
            if live is None or live.version != model.version or live.sampler.evicted:
                self.sessions.check_quota(tenant)
                sampler = Sampler(
                    f"{model_id}:live:{model.version}", tenant, session.id, model.record.base_model, snapshot=True
                )
                session.samplers[sampler.id] = sampler
                ticket = self.sessions.new_ticket(session, model_id, Snapshot(sampler.id))
                live = model.live = LiveSampler(model.version, sampler, ticket)
                self.sessions.enqueue([ticket])
            return live.sampler, live.ticket

    def sample(self, tenant: str, sampler_id: str, sequence: int | None, operation: Sample | Rejected) -> str:
        """Accept a sample: the id of its ticket, and the same id for a number seen before. Samples have no order."""
        session = self.sessions.get_open(tenant, session_of(sampler_id))
        sampler = self.sampler(tenant, sampler_id)
        with session.lock:
            if sequence is not None and sequence in sampler.tickets:
                return sampler.tickets[sequence]
            self.sessions.check_quota(tenant)
            ticket = self.sessions.new_ticket(session, sampler_id, operation)
            if sequence is not None:
                sampler.tickets[sequence] = ticket.id
        if isinstance(operation, Rejected):
            ticket.settle(error=InvalidRequest(operation.reason))
        else:
            self.sessions.enqueue([ticket])
        return ticket.id

    # Base models and checkpoints

    def check_base_model(self, name: str) -> str:
        """`name` itself. Raises InvalidRequest, which lists the base models."""
        if name not in self.base_models:
            hint = did_you_mean(name, self.base_models)
            raise InvalidRequest(f"base model {name!r} is not served{hint}; served are {', '.join(self.base_models)}")
        return name

    def load_tokenizer(self, tenant: str, session_id: str, base_model: str) -> str:
        """The id of the ticket whose result is the tokenizer of a base model."""
        session = self.sessions.get_open(tenant, session_id)
        with session.lock:
            self.sessions.check_quota(tenant)
            ticket = self.sessions.new_ticket(session, session_id, LoadTokenizer(base_model))
        self.sessions.enqueue([ticket])
        return ticket.id

    def checkpoint(self, tenant: str, key: CheckpointKey) -> CheckpointRecord:
        """Raises NotFound."""
        return self.store.existing_checkpoint(tenant, key)

    def delete_checkpoint(self, tenant: str, key: CheckpointKey) -> None:
        """Raises NotFound."""
        self.store.delete_checkpoint(self.checkpoint(tenant, key))
