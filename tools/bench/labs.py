"""Shared code of the benchmarks on emulated clusters: training data, and running a module on every rank."""

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
    """Write a set of random tokens, `documents` documents of 2000 tokens; only speed matters here."""
    writer = IndexedWriter(prefix, np.dtype(np.uint16))
    writer.add(np.random.default_rng(0).integers(0, vocab, 2000 * documents), np.full(documents, 2000))
    writer.commit()


def environment() -> dict[str, str]:
    """Return the environment of a lab's ranks."""
    return {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def answer(lab: Lab, module: Sequence[str], env: Mapping[str, str] | None = None, timeout: float | None = None) -> Any:
    """Run `python -m MODULE` on every rank, and return the last JSON line of rank 0's output. Raises SystemExit with
    the end of the ranks' output if a rank fails."""
    result = lab.run([sys.executable, "-m", *module], {**environment(), **(env or {})}, timeout)
    lines = [line for line in result.output[0] if line.startswith("{")]
    if result.returncode or not lines:
        raise SystemExit("\n".join(line for output in result.output for line in output[-20:]))
    return json.loads(lines[-1])
