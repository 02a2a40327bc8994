"""Accepted operations, their order, and their results, which are kept until the client has had time to fetch them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from cookbook.serve.core.errors import Gone
from cookbook.serve.core.operations import Forward, Operation, Usage


@dataclass(eq=False)
class Ticket:
    """One accepted operation. `owner` is the id of its model, sampler or session; times are monotonic seconds.

    The future's error is the operation's own: the client sees it as a failed operation, not as a failed request.
    """

    id: str
    tenant: str
    session_id: str
    owner: str
    operation: Operation
    future: Future[Any] = field(default_factory=Future)
    created: float = field(default_factory=time.monotonic)
    settled: float | None = None
    fetched: float | None = None
    usage: Usage = field(default_factory=Usage)

    def settle(self, result: object = None, error: BaseException | None = None) -> None:
        """Set the result or the error. Only the first call counts: an operation can finish while its session stops."""
        if self.future.done():
            return
        self.settled = time.monotonic()
        if isinstance(self.operation, Forward):
            # Tickets are kept for minutes and data can be large; nothing reads the data again.
            self.operation = dataclasses.replace(self.operation, data=())
        if error is None:
            self.future.set_result(result)
        else:
            self.future.set_exception(error)

    async def wait(self, timeout_s: float) -> bool:
        """Whether the operation is done, after at most `timeout_s` seconds."""
        if not self.future.done():
            done = asyncio.wrap_future(self.future)
            # The error is read from the ticket; asyncio would report it as never retrieved from this future.
            done.add_done_callback(lambda done: done.cancelled() or done.exception())
            # At the timeout asyncio.wait does not cancel the future; wait_for would.
            await asyncio.wait([done], timeout=timeout_s)
        return self.future.done()


class TicketTable:
    """All tickets by id.

    A result is kept for `kept_s` seconds, or for `kept_after_fetch_s` after it was fetched, since clients ask again.
    """

    def __init__(self, kept_s: float, kept_after_fetch_s: float) -> None:
        self._kept_s, self._kept_after_fetch_s = kept_s, kept_after_fetch_s
        self._tickets: dict[str, Ticket] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def open(self, tenant: str, session_id: str, owner: str, operation: Operation) -> Ticket:
        """A new ticket. Its id begins with the session's, so that a later process can tell which session was lost."""
        with self._lock:
            ticket = Ticket(f"{session_id}:op:{next(self._numbers)}", tenant, session_id, owner, operation)
            self._tickets[ticket.id] = ticket
        return ticket

    def get(self, ticket_id: str) -> Ticket | None:
        return self._tickets.get(ticket_id)

    def drop_old(self) -> None:
        now = time.monotonic()
        with self._lock:
            for ticket in [*self._tickets.values()]:
                kept_too_long = ticket.settled is not None and now - ticket.settled > self._kept_s
                if kept_too_long or (ticket.fetched is not None and now - ticket.fetched > self._kept_after_fetch_s):
                    del self._tickets[ticket.id]

    def __len__(self) -> int:
        return len(self._tickets)


class ReorderBuffer:
    """Releases the operations of one model in the order of their sequence numbers, in whatever order they arrive.

    Not thread-safe; the session's lock guards it.
    """

    def __init__(self, first: int) -> None:
        self._next = first
        self._waiting: dict[int, Ticket] = {}
        self._accepted: dict[int, str] = {}

    def accept(self, sequence: int | None, make_ticket: Callable[[], Ticket]) -> tuple[str, list[Ticket]]:
        """The id of the ticket for this number, and the tickets that may now run.

        A number seen before returns the ticket made then, and releases nothing. None is the next number, for clients
        that send one operation at a time.

        Raises:
            Gone: the number was used so long ago that its ticket is no longer kept.
        """
        sequence = self.highest + 1 if sequence is None else sequence
        if sequence in self._accepted:
            return self._accepted[sequence], []
        if sequence < self._next:
            raise Gone(
                f"operation {sequence} ran before and its result is no longer kept; "
                f"continue with operation {self.highest + 1}"
            )
        ticket = make_ticket()
        self._accepted[sequence] = ticket.id
        self._waiting[sequence] = ticket
        released = []
        while self._next in self._waiting:
            released.append(self._waiting.pop(self._next))
            self._next += 1
        return ticket.id, released

    @property
    def highest(self) -> int:
        """The highest number accepted so far."""
        return max(self._next - 1, *self._waiting, 0) if self._waiting else self._next - 1

    @property
    def missing(self) -> int:
        """The number that the waiting operations wait for."""
        return self._next

    def awaits(self, sequence: int | None) -> bool:
        """Whether others wait for this number.

        It must be accepted even when they fill the quota: otherwise neither it nor they could ever run.
        """
        return bool(self._waiting) and sequence == self._next

    def give_up(self) -> list[Ticket]:
        """Remove the operations that wait for a missing number; the numbers up to theirs count as used."""
        waiting = [self._waiting[sequence] for sequence in sorted(self._waiting)]
        self._next = self.highest + 1
        self._waiting.clear()
        return waiting

    def waiting_since(self) -> float | None:
        """When the oldest operation that waits for a missing number arrived."""
        return min((ticket.created for ticket in self._waiting.values()), default=None)

    def forget(self, kept: Callable[[str], bool]) -> None:
        """Forget the numbers whose tickets are no longer kept."""
        self._accepted = {sequence: ticket_id for sequence, ticket_id in self._accepted.items() if kept(ticket_id)}
