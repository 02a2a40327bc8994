"""A process that forgets to stop its service still ends cleanly."""

import subprocess
import sys

SCRIPT = """
import numpy as np
from cookbook.backends.local import LocalService
from cookbook.core.types import AdamParams, Datum, ModelInput

client = LocalService().create_lora_training_client("tiny", rank=8, seed=0)
data = [Datum(ModelInput.from_ints(range(10, 200)), {"target_tokens": np.arange(11, 201)})] * 8
for _ in range(4):
    client.forward_backward(data, "cross_entropy")
    client.optim_step(AdamParams())
"""


def test_work_in_flight_at_the_end_of_the_process_does_not_abort_it():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
