"""The live sessions of all tenants: creation, their queued operations, and how they end."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cookbook.serve.core.errors import Gone, InvalidRequest, NotFound, QuotaExceeded, ShuttingDown
from cookbook.serve.core.limits import Limits
from cookbook.serve.core.operations import Operation, Sample
from cookbook.serve.core.scheduler import Scheduler
from cookbook.serve.core.sessions import Session, session_ended
from cookbook.serve.core.store import SessionRecord, SessionState, Store
from cookbook.serve.core.tickets import Ticket, TicketTable
from cookbook.serve.core.worker import Worker

REAP_EVERY_S = 1.0


class SessionRegistry:
    """Creates sessions, queues their operations, and ends them: on request, after a timeout, or with the server.

    Methods with a `tenant` see only what belongs to that tenant; anything else is NotFound. They return at once;
    results come with tickets. Sessions in the store that have not ended are marked as failed: their weights are lost.
    """

    def __init__(self, store: Store, worker: Worker, limits: Limits) -> None:
        self.lost = store.fail_unfinished_sessions("the server ended before the session did")
        """The number of sessions of earlier processes that had not ended."""
        self._store, self._worker, self._limits = store, worker, limits
        self._sessions: dict[str, Session] = {}
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._tickets = TicketTable(limits.kept_s, limits.kept_after_fetch_s)
        self._scheduler = Scheduler(self._run, self._run_samples, limits.max_sample_rows)
        self._reaper = threading.Thread(target=self._reap, name="serve-reaper", daemon=True)
        self._reaper.start()

    @property
    def live(self) -> list[Session]:
        with self._lock:
            return [*self._sessions.values()]

    @property
    def queue_depth(self) -> int:
        return self._scheduler.depth

    # Sessions

    def create(self, tenant: str, name: str = "", metadata: Mapping[str, Any] | None = None) -> Session:
        """A new session. Raises QuotaExceeded, ShuttingDown."""
        self._check_running()
        with self._lock:
            if sum(session.tenant == tenant for session in self._sessions.values()) >= self._limits.max_sessions:
                raise QuotaExceeded(
                    f"{self._limits.max_sessions} sessions are open, which is the limit; stop one, or try again later"
                )
            now = time.time()
            record = SessionRecord(uuid.uuid4().hex, tenant, name, "Created", "", now, now, metadata or {})
            session = Session(record, self._store, self._limits.max_snapshots)
            self._sessions[record.id] = session
        self._store.put_session(record)
        return session

    def get(self, tenant: str, session_id: str) -> Session:
        """A live session; using it keeps it alive. Raises NotFound, or Gone for one that has ended."""
        session = self._sessions.get(session_id)
        if session is not None and session.tenant == tenant:
            session.touch()
            return session
        record = self._store.session(tenant, session_id)
        if record is None:
            raise NotFound(f"there is no session {session_id}; create one")
        checkpoints = self._store.checkpoints(tenant)
        of_session = [c for c in checkpoints if session_of(c.model) == session_id and c.kind == "weights"]
        raise session_ended(record, of_session[0].key if of_session else None)

    def get_open(self, tenant: str, session_id: str) -> Session:
        """A session that accepts operations. Raises NotFound, Gone, ShuttingDown."""
        self._check_running()
        session = self.get(tenant, session_id)
        session.check_open()
        return session

    def stop(self, tenant: str, session_id: str, reason: str = "") -> None:
        """Fail the queued operations, let the running one finish, and free the session. Idempotent."""
        try:
            session = self.get(tenant, session_id)
        except Gone:
            return
        self._end(session, "Stopped", reason)

    def close(self) -> None:
        """Accept nothing more, let the running operation finish, fail all others, and end all sessions. Idempotent.

        Tickets can still be fetched.
        """
        if self._closing.is_set():
            return
        self._closing.set()
        for ticket in self._scheduler.stop():
            message = "the server was stopped before this operation ran; continue from the last checkpoint"
            ticket.settle(error=ShuttingDown(message))
        for session in self.live:
            self._end(session, "Stopped", "the server was stopped")
        self._reaper.join()

    # Operations

    def check_quota(self, tenant: str) -> None:
        """Raises QuotaExceeded: the tenant's queued operations have reached the limit."""
        queued = sum(session.pending for session in self.live if session.tenant == tenant)
        if queued >= self._limits.max_queued:
            raise QuotaExceeded(
                f"{queued} operations are waiting, which is the limit; try again when some have finished"
            )

    def new_ticket(self, session: Session, owner: str, operation: Operation) -> Ticket:
        """A ticket that keeps its session alive until it is settled. It does not run before it is queued."""
        ticket = self._tickets.open(session.tenant, session.id, owner, operation)
        with session.lock:
            session.pending += 1

        def settled(_: object) -> None:
            with session.lock:
                session.pending -= 1
            session.touch()

        ticket.future.add_done_callback(settled)
        return ticket

    def enqueue(self, tickets: Iterable[Ticket]) -> None:
        self._scheduler.put(tickets)

    def ticket(self, tenant: str, ticket_id: str) -> Ticket:
        """Raises NotFound; Gone if the result is no longer kept or the session was lost."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.tenant == tenant:
            session = self._sessions.get(ticket.session_id)
            if session is not None:
                session.touch()
            return ticket
        session_id = session_of(ticket_id)
        if self._store.session(tenant, session_id) is None:
            raise NotFound(f"there is no operation {ticket_id}")
        self.get(tenant, session_id)  # raises Gone if the session has ended
        raise Gone(
            f"the result of operation {ticket_id} is no longer kept; results are kept for {self._limits.kept_s:g} s"
        )

    def cancel(self, tenant: str, ticket_id: str) -> None:
        """Remove a sample from the queue; one that is running, or another operation, runs to its end."""
        ticket = self.ticket(tenant, ticket_id)
        if isinstance(ticket.operation, Sample):
            for removed in self._scheduler.remove(lambda candidate: candidate is ticket):
                removed.settle(error=Gone("the operation was cancelled by the client"))

    # Inside

    def _check_running(self) -> None:
        if self._closing.is_set():
            raise ShuttingDown("the server is shutting down; try again when it is back")

    def _run(self, ticket: Ticket) -> None:
        session = self._live_session_of(ticket)
        if session is not None:
            self._worker.run(ticket, session)

    def _run_samples(self, tickets: Sequence[Ticket]) -> None:
        pairs = [(ticket, self._live_session_of(ticket)) for ticket in tickets]
        self._worker.run_samples([(ticket, session) for ticket, session in pairs if session is not None])

    def _live_session_of(self, ticket: Ticket) -> Session | None:
        session = self._sessions.get(ticket.session_id)
        if session is None:
            ticket.settle(error=Gone(f"session {ticket.session_id} has ended; create a new one"))
        return session

    def _end(self, session: Session, state: SessionState, reason: str) -> None:
        """Begin to end a session; `_reap` completes it once none of its operations is running."""
        session.enter("Stopping", reason)
        removed = self._scheduler.remove(lambda ticket: ticket.session_id == session.id)
        with session.lock:
            removed += [ticket for model in session.models.values() for ticket in model.order.give_up()]
        message = f"session {session.id} ended before this operation ran ({reason or state}); create a new session"
        for ticket in removed:
            ticket.settle(error=Gone(message))
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
            for session in self.live:
                idle_s = now - session.last_active
                if session.final_state is not None:
                    self._finish(session)
                elif session.pending == 0 and idle_s > self._limits.session_timeout_s:
                    self._end(session, "Expired", f"no request for {self._limits.session_timeout_s:g} s")
                else:
                    self._tidy(session, now)
            for checkpoint in self._store.expired_checkpoints(time.time()):
                self._store.delete_checkpoint(checkpoint)

    def _tidy(self, session: Session, now: float) -> None:
        """Forget the numbers of old results, and fail operations that wait for one that never arrived."""
        with session.lock:
            for sampler in session.samplers.values():
                sampler.tickets = {
                    number: ticket_id
                    for number, ticket_id in sampler.tickets.items()
                    if self._tickets.get(ticket_id) is not None
                }
            for model in session.models.values():
                model.order.forget(lambda ticket_id: self._tickets.get(ticket_id) is not None)
                since = model.order.waiting_since()
                if since is not None and now - since > self._limits.gap_timeout_s:
                    message = (
                        f"operation {model.order.missing} of {model.id} did not arrive in time; "
                        "later operations were dropped: send them again with new numbers"
                    )
                    for ticket in model.order.give_up():
                        ticket.settle(error=InvalidRequest(message))


def session_of(identifier: str) -> str:
    """The session's id, with which the ids of its models, samplers and tickets begin."""
    return identifier.partition(":")[0]
