"""Inputs of commands that come from strangers or were damaged. Each function returns one that leaves an input in a
folder."""

import gzip
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from llmtrain_data.indexed import IndexedWriter

Make = Callable[[Path], object]

# A Hugging Face model without weights.
HF = {"model_type": "gpt2", "n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 64}
DEEP = "[" * 200_000 + "]" * 200_000
MEBI = 2**20
# Sends SIGTERM to the process that imports torch, in the midst of the import.
STOPPED = """
import os, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
"""
# Takes the place of Slurm's command: every job is number 7.
SBATCH = "#!/bin/sh\necho 7\n"


def environment(at: Path) -> dict[str, str]:
    """Return the environment of a command in a folder: programs and modules of the folder come first, and temporary
    files, caches and settings are of its own."""
    paths = {"PATH": at / "bin", "PYTHONPATH": at / "site"}
    added = {name: os.pathsep.join(filter(None, [str(path), os.environ.get(name)])) for name, path in paths.items()}
    own = {"TMPDIR": str(at / "tmp"), "XDG_CONFIG_HOME": str(at / "config")}
    return {**os.environ, **added, **own, "COLUMNS": "200"}


def command(words: str) -> list[str]:
    return [sys.executable, "-m", "llmtrain", *shlex.split(words)]


def done(words: str) -> Make:
    """A command that has been run before."""
    return lambda at: subprocess.run(command(words), cwd=at, env=environment(at), check=True, capture_output=True)


def file(name: str, content: str | bytes, mode: int = 0o644) -> Make:
    def make(at: Path) -> None:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).write_bytes(content.encode() if isinstance(content, str) else content)
        (at / name).chmod(mode)

    return make


def more(name: str, keys: str, parent: str = "tiny.yaml") -> Make:
    """A recipe that extends another one."""
    return file(name, f"extends: {parent}\n{keys}\n")


def fifo(name: str) -> Make:
    def make(at: Path) -> None:
        (at / name).parent.mkdir(parents=True, exist_ok=True)
        (at / name).unlink(missing_ok=True)
        os.mkfifo(at / name)

    return make


def link(name: str, target: str) -> Make:
    return lambda at: (at / name).symlink_to(target)


def gone(name: str) -> Make:
    return lambda at: (at / name).unlink()


def copied(name: str, target: str) -> Make:
    """A copy of a folder."""
    return lambda at: shutil.copytree(at / name, at / target)


def hf(**changes: Any) -> Make:
    """A Hugging Face model in the folder hf, with changes to its configuration."""
    return file("hf/config.json", json.dumps({**HF, **changes}))


def long_line(name: str, begin: bytes) -> Make:
    """A line of 1 GiB in a compressed file of a MiB."""
    return lambda at: (at / name).write_bytes(gzip.compress(begin) + gzip.compress(b"x" * MEBI) * 1024)


def tokens(prefix: str, ids: Sequence[int]) -> Make:
    """A prepared set of 40 documents with the same ids."""

    def make(at: Path) -> None:
        writer = IndexedWriter(at / prefix, np.dtype(np.int32))
        for _ in range(40):
            writer.add(np.array(ids), np.array([len(ids)]))
        writer.commit()

    return make


def flipped(name: str) -> Make:
    """A bit of a file's last byte is flipped."""

    def make(at: Path) -> None:
        content = bytearray((at / name).read_bytes())
        content[-1] ^= 1
        (at / name).write_bytes(content)

    return make


def turned(name: str) -> Make:
    """The tokens of a set's file are reversed in place."""
    return lambda at: np.fromfile(at / name, np.uint16)[::-1].tofile(at / name)


def row(line: str) -> Make:
    """A line in the midst and at the end of the metrics of the run `bad`."""

    def make(at: Path) -> None:
        path = at / "runs/bad/metrics.jsonl"
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([first, line, *rest, line, ""]))

    return make


def lock(host: str, run: str = "bad") -> Make:
    """A lock that a process on another host renewed last just now."""
    holder = {"host": host, "pid": 7, "started": 1.0, "user": "me", "job": None, "cluster": None, "since": "then"}
    return file(f"runs/{run}/lock", json.dumps(holder))
