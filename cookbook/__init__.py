"""Post-training recipes: one loop, any compute."""

import os

# OpenMP's threads spin while they wait for one another, which on a busy machine takes the processor from those they wait
# for: a training step took 49 s instead of 4 s beside four other processes on two cores. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
