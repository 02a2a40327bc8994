"""The engine's order and batching, with operations that only take notes."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from cookbook.backends.local.engine import Engine
from cookbook.core.clients import APIFuture
from cookbook.core.errors import BackendError


class Note:
    def __init__(self, name: str) -> None:
        self.name = name
        self.future: Future[str] = Future()


class Recorder:
    """An engine whose requests are answered with their names, and what it did."""

    def __init__(self) -> None:
        self.log: list[object] = []
        self.batches: list[list[str]] = []
        self.engine: Engine[Note] = Engine(self.answer)

    def answer(self, notes: list[Note]) -> None:
        self.batches.append([note.name for note in notes])
        self.log.append(self.batches[-1])
        for note in notes:
            if note.future.running():
                note.future.set_result(note.name)

    def ask(self, name: str) -> APIFuture[str]:
        note = Note(name)
        self.engine.hold(note)
        return APIFuture(note.future, on_wait=self.engine.flush)


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.engine.stop()


def test_requests_run_together_when_one_is_waited_for(recorder: Recorder) -> None:
    first, second = recorder.ask("a"), recorder.ask("b")
    assert second.result(10) == "b" and first.result(10) == "a"
    assert recorder.ask("c").result(10) == "c"
    assert recorder.log == [["a", "b"], ["c"]]


def test_an_operation_sends_the_held_requests_ahead_of_itself(recorder: Recorder) -> None:
    recorder.ask("a")
    recorder.ask("b")
    recorder.engine.submit(lambda: recorder.log.append("step"))
    recorder.ask("c").result(10)
    assert recorder.log == [["a", "b"], "step", ["c"]]


def test_requests_of_one_turn_of_the_event_loop_run_together(recorder: Recorder) -> None:
    async def task(name: str) -> str:
        answer = await recorder.ask(name)
        await recorder.ask(name + answer)
        return answer

    async def tasks() -> list[str]:
        return await asyncio.gather(*(task(name) for name in "abc"))

    assert asyncio.run(tasks()) == ["a", "b", "c"]
    assert recorder.batches[0] == ["a", "b", "c"] and sorted(
        name for batch in recorder.batches[1:] for name in batch
    ) == ["aa", "bb", "cc"]


def test_an_error_goes_to_its_future_and_the_engine_carries_on(recorder: Recorder) -> None:
    failed = recorder.engine.submit(lambda: 1 / 0)
    after = recorder.engine.submit(lambda: "fine")
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert after.result(10) == "fine"


def test_a_cancelled_operation_is_not_run(recorder: Recorder) -> None:
    gate = threading.Event()
    recorder.engine.submit(gate.wait)
    cancelled = recorder.engine.submit(lambda: recorder.log.append("ran"))
    cancelled.cancel()
    gate.set()
    recorder.engine.submit(lambda: None).result(10)
    assert recorder.log == []


def test_stop_lets_the_running_operation_end_and_fails_the_rest(recorder: Recorder) -> None:
    started, gate = threading.Event(), threading.Event()
    running = recorder.engine.submit(lambda: (started.set(), gate.wait(10)))
    queued, held = recorder.engine.submit(lambda: None), recorder.ask("a")
    started.wait(10)
    threading.Timer(0.1, gate.set).start()
    recorder.engine.stop()
    assert running.result(10) == (None, True)
    for future in (queued, held):
        with pytest.raises(BackendError, match="stopped"):
            future.result(10)
    with pytest.raises(BackendError, match="stopped"):
        recorder.engine.submit(lambda: None)
