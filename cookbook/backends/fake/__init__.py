"""A deterministic backend that needs no torch: a tiny bigram model that truly learns and truly samples, for driving loops in tests."""

from cookbook.backends.fake.clients import (
    FAKE_CAPABILITIES,
    FakeSamplingClient,
    FakeService,
    FakeTrainingClient,
)

__all__ = ["FAKE_CAPABILITIES", "FakeSamplingClient", "FakeService", "FakeTrainingClient"]
