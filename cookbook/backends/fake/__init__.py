"""The fake backend: a tiny deterministic bigram model that learns and samples, without torch."""

from cookbook.backends.fake.clients import (
    FAKE_CAPABILITIES,
    FakeSamplingClient,
    FakeService,
    FakeTrainingClient,
)

__all__ = ["FAKE_CAPABILITIES", "FakeSamplingClient", "FakeService", "FakeTrainingClient"]
