"""Helpers of tests that train tiny models: data to learn from, a disk to fill, and the curve of a run."""

import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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


def write_run(folder: Path, recipe: str) -> Path:
    """Write a recipe, in which {folder} stands for `folder`, and the set that it trains on. Return `folder`."""
    write_corpus(folder / "set", 200)
    (folder / "tiny.yaml").write_text(recipe.format(folder=folder))
    return folder


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


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Let no file grow beyond `most` bytes, as on a full disk. It is only for the call that is tested, because pytest's
    own output may go to a file too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def rows(run: Path) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_step(run: Path) -> int:
    """Return the last step in a run's metrics so far, whose last line may be incomplete."""
    try:
        steps = re.findall(r'"step": (\d+)', (run / "metrics.jsonl").read_text())
    except FileNotFoundError:
        return 0
    return int(steps[-1]) if steps else 0


def curve(run: Path) -> Curve:
    """Return every loss that a run has logged, by kind and step; a step that is logged twice is an error."""
    found = Curve()
    for row in rows(run) if (run / "metrics.jsonl").exists() else []:
        key = (row.get("event", "step"), row["step"])
        if key[0] != "end":
            assert key not in found
            found[key] = row["loss"]
    return found
