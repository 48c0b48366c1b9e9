"""Helpers of tests that train tiny models: data to learn from, a disk to fill, and the curve of a run."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from llmtrain_data.indexed import IndexedWriter

Curve = dict[tuple[str, int], float]


def write_corpus(prefix: Path, documents: int, vocab: int = 64) -> None:
    """Write a small set whose tokens follow a pattern that a model can learn."""
    steps = np.random.default_rng(0).integers(1, 4, size=(documents, 100))
    writer = IndexedWriter(prefix, np.dtype(np.uint16))
    for document in np.cumsum(steps, axis=1) % vocab:
        writer.add(document, np.array([100]))
    writer.commit()


@contextmanager
def small_disk(folder: Path, room: str) -> Iterator[Path]:
    """Mount a file system of the given size on a folder; skip the test if that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={room}", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield folder
    finally:
        # Unmount it even if a file on it is still open.
        subprocess.run(["umount", "-l", str(folder)], check=True)


def curve(run: Path) -> Curve:
    """Return every loss that a run has logged, by kind and step; a step that is logged twice is an error."""
    path, found = run / "metrics.jsonl", Curve()
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        key = (row.get("event", "step"), row["step"])
        if key[0] != "end":
            assert key not in found
            found[key] = row["loss"]
    return found
