"""What the benchmarks on emulated clusters share: data to train on, and what their ranks found."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llmtrain_data.indexed import IndexedWriter

from tools.netlab.lab import Lab


def write_set(prefix: Path, vocab: int, documents: int) -> None:
    """Write so many documents of 2000 random tokens: nothing is to be learnt, so that all that counts is speed."""
    writer = IndexedWriter(prefix, np.dtype(np.uint16))
    writer.add(np.random.default_rng(0).integers(0, vocab, 2000 * documents), np.full(documents, 2000))
    writer.commit()


def environment() -> dict[str, str]:
    """Return what ranks of a lab need of ours."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def answer(lab: Lab, module: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None) -> Any:
    """Run `python -m MODULE` on every rank, and return the last line of JSON that rank 0 prints. Raises SystemExit with
    the ranks' last words where one fails."""
    result = lab.run([sys.executable, "-m", *module], {**environment(), **(env or {})}, timeout)
    lines = [line for line in result.output[0] if line.startswith("{")]
    if result.returncode or not lines:
        raise SystemExit("\n".join(line for output in result.output for line in output[-20:]))
    return json.loads(lines[-1])
