"""What every test runs under."""

import os
import sys
from pathlib import Path

# One thread per process, as many tests start several. Nothing is looked up on the network.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_SILENT", "true")

# For `tiny`; at the end, so that it hides no package.
sys.path.append(str(Path(__file__).resolve().parent))
