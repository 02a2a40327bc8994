"""Token counts of a run, their cost, and the budget that stops it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Self

from cookbook.core.errors import CheckpointError, CookbookError

TOKENS_PER_PRICE = 1_000_000
BUDGET_REMEDY = "raise it, or lower loop.steps or the batch size"


class BudgetExceeded(CookbookError):
    """A run has used more than `budget.max_usd` or `budget.max_tokens` allows."""


@dataclass
class TokenLedger:
    """Token counts of a run, in the categories that services charge for.

    `prefill`: prompt tokens of sampling requests, once per request whatever its `num_samples`.
    `sampled`: generated tokens. `trained`: input tokens of the datums passed to `forward` and `forward_backward`.
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
                f"token ledger: a checkpoint must hold prefill, sampled and trained, not {sorted(counts)}; "
                "resume from another checkpoint"
            )
        return cls(**counts)


@dataclass
class Prices:
    """The `prices` section of a configuration: US dollars per million tokens. Zero for what is free."""

    prefill: float = 0.0
    sampled: float = 0.0
    trained: float = 0.0


def cost_usd(ledger: TokenLedger, prices: Prices) -> float:
    """The cost of the tokens in `ledger`, in US dollars."""
    charge = ledger.prefill * prices.prefill + ledger.sampled * prices.sampled + ledger.trained * prices.trained
    return charge / TOKENS_PER_PRICE


@dataclass
class Budget:
    """The `budget` section of a configuration: upper limits of a run; None is no limit."""

    max_usd: float | None = None
    max_tokens: int | None = None

    def check(self, ledger: TokenLedger, prices: Prices) -> None:
        """Raises BudgetExceeded if a limit is exceeded. Reaching a limit exactly is allowed."""
        cost = cost_usd(ledger, prices)
        if self.max_usd is not None and cost > self.max_usd:
            raise BudgetExceeded(f"budget.max_usd is {self.max_usd:g}, but this run costs ${cost:.4g}; {BUDGET_REMEDY}")
        if self.max_tokens is not None and ledger.total > self.max_tokens:
            counts = f"{ledger.prefill:,} prefill, {ledger.sampled:,} sampled, {ledger.trained:,} trained"
            raise BudgetExceeded(
                f"budget.max_tokens is {self.max_tokens:,}, but this run uses {ledger.total:,} tokens ({counts}); "
                f"{BUDGET_REMEDY}"
            )
