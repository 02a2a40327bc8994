"""The contract of backends: ONE suite that every backend must pass, and that loops rely on.

A backend's test file subclasses `BackendContract` under a name that starts with `Test` and says how to make a service:

    class TestMyBackend(BackendContract):
        base_model = "tiny"

        @classmethod
        def make_service(cls, state_dir: Path) -> ServiceClient:
            return MyService(state_dir=str(state_dir))

What a backend cannot do, by its `Capabilities`, is skipped or must be refused. Nothing here knows a tokenizer's
details.
"""

from tests.contract.losses import LossContract
from tests.contract.sampling import SamplingContract
from tests.contract.sessions import SessionContract
from tests.contract.training import TrainingContract


class BackendContract(TrainingContract, LossContract, SamplingContract, SessionContract):
    """The whole contract. A subclass sets `base_model`, `make_service` and, if needed, the numbers of the harness."""
