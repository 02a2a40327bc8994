"""The scheduler: one thread that runs all operations, sessions in turn, samples in batches."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

from cookbook.serve.core.operations import Sample
from cookbook.serve.core.tickets import Ticket

logger = logging.getLogger(__name__)

GATHER_S = 0.02
"""How long samples wait for further ones. A client sends the prompts of a step one by one, and a batch costs little
more than a single sample."""

LONGEST_GATHER_S = 0.4
"""How long they wait when further ones keep coming. The next batch gathers while this one runs."""


class Queues:
    """A queue per session, served round-robin."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def put(self, ticket: Ticket) -> None:
        self._queues.setdefault(ticket.session_id, deque()).append(ticket)

    def take(self) -> Ticket:
        session_id, queue = self._queues.popitem(last=False)
        ticket = queue.popleft()
        if queue:
            self._queues[session_id] = queue
        return ticket

    def remove(self, wanted: Callable[[Ticket], bool]) -> list[Ticket]:
        removed = [ticket for queue in self._queues.values() for ticket in queue if wanted(ticket)]
        queues = (
            (session, deque(ticket for ticket in queue if not wanted(ticket)))
            for session, queue in self._queues.items()
        )
        self._queues = OrderedDict((session, queue) for session, queue in queues if queue)
        return removed

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __bool__(self) -> bool:
        return bool(self._queues)


class Scheduler:
    """Runs operations one at a time and samples in batches, alternating between the two.

    A batch begins no further sample once it has `max_sample_rows` sequences. Order within a session is kept among its
    operations, and among its samples. `run` and `run_samples` must settle the tickets that they get.
    """

    def __init__(
        self, run: Callable[[Ticket], None], run_samples: Callable[[Sequence[Ticket]], None], max_sample_rows: int
    ) -> None:
        self._run, self._run_samples, self._max_sample_rows = run, run_samples, max_sample_rows
        self._operations, self._samples = Queues(), Queues()
        self._first_sample_at = self._last_sample_at = 0.0
        self._samples_turn = False
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="serve-scheduler", daemon=True)
        self._thread.start()

    def put(self, tickets: Iterable[Ticket]) -> None:
        with self._changed:
            for ticket in tickets:
                if isinstance(ticket.operation, Sample):
                    self._last_sample_at = time.monotonic()
                    if not self._samples:
                        self._first_sample_at = self._last_sample_at
                    self._samples.put(ticket)
                else:
                    self._operations.put(ticket)
            self._changed.notify()

    def remove(self, wanted: Callable[[Ticket], bool]) -> list[Ticket]:
        """Remove waiting tickets from the queues; returns them."""
        with self._changed:
            return self._operations.remove(wanted) + self._samples.remove(wanted)

    @property
    def depth(self) -> int:
        """Operations and samples in the queues."""
        with self._changed:
            return len(self._operations) + len(self._samples)

    def stop(self) -> list[Ticket]:
        """Finish the running operation, and return the tickets that never ran. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        return self.remove(lambda ticket: True)

    def _work(self) -> None:
        while (work := self._next()) is not None:
            if isinstance(work, Ticket):
                self._run(work)
            else:
                self._run_samples(work)

    def _next(self) -> Ticket | list[Ticket] | None:
        with self._changed:
            while not self._stopped:
                if self._operations and not (self._samples_turn and self._samples):
                    self._samples_turn = True
                    return self._operations.take()
                if self._samples:
                    wait_s = (
                        min(self._last_sample_at + GATHER_S, self._first_sample_at + LONGEST_GATHER_S)
                        - time.monotonic()
                    )
                    if wait_s <= 0:
                        self._samples_turn = False
                        return self._take_samples()
                    self._changed.wait(wait_s)
                else:
                    self._changed.wait()
            return None

    def _take_samples(self) -> list[Ticket]:
        batch, rows = [], 0
        while self._samples and rows < self._max_sample_rows:
            ticket = self._samples.take()
            assert isinstance(ticket.operation, Sample)
            batch.append(ticket)
            rows += ticket.operation.num_samples
        return batch
