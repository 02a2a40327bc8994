"""Tokens used, what they cost, an estimate before a run and a cap during it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from cookbook.errors import CheckpointError, CookbookError

TOKENS_PER_PRICE = 1_000_000
BUDGET_REMEDY = "raise it, or lower loop.steps or the batch size"


class BudgetExceeded(CookbookError):
    """A run has used more than `budget.max_usd` or `budget.max_tokens` allows."""


@dataclass
class TokenLedger:
    """Token counts of a run, by what services charge for.

    `prefill`: prompt tokens of sampling requests, once per request whatever its `num_samples`.
    `sampled`: tokens drawn. `trained`: input tokens of the datums passed to `forward` and `forward_backward`.
    """

    prefill: int = 0
    sampled: int = 0
    trained: int = 0

    def add(self, prefill: int = 0, sampled: int = 0, trained: int = 0) -> None:
        self.prefill += prefill
        self.sampled += sampled
        self.trained += trained

    @property
    def total(self) -> int:
        return self.prefill + self.sampled + self.trained

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_dict(cls, counts: Mapping[str, int]) -> Self:
        """The inverse of `as_dict`, for resume. Raises CheckpointError unless `counts` has exactly its keys."""
        if set(counts) != {"prefill", "sampled", "trained"}:
            raise CheckpointError(
                f"token ledger: a checkpoint must hold prefill, sampled and trained, not {sorted(counts)}; resume from another one"
            )
        return cls(**counts)


@dataclass
class Prices:
    """The `prices` section of a configuration: US dollars per million tokens of each kind.

    Zero where nothing is charged, as for the local backend.
    """

    prefill: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0


def cost_usd(ledger: TokenLedger, prices: Prices) -> float:
    """What the tokens of `ledger` cost, in US dollars."""
    charge = ledger.prefill * prices.prefill + ledger.sampled * prices.sampled + ledger.trained * prices.trained
    return charge / TOKENS_PER_PRICE


@dataclass
class Budget:
    """The `budget` section of a configuration: the most that a run may use; None is no limit."""

    max_usd: float | None = None
    max_tokens: int | None = None

    def check(self, ledger: TokenLedger, prices: Prices) -> None:
        """Raises BudgetExceeded once either limit is passed. Reaching a limit exactly is allowed."""
        cost = cost_usd(ledger, prices)
        if self.max_usd is not None and cost > self.max_usd:
            raise BudgetExceeded(f"budget.max_usd is {self.max_usd:g}, but this run comes to ${cost:.4g}; {BUDGET_REMEDY}")
        if self.max_tokens is not None and ledger.total > self.max_tokens:
            counts = f"{ledger.prefill:,} prefill, {ledger.sampled:,} sampled, {ledger.trained:,} trained"
            raise BudgetExceeded(
                f"budget.max_tokens is {self.max_tokens:,}, but this run comes to {ledger.total:,} tokens ({counts}); {BUDGET_REMEDY}"
            )


def estimate_rl_tokens(
    steps: int,
    groups_per_batch: int,
    group_size: int,
    max_tokens: int,
    mean_prompt_tokens: float,
    evaluations: int = 0,
    eval_examples: int = 0,
    passes: int = 1,
) -> TokenLedger:
    """An upper bound on the tokens of a single-turn GRPO or PPO run: every completion is as long as `max_tokens` allows.

    `mean_prompt_tokens` is the mean prompt length of the dataset. `evaluations` is how often the held-out set of
    `eval_examples` is sampled (once per example). `passes` is how often each datum goes through the trainer:
    one for GRPO, plus one for each further epoch, critic, reference model or forward for old logprobs.
    """
    requests = steps * groups_per_batch
    completions = requests * group_size
    eval_completions = evaluations * eval_examples
    return TokenLedger(
        prefill=round((requests + eval_completions) * mean_prompt_tokens),
        sampled=(completions + eval_completions) * max_tokens,
        trained=round(passes * completions * (mean_prompt_tokens + max_tokens)),
    )
