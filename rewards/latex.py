"""Mathematical answers in LaTeX (`\\boxed{\\frac{1}{2}}`), judged by the math-verify package (extra `math`).

math-verify calls SymPy, which can run for hours on some expressions and cannot be interrupted from Python; its own time
limit works only in the main thread. So it is not imported here: worker processes do the work and are killed when they
take too long. Any thread may call the reward.
"""

from __future__ import annotations

import importlib.util
import json
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cookbook.core.errors import ConfigError, DataError, RewardError
from cookbook.core.examples import Example
from cookbook.core.rollouts import Completion, RewardResult
from rewards.final_part import final_part
from rewards.latex_text import Reading, UnreadableError, find_answer, pairs, read_answer, same_exactly
from rewards.latex_worker import last_box
from rewards.validation import expect_score

WORKER = Path(__file__).with_name("latex_worker.py")

STARTUP_S = 120.0
"""How long a worker may take to import math-verify (slow on a cold or busy disk)."""


class _WorkerTimeoutError(Exception):
    """The worker did not answer in time and was killed."""


class _WorkerDiedError(Exception):
    """The worker exited during a request."""


class _SlowGoldError(RewardError):
    """The gold answer could not be read in time."""


class _Worker:
    """One worker process, started on first use and again after it has died. Used by one thread at a time."""

    def __init__(self, memory_mb: int) -> None:
        self._memory_mb = memory_mb
        self._process: subprocess.Popen[str] | None = None

    def send(self, request: dict[str, Any]) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError as error:
            self.kill()
            raise _WorkerDiedError from error

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message of the worker. A worker that exceeds `timeout_s` is killed."""
        process = self._process
        assert process is not None and process.stdout is not None
        timed_out = threading.Event()

        def give_up() -> None:
            timed_out.set()
            process.kill()

        timer = threading.Timer(timeout_s, give_up)
        timer.daemon = True
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return json.loads(line)
        self.kill()
        raise _WorkerTimeoutError if timed_out.is_set() else _WorkerDiedError

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start(self) -> subprocess.Popen[str]:
        # -P keeps this folder off the worker's module path, where math.py would shadow the standard library's.
        command = [sys.executable, "-P", str(WORKER), str(self._memory_mb)]
        self.kill()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        try:
            ready = self.receive(STARTUP_S)
        except (_WorkerTimeoutError, _WorkerDiedError) as error:
            raise RewardError(
                "rewards.latex.MathVerify: the worker process did not start; run its script to see why"
            ) from error
        if ready["error"]:
            raise RewardError(
                f"rewards.latex.MathVerify: the worker process could not import math-verify: {ready['error']}"
            )
        return self._process


class MathVerify:
    """1.0 if the completion's answer is mathematically equal to `example.answer`, else 0.0.

    The answer is the content of the last `\\boxed{...}` in the final part of the completion (`rewards.final_part`), or
    without one the last formula or expression of numbers (`rewards.latex_text.find_answer`). The gold answer is LaTeX,
    with or without `$...$` or `\\boxed{...}`. docs/rewards.md says how percent, ratios, times and bases compare.

    Status: correct, wrong, or malformed if there is no expression or it cannot be read as a whole. An answer that takes
    longer than `timeout_s` seconds would do so again, so it is malformed too (`metrics["timeout"]` is 1.0). An answer
    that needs more than `memory_mb` (limited only on Linux) is malformed or wrong. A worker that dies is an
    infrastructure error.

    At most `workers` processes run at the same time; waiting for a free one does not count towards `timeout_s`.

    Raises:
        ConfigError: math-verify is not installed, or a setting is out of range.
        DataError: the gold answer is not a mathematical expression, or cannot be read as a whole.
        RewardError: a worker died, could not start, or could not read the gold answer in time.
    """

    def __init__(self, timeout_s: float = 5.0, workers: int = 2, memory_mb: int = 2048) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError("rewards.latex.MathVerify needs the math-verify package: pip install -e '.[math]'")
        for name, value in (("timeout_s", timeout_s), ("workers", workers), ("memory_mb", memory_mb)):
            if not value > 0:
                raise ConfigError(f"rewards.latex.MathVerify: {name}={value}: must be more than 0")
        self._timeout_s = timeout_s
        self._workers = [_Worker(memory_mb) for _ in range(workers)]
        # Last in, first out: a single thread starts only one process.
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._finalizer = weakref.finalize(self, _kill_all, self._workers)

    def __call__(self, completion: Completion, example: Example) -> RewardResult:
        gold = self._gold(example)
        answer = _answer(completion.text)
        if answer is None:
            return RewardResult(0.0, "malformed")
        same = same_exactly(gold, answer)
        if same is not None:
            return RewardResult(float(same), "correct" if same else "wrong")
        with self._idle_worker() as worker:
            try:
                worker.send({"pairs": pairs(gold, answer), "timeout_s": self._timeout_s})
                parsed = worker.receive(self._timeout_s)
            except _WorkerTimeoutError as error:
                raise _SlowGoldError(
                    f"rewards.latex.MathVerify: the gold answer of {example.id} took over {self._timeout_s:g} s"
                ) from error
            except _WorkerDiedError as error:
                raise RewardError("rewards.latex.MathVerify: the worker process died on a gold answer") from error
            if not parsed["parsed"]:
                raise DataError(_unreadable(example, "it is not a mathematical expression"))
            try:
                verdict = worker.receive(self._timeout_s)
            except _WorkerTimeoutError:
                return RewardResult(0.0, "malformed", {"timeout": 1.0})
            except _WorkerDiedError as error:
                raise RewardError("rewards.latex.MathVerify: the worker process died on a completion") from error
        return RewardResult(float(verdict["status"] == "correct"), verdict["status"])

    def _gold(self, example: Example) -> Reading:
        box = last_box(example.answer)
        try:
            return read_answer(example.answer if box is None else box)
        except UnreadableError as error:
            raise DataError(_unreadable(example, str(error))) from error

    @contextmanager
    def _idle_worker(self) -> Iterator[_Worker]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End the worker processes. Called automatically when the reward is collected or Python exits."""
        self._finalizer()

    def check_gold(self, example: Example) -> None:
        """Check that the gold answer can be read. Raises DataError."""
        try:
            self(Completion("\\boxed{0}", "eos", num_tokens=0), example)
        except _SlowGoldError as error:
            raise DataError(str(error)) from error

    def validate(self, examples: Iterable[Example]) -> None:
        """Check that each gold answer, boxed, scores 1, and the same plus one scores 0. Raises DataError."""
        for example in examples:
            expect_score(self, f"\\boxed{{{example.answer}}}", example, 1.0)
            expect_score(self, f"\\boxed{{{example.answer} + 1}}", example, 0.0)


def _answer(text: str) -> Reading | None:
    final = final_part(text)
    answer = None if final is None else find_answer(final)
    if answer is None:
        return None
    try:
        return read_answer(answer)
    except UnreadableError:
        return None


def _unreadable(example: Example, reason: str) -> str:
    return (
        f"rewards.latex.MathVerify: the gold answer {example.answer[:80]!r} of {example.id} cannot be judged: "
        f"{reason}; fix the dataset, or remove the example"
    )


def _kill_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.kill()
