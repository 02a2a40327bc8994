"""Load test of the session server: many clients on one base model, through the published tinker SDK.

    python benchmarks/server_load.py [--sessions 32] [--seconds 300] [--base-model tiny]

Every session has its own client, on a thread of this process. It repeats a round: forward_backward of 8 datums,
optim_step, a snapshot, a sample of 4, and in every tenth round save_state and load_state_with_optimizer. Before the
clock starts, each has run two rounds and made as many snapshots as the server keeps. The server is another process.

Exit status 0 if there is no error, the resident memory of the server grows by less than 10 % in the second half, and
the fastest session runs at most twice as many rounds as the slowest.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tinker
from tinker import types

from cookbook.serve.core.limits import Limits

API_KEY = "tml-a-server-without-keys-takes-any"
DATUMS, TOKENS, SAMPLES, NEW_TOKENS, SAVE_EVERY = 8, 32, 4, 16, 10
WARM_UP_ROUNDS = 2


@contextmanager
def serve(*arguments: str) -> Iterator[tuple[str, int]]:
    """The URL and the process id of a new server; its state directory is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="server-load-") as state_dir:
        command = [sys.executable, "-m", "cookbook.serve", "--port", "0", "--state-dir", state_dir, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            found = re.search(r" at (http://\S+) ", process.stdout.readline())
            if found is None:
                raise SystemExit("the server did not start; its message is above")
            threading.Thread(target=_watch, args=(process,), daemon=True).start()
            yield found[1], process.pid
        finally:
            process.terminate()
            process.wait()


def _watch(process: subprocess.Popen[str]) -> None:
    """Read its log, so that the pipe does not fill up, and report if it fails."""
    for _ in process.stdout or ():
        pass
    if process.wait() != 0:
        print(f"the server ended with status {process.returncode}", file=sys.stderr)


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Client(threading.Thread):
    """The client of one session. It counts the rounds that it finishes before `stop`."""

    def __init__(self, url: str, base_model: str, number: int, start: threading.Barrier, stop: threading.Event) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self.rounds = 0
        self.operations: Counter[str] = Counter()
        self.errors: list[str] = []
        self.longest_round_s = 0.0
        self._url, self._base_model, self._number = url, base_model, number
        self._start_together, self._stop_event = start, stop

    def run(self) -> None:
        try:
            with tinker.ServiceClient(base_url=self._url, api_key=API_KEY) as service:
                model = service.create_lora_training_client(self._base_model, rank=8, seed=self._number).result()
                for index in range(WARM_UP_ROUNDS):
                    self._round(model, f"warm-up-{index}")
                for _ in range(Limits().max_snapshots):  # Memory should not grow once all of them exist.
                    model.save_weights_and_get_sampling_client().result()
                self._start_together.wait()
                while not self._stop_event.is_set():
                    started = time.perf_counter()
                    self._round(model, f"round-{self.rounds}" if self.rounds % SAVE_EVERY == SAVE_EVERY - 1 else None)
                    self.longest_round_s = max(self.longest_round_s, time.perf_counter() - started)
                    self.rounds += 1
        except Exception as error:  # main reports it
            self.errors.append(f"{type(error).__name__}: {error}")
            self._start_together.abort()

    def _round(self, model: tinker.TrainingClient, save_as: str | None) -> None:
        tokens = [40 + (self._number + index) % 50 for index in range(TOKENS + 1)]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * TOKENS}
        data = [
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=dict(inputs))
            for _ in range(DATUMS)
        ]
        backward = model.forward_backward(data, "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=1e-4))
        backward.result()
        step.result()
        sampler = model.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=NEW_TOKENS)
        sampler.sample(types.ModelInput.from_ints(tokens[:8]), SAMPLES, params).result()
        self.operations.update(forward_backward=1, optim_step=1, snapshot=1, sample=1)
        if save_as is not None:
            path = model.save_state(save_as).result().path
            model.load_state_with_optimizer(path).result()
            self.operations.update(save_state=1, load_state=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--base-model", default="tiny")
    arguments = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    # The SDK warns at every call of load_state that it is deprecated.
    logging.getLogger("tinker").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", FutureWarning)
    stop, start = threading.Event(), threading.Barrier(arguments.sessions + 1)
    with serve("--base-model", arguments.base_model) as (url, pid):
        clients = [Client(url, arguments.base_model, number, start, stop) for number in range(arguments.sessions)]
        for client in clients:
            client.start()
        try:
            start.wait()
        except threading.BrokenBarrierError:
            print(*(error for client in clients for error in client.errors), sep="\n")
            return 1
        began, cpu, own = time.perf_counter(), cpu_seconds(pid), time.process_time()
        memory: list[float] = []
        while (elapsed := time.perf_counter() - began) < arguments.seconds:
            memory.append(resident_mib(pid))
            rounds = [client.rounds for client in clients]
            print(
                f"{elapsed:6.0f} s  {memory[-1]:7.1f} MiB  rounds {min(rounds)} to {max(rounds)}  "
                f"load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            time.sleep(min(arguments.seconds / 20, arguments.seconds - elapsed))
        rounds = [client.rounds for client in clients]
        memory.append(resident_mib(pid))
        server_cpu, client_cpu = cpu_seconds(pid) - cpu, time.process_time() - own
        stop.set()
        for client in clients:
            client.join()
    errors = [error for client in clients for error in client.errors]
    half = len(memory) // 2
    growth, ratio = max(memory[half:]) / max(memory[: half + 1]), max(rounds) / max(1, min(rounds))
    operations = dict(sum((client.operations for client in clients), Counter()))
    print(f"{arguments.sessions} sessions, {arguments.seconds:g} s: {operations}")
    print(f"errors: {len(errors)}", *errors[:5], sep="\n  ")
    print(
        f"memory of the server: {memory[0]:.1f} MiB at the start, at most {max(memory):.1f}; "
        f"second half over first {growth:.3f}"
    )
    longest_s = max(client.longest_round_s for client in clients)
    print(f"rounds of a session: {min(rounds)} to {max(rounds)}, ratio {ratio:.2f}; longest round {longest_s:.1f} s")
    print(f"CPU: server {server_cpu:.1f} s, clients {client_cpu:.1f} s")
    return 0 if not errors and growth < 1.1 and ratio <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
