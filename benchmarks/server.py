"""Time and CPU of GRPO-like steps on the session server, through the published tinker SDK, and in this process.

    python benchmarks/server.py [--base-model tiny] [--prompts 40] [--samples 8] [--max-tokens 80] [--repeats 5]
        [--sparse-logprobs]

A step is a snapshot, `samples` seeded samples of each prompt, forward_backward of one datum for each sample, and
optim_step. The two run the same steps in turn. The server is another process. If one step uses all cores, the work of
the client adds to the wall time of the server's steps, so CPU seconds are given as well. Wall times are medians. The
server's own cost is the CPU time of its process minus that of the same step in this process.

`--sparse-logprobs` is for a client that reads only the logprobs that the loss reads. It saves a forward pass.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tinker
from server_load import API_KEY, cpu_seconds, serve

from cookbook.backends.local import LocalService
from cookbook.core import types as ours

LOSS, LEARNING_RATE, RANK, ALPHA, SEED = "importance_sampling", 1e-4, 16, 32.0, 0
PHASES = ("snapshot", "sample", "forward_backward", "optim_step")

_T = TypeVar("_T")


@dataclass
class Times:
    """Wall seconds by phase and step, and CPU seconds by process and step."""

    phases: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    cpu: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, phase: str, work: Callable[[], _T]) -> _T:
        started = time.perf_counter()
        result = work()
        self.phases[phase].append(time.perf_counter() - started)
        return result

    @property
    def step_s(self) -> float:
        return statistics.median(sum(parts) for parts in zip(*self.phases.values(), strict=True))

    def median(self, process: str) -> float:
        return statistics.median(self.cpu[process])


def inputs_of(prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float) -> dict[str, np.ndarray]:
    before = len(prompt) - 1
    return {
        "target_tokens": np.array([*prompt[1:], *tokens]),
        "logprobs": np.array([0.0] * before + list(logprobs), np.float32),
        "advantages": np.array([0.0] * before + [advantage] * len(tokens), np.float32),
    }


def step(
    times: Times, client: Any, prompts: list[list[int]], api: Any, samples: int, max_tokens: int, sampler_of: Callable
) -> list[list[int]]:
    """One step; `api` has the types of the SDK or those of this project. Returns the sampled tokens."""
    sampler = times.timed("snapshot", lambda: sampler_of(client))

    def sample() -> list:
        futures = [
            sampler.sample(
                api.ModelInput.from_ints(prompt), samples, api.SamplingParams(max_tokens=max_tokens, seed=seed)
            )
            for seed, prompt in enumerate(prompts)
        ]
        return [future.result() for future in futures]

    responses = times.timed("sample", sample)
    data = []
    for prompt, response in zip(prompts, responses, strict=True):
        for index, sequence in enumerate(response.sequences):
            inputs = inputs_of(prompt, sequence.tokens, sequence.logprobs, 1.0 if index % 2 else -1.0)
            data.append(
                api.Datum(model_input=api.ModelInput.from_ints([*prompt, *sequence.tokens[:-1]]), loss_fn_inputs=inputs)
            )
    times.timed("forward_backward", lambda: client.forward_backward(data, LOSS).result())
    times.timed("optim_step", lambda: client.optim_step(api.AdamParams(learning_rate=LEARNING_RATE)).result())
    return [list(sequence.tokens) for response in responses for sequence in response.sequences]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="tiny")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sparse-logprobs", action="store_true")
    arguments = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    rng = np.random.default_rng(0)
    prompts = [rng.integers(40, 90, 30).tolist() for _ in range(arguments.prompts)]
    local = LocalService()
    here = local.create_lora_training_client(arguments.base_model, RANK, ALPHA, SEED)
    sizes = (arguments.samples, arguments.max_tokens)
    in_process, served = Times(), Times()
    with (
        serve("--base-model", arguments.base_model) as (url, pid),
        tinker.ServiceClient(base_url=url, api_key=API_KEY) as service,
    ):
        metadata = {"sparse_logprobs": str(arguments.sparse_logprobs).lower()}
        there = service.create_lora_training_client(arguments.base_model, RANK, SEED, user_metadata=metadata).result()
        for repeat in range(arguments.repeats + 1):
            mine, theirs = (Times(), Times()) if repeat == 0 else (in_process, served)  # the first is a warm-up
            own, cpu = time.process_time(), cpu_seconds(pid)
            drawn = step(
                mine, here, prompts, ours, *sizes, lambda client: client.save_weights_and_get_sampling_client()
            )
            mine.cpu.setdefault("in process", []).append(time.process_time() - own)
            idle = cpu_seconds(pid) - cpu
            own, cpu = time.process_time(), cpu_seconds(pid)
            again = step(
                theirs,
                there,
                prompts,
                tinker,
                *sizes,
                lambda client: client.save_weights_and_get_sampling_client().result(),
            )
            theirs.cpu.setdefault("client", []).append(time.process_time() - own)
            theirs.cpu.setdefault("server", []).append(cpu_seconds(pid) - cpu)
            print(
                f"step {repeat}: {sum(map(len, drawn))} and {sum(map(len, again))} tokens sampled, "
                f"server idle {idle:.2f} s CPU",
                flush=True,
            )
    local.stop()
    print(f"{'':18}{'in process':>12}{'server':>12}{'ratio':>8}")
    for phase in PHASES:
        a, b = statistics.median(in_process.phases[phase]), statistics.median(served.phases[phase])
        print(f"{phase:18}{a:10.3f} s{b:10.3f} s{b / a:8.2f}")
    print(f"{'step':18}{in_process.step_s:10.3f} s{served.step_s:10.3f} s{served.step_s / in_process.step_s:8.2f}")
    base, server, client = in_process.median("in process"), served.median("server"), served.median("client")
    print(
        f"CPU of a step: in process {base:.2f} s; server {server:.2f} s, client {client:.2f} s; "
        f"load {os.getloadavg()[0]:.1f}"
    )
    print(f"the server's own cost: {100 * (server - base) / server:.1f} % of its step's CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
