"""The core of the server: what adapters call. It knows nothing of HTTP, and adapters know nothing of the backend."""

from __future__ import annotations

import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cookbook.core.clients import Capabilities, ServiceClient
from cookbook.core.suggest import did_you_mean
from cookbook.serve.core.errors import Gone, InvalidRequest, NotFound, QuotaExceeded, ShuttingDown
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
from cookbook.serve.core.scheduler import Scheduler
from cookbook.serve.core.sessions import CREATION, LiveSampler, Model, Sampler, Session, ended_message
from cookbook.serve.core.store import CheckpointRecord, ModelRecord, SessionRecord, SessionState, Store
from cookbook.serve.core.tickets import Ticket, TicketTable
from cookbook.serve.core.worker import Worker

REAP_EVERY_S = 1.0

RESEND = "those after it were given up: send them again with new numbers"


class TrainingService:
    """Sessions, models, samplers and checkpoints of all tenants over one backend.

    Every method that takes a `tenant` sees only what is that tenant's; anything else is NotFound. Methods return at once; results come
    with tickets. Raises ServiceError.

    Args:
        backend: does the work; used from one thread. The service stops it.
        store: what outlives the process. Sessions in it that have not ended are marked as failed: their weights are gone.
        base_models: names for clients, and the backend's name for each.
        limits: quotas and times.
        observe: told of every finished ticket and of the seconds that it ran.
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
        self.limits = limits or Limits()
        self.base_models = dict(base_models)
        self.lost_sessions = store.fail_unfinished_sessions("the server ended before it")
        self._backend = backend
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._tickets = TicketTable(self.limits.kept_s, self.limits.kept_after_fetch_s)
        self._worker = Worker(backend, store, self.base_models, observe)
        self._scheduler = Scheduler(self._run, self._run_samples, self.limits.max_sample_rows)
        self._reaper = threading.Thread(target=self._reap, name="serve-reaper", daemon=True)
        self._reaper.start()

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    @property
    def queue_depth(self) -> int:
        return self._scheduler.depth

    @property
    def live_sessions(self) -> list[Session]:
        with self._lock:
            return [*self._sessions.values()]

    # Sessions

    def create_session(self, tenant: str, name: str = "", metadata: Mapping[str, Any] | None = None) -> Session:
        """A new session. Raises QuotaExceeded when the tenant has too many, ShuttingDown at the end."""
        self._check_running()
        with self._lock:
            if sum(session.tenant == tenant for session in self._sessions.values()) >= self.limits.max_sessions:
                raise QuotaExceeded(
                    f"{self.limits.max_sessions} sessions are open, as many as there may be; stop one, or try again later"
                )
            now = time.time()
            record = SessionRecord(uuid.uuid4().hex, tenant, name, "Created", "", now, now, metadata or {})
            session = Session(record, self.store, self.limits.max_snapshots)
            self._sessions[record.id] = session
        self.store.put_session(record)
        return session

    def session(self, tenant: str, session_id: str) -> Session:
        """A live session; using it keeps it alive. Raises NotFound, or Gone for one that has ended."""
        session = self._sessions.get(session_id)
        if session is not None and session.tenant == tenant:
            session.touch()
            return session
        record = self.store.session(tenant, session_id)
        if record is None:
            raise NotFound(f"there is no session {session_id}; create one")
        checkpoints = [
            c for c in self.store.checkpoints(tenant) if c.model.startswith(f"{session_id}:") and c.kind == "weights"
        ]
        raise Gone(ended_message(record, checkpoints[0].path if checkpoints else None))

    def stop_session(self, tenant: str, session_id: str, reason: str = "") -> None:
        """Fail what is queued, let what is running end, and free the session. Stopping one that has ended is no error."""
        try:
            session = self.session(tenant, session_id)
        except Gone:
            return
        self._end(session, "Stopped", reason)

    def run(self, tenant: str, session_id: str, operation: LoadTokenizer) -> str:
        """Accept an operation of a session itself: the id of its ticket."""
        session = self._open_session(tenant, session_id)
        with session.lock:
            self._check_quota(session)
            ticket = self._open(session, session_id, operation)
        self._scheduler.put([ticket])
        return ticket.id

    # Models

    def create_model(
        self,
        tenant: str,
        session_id: str,
        sequence: int,
        operation: CreateModel | CreateModelFromState,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """The id of the ticket that creates model `<session>:train:<sequence>`; the same again for a repeated request."""
        session = self._open_session(tenant, session_id)
        if isinstance(operation, CreateModel):
            base_model, rank, alpha = self.check_base_model(operation.base_model), operation.rank, operation.alpha
        else:
            checkpoint = self.checkpoint(tenant, operation.path)
            base_model, rank, alpha = checkpoint.base_model, checkpoint.rank, 0.0
        model_id = f"{session_id}:train:{sequence}"
        with session.lock:
            if model_id not in session.models:
                self._check_quota(session)
                now = time.time()
                record = ModelRecord(model_id, session_id, tenant, base_model, rank, alpha, now, now, metadata or {})
                self.store.put_model(record)
                session.models[model_id] = Model(record)
            return self._submit(session, session.models[model_id], CREATION, operation)

    def model(self, tenant: str, model_id: str) -> Model:
        """A live model. Raises NotFound, or Gone where its session has ended."""
        session = self.session(tenant, _session_of(model_id))
        if model_id not in session.models:
            raise NotFound(f"there is no model {model_id}; create one in session {session.id}")
        return session.models[model_id]

    def submit(self, tenant: str, model_id: str, sequence: int | None, operation: Operation) -> str:
        """Accept an operation of a model: the id of its ticket, and the same again for a sequence number seen before.

        Operations run in the order of their numbers, from 1, whatever order they arrive in. None is the next number.
        """
        session = self._open_session(tenant, _session_of(model_id))
        model = self.model(tenant, model_id)
        with session.lock:
            if isinstance(operation, Snapshot) and operation.sampler_id not in session.samplers:
                session.samplers[operation.sampler_id] = Sampler(
                    operation.sampler_id, tenant, session.id, model.record.base_model, snapshot=True
                )
            return self._submit(session, model, sequence, operation)

    # Samplers

    def create_sampler(
        self, tenant: str, session_id: str, sequence: int, base_model: str | None = None, model_path: str | None = None
    ) -> Sampler:
        """The sampler `<session>:sample:<sequence>` of a base model or a checkpoint; the same again for a repeated request."""
        session = self._open_session(tenant, session_id)
        if model_path is not None:
            base_model = self.checkpoint(tenant, model_path).base_model
        elif base_model is None:
            raise InvalidRequest("a sampler needs base_model or model_path")
        else:
            self.check_base_model(base_model)
        sampler_id = self.sampler_id(session_id, sequence)
        with session.lock:
            return session.samplers.setdefault(
                sampler_id, Sampler(sampler_id, tenant, session_id, base_model, model_path)
            )

    @staticmethod
    def sampler_id(session_id: str, sequence: int) -> str:
        return f"{session_id}:sample:{sequence}"

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound, or Gone where its session has ended."""
        session = self.session(tenant, _session_of(sampler_id))
        if sampler_id not in session.samplers:
            raise NotFound(f"there is no sampler {sampler_id}; create one in session {session.id}")
        return session.samplers[sampler_id]

    def live_sampler(self, tenant: str, model_id: str) -> tuple[Sampler, Ticket]:
        """A sampler of a model's weights after all operations accepted so far, and the ticket to wait for before it is used.

        It is made anew when the weights have changed since the last one.
        """
        session = self._open_session(tenant, _session_of(model_id))
        model = self.model(tenant, model_id)
        with session.lock:
            live = model.live
            if live is None or live.version != model.version or live.sampler.evicted:
                self._check_quota(session)
                sampler = Sampler(
                    f"{model_id}:live:{model.version}", tenant, session.id, model.record.base_model, snapshot=True
                )
                session.samplers[sampler.id] = sampler
                live = model.live = LiveSampler(
                    model.version, sampler, self._open(session, model_id, Snapshot(sampler.id))
                )
                self._scheduler.put([live.ticket])
            return live.sampler, live.ticket

    def sample(self, tenant: str, sampler_id: str, sequence: int | None, operation: Sample | Rejected) -> str:
        """Accept a sample: the id of its ticket, and the same again for a sequence number seen before. Samples have no order."""
        session = self._open_session(tenant, _session_of(sampler_id))
        sampler = self.sampler(tenant, sampler_id)
        with session.lock:
            if sequence is not None and sequence in sampler.tickets:
                return sampler.tickets[sequence]
            self._check_quota(session)
            ticket = self._open(session, sampler_id, operation)
            if sequence is not None:
                sampler.tickets[sequence] = ticket.id
        if isinstance(operation, Rejected):
            ticket.settle(error=InvalidRequest(operation.reason))
        else:
            self._scheduler.put([ticket])
        return ticket.id

    # Tickets

    def ticket(self, tenant: str, ticket_id: str) -> Ticket:
        """Raises NotFound; Gone for one whose result is no longer kept, or whose session was lost."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.tenant == tenant:
            session = self._sessions.get(ticket.session_id)
            if session is not None:
                session.touch()
            return ticket
        session_id = _session_of(ticket_id)
        if self.store.session(tenant, session_id) is None:
            raise NotFound(f"there is no operation {ticket_id}")
        self.session(tenant, session_id)  # raises Gone with what became of it
        raise Gone(f"the result of operation {ticket_id} is no longer kept; results are for {self.limits.kept_s:g} s")

    def cancel(self, tenant: str, ticket_id: str) -> None:
        """Take an operation that has not begun out of the queue; one that has runs to its end."""
        ticket = self.ticket(tenant, ticket_id)
        for removed in self._scheduler.remove(
            lambda candidate: candidate is ticket and isinstance(candidate.operation, Sample)
        ):
            removed.settle(error=Gone("the operation was cancelled by the client"))

    # Checkpoints

    def checkpoint(self, tenant: str, path: str) -> CheckpointRecord:
        """Raises NotFound."""
        return self.store.existing_checkpoint(tenant, path)

    def delete_checkpoint(self, tenant: str, path: str) -> None:
        """Raises NotFound."""
        record = self.checkpoint(tenant, path)
        self.store.delete_checkpoint(tenant, path)
        shutil.rmtree(record.folder, ignore_errors=True)

    def check_base_model(self, name: str) -> str:
        """`name` itself. Raises InvalidRequest, naming those that there are."""
        if name not in self.base_models:
            hint = did_you_mean(name, self.base_models)
            raise InvalidRequest(f"base model {name!r} is not served{hint}; served are {', '.join(self.base_models)}")
        return name

    # The end

    def close(self) -> None:
        """Accept nothing more, let the running operation end, fail all others, and stop the backend. Idempotent.

        Tickets can still be asked for.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        for ticket in self._scheduler.stop():
            ticket.settle(
                error=ShuttingDown("the server was stopped before this operation ran; go on from the last checkpoint")
            )
        for session in self.live_sessions:
            self._end(session, "Stopped", "the server was stopped")
        self._reaper.join()
        self._backend.stop()

    # Inside

    def _open_session(self, tenant: str, session_id: str) -> Session:
        self._check_running()
        session = self.session(tenant, session_id)
        session.check_open()
        return session

    def _check_running(self) -> None:
        if self._closing.is_set():
            raise ShuttingDown("the server is being stopped; try again when it is back")

    def _check_quota(self, session: Session) -> None:
        queued = sum(other.pending for other in self.live_sessions if other.tenant == session.tenant)
        if queued >= self.limits.max_queued:
            raise QuotaExceeded(
                f"{queued} operations are waiting, as many as there may be; try again when some have ended"
            )

    def _submit(self, session: Session, model: Model, sequence: int | None, operation: Operation) -> str:
        def make() -> Ticket:
            if not model.order.awaits(sequence):
                self._check_quota(session)
            if isinstance(operation, OptimStep | Load):
                model.version += 1
            return self._open(session, model.id, operation)

        ticket_id, released = model.order.accept(sequence, make)
        self._scheduler.put(released)
        return ticket_id

    def _open(self, session: Session, owner: str, operation: Operation) -> Ticket:
        ticket = self._tickets.open(session.tenant, session.id, owner, operation)
        with session.lock:
            session.pending += 1

        def settled(_: object) -> None:
            with session.lock:
                session.pending -= 1
            session.touch()

        ticket.future.add_done_callback(settled)
        return ticket

    def _run(self, ticket: Ticket) -> None:
        session = self._sessions.get(ticket.session_id)
        if session is None:
            ticket.settle(error=Gone(f"session {ticket.session_id} has ended; create a new one"))
        else:
            self._worker.run(ticket, session)

    def _run_samples(self, tickets: Sequence[Ticket]) -> None:
        known = [(ticket, self._sessions.get(ticket.session_id)) for ticket in tickets]
        for ticket, session in known:
            if session is None:
                ticket.settle(error=Gone(f"session {ticket.session_id} has ended; create a new one"))
        self._worker.run_samples([(ticket, session) for ticket, session in known if session is not None])

    def _end(self, session: Session, state: SessionState, reason: str) -> None:
        """Begin the end of a session; `_reap` completes it once nothing of it runs."""
        session.enter("Stopping", reason)
        removed = self._scheduler.remove(lambda ticket: ticket.session_id == session.id)
        with session.lock:
            removed += [ticket for model in session.models.values() for ticket in model.order.give_up()]
        for ticket in removed:
            ticket.settle(
                error=Gone(
                    f"session {session.id} was ended before this operation ran ({reason or state}); create a new session"
                )
            )
        session.final_state = (state, reason)
        self._finish(session)

    def _finish(self, session: Session) -> None:
        with session.lock:
            if session.final_state is None or session.pending:
                return
            session.release()
            session.enter(*session.final_state)
        with self._lock:
            self._sessions.pop(session.id, None)

    def _reap(self) -> None:
        while not self._closing.wait(REAP_EVERY_S):
            now = time.monotonic()
            self._tickets.drop_old()
            for session in self.live_sessions:
                idle_s = now - session.last_active
                if session.final_state is not None:
                    self._finish(session)
                elif session.pending == 0 and idle_s > self.limits.session_timeout_s:
                    self._end(session, "Expired", f"nothing was heard of it for {self.limits.session_timeout_s:g} s")
                else:
                    self._tidy(session, now)
            for checkpoint in self.store.expired_checkpoints(time.time()):
                self.delete_checkpoint(checkpoint.tenant, checkpoint.path)

    def _tidy(self, session: Session, now: float) -> None:
        """Forget the numbers of old results, and give up operations that wait for one that never came."""
        with session.lock:
            for sampler in session.samplers.values():
                sampler.tickets = {
                    seq: ticket for seq, ticket in sampler.tickets.items() if self._tickets.get(ticket) is not None
                }
            for model in session.models.values():
                model.order.forget(lambda ticket_id: self._tickets.get(ticket_id) is not None)
                since = model.order.waiting_since()
                if since is not None and now - since > self.limits.gap_timeout_s:
                    missing = model.order.missing
                    for ticket in model.order.give_up():
                        ticket.settle(
                            error=InvalidRequest(f"operation {missing} of {model.id} did not arrive in time; {RESEND}")
                        )


def _session_of(identifier: str) -> str:
    return identifier.partition(":")[0]
