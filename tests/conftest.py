"""Settings of every test."""

import os

from hypothesis import settings

# One thread per process, because many tests start several processes. No test uses the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")

# No test is timed: other work on the machine would fail it.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
