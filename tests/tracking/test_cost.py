"""Token ledger, cost and budget."""

import pytest

from cookbook.core.errors import CheckpointError
from cookbook.tracking.cost import Budget, BudgetExceeded, Prices, TokenLedger, cost_usd

PRICES = Prices(prefill=1.0, sampled=3.0, trained=5.0)


def test_cost_is_per_million_tokens_of_each_kind():
    ledger = TokenLedger()
    ledger.add(prefill=1_000_000, sampled=500_000)
    ledger.add(sampled=500_000, trained=200_000)
    assert ledger.total == 2_200_000
    assert cost_usd(ledger, PRICES) == pytest.approx(1.0 + 3.0 + 1.0)
    assert cost_usd(ledger, Prices()) == 0


def test_ledger_survives_a_checkpoint():
    ledger = TokenLedger(1, 2, 3)
    assert TokenLedger.from_dict(ledger.as_dict()) == ledger
    with pytest.raises(CheckpointError, match="prefill, sampled and trained"):
        TokenLedger.from_dict({"prefill": 1})


def test_budget_allows_its_limit_and_nothing_beyond():
    ledger = TokenLedger(prefill=10, sampled=20, trained=30)
    Budget().check(ledger, PRICES)
    Budget(max_tokens=60, max_usd=cost_usd(ledger, PRICES)).check(ledger, PRICES)
    with pytest.raises(
        BudgetExceeded,
        match=r"budget\.max_tokens is 59, but this run uses 60 tokens \(10 prefill, 20 sampled, 30 trained\)",
    ):
        Budget(max_tokens=59).check(ledger, PRICES)
    with pytest.raises(BudgetExceeded, match=r"budget\.max_usd is 0\.0001, but this run costs \$0\.00022"):
        Budget(max_usd=0.0001).check(ledger, PRICES)
