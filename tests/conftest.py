"""What every test runs under."""

import os

# One thread per process, as many tests start several. Nothing is looked up on the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")
