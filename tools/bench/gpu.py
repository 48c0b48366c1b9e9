"""Rates and memory of training on one GPU, with compilation, recomputation and offload.

Each part runs in a process of its own with a time limit, so that one that fails does not end the others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llmtrain_data.indexed import IndexedWriter

from tools.bench.table import machine, table, write_section

GB = 10**9
HEADER = ("training on one GPU", "tokens/s", "MFU", "memory planned, GB", "measured, GB")


@dataclass(frozen=True)
class Part:
    """A row of the table. seconds: the part's time limit. profiled: whether a profile of a step is written."""

    name: str
    preset: str
    keys: tuple[str, ...] = ()
    sequence: int = 1024
    batch: int = 8
    seconds: int = 90
    steps: int = 10
    profiled: bool = False


COMPILED, RECOMPUTED = "train.compile=true", "activation_checkpointing=full"
HOST = ("offload.optimizer=host",)
# States of 8B that are stepped ahead do not fit 128 GiB of host memory too.
NOT_AHEAD = "offload.spare=0"
# The time limits sum up to less than 15 minutes.
PARTS = (
    Part("124M", "gpt2-124m", (), 1024, 16, 60, 10, True),
    Part("124M, compiled", "gpt2-124m", (COMPILED,), 1024, 16, 90),
    Part("350M", "gpt2-355m", (), 1024, 8, 60, 10, True),
    Part("350M, compiled", "gpt2-355m", (COMPILED,), 1024, 8, 90),
    Part("1B", "llama3.2-1b", (), 2048, 4, 60, 10, True),
    Part("1B, compiled", "llama3.2-1b", (COMPILED,), 2048, 4, 90),
    Part("1B, recomputed", "llama3.2-1b", (RECOMPUTED,), 2048, 4, 60),
    Part("3B", "llama3.2-3b", (RECOMPUTED,), 2048, 4, 90, 5),
    Part("3B, states on the host", "llama3.2-3b", (RECOMPUTED, *HOST), 2048, 4, 120, 5),
    Part("8B, states on the host", "llama3-8b", (RECOMPUTED, *HOST, NOT_AHEAD), 2048, 4, 170, 3, True),
)
TINY = (
    Part("tiny", "llama-1m", (), 64, 2, 300, 1, True),
    Part("tiny, states outside", "llama-1m", HOST, 64, 2, 300, 1),
    Part("tiny, refused", "llama-1m", ("zero.stage=9",), 64, 2, 300, 1),
)


def write_recipe(part: Part, folder: Path) -> Path:
    """Write the part's recipe, with random tokens as data; return its path."""
    writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
    length = 50 * part.batch * part.sequence
    writer.add(np.random.default_rng(0).integers(0, 2000, length, np.uint16), np.array([length]))
    writer.commit()
    path = folder / "bench.yaml"
    path.write_text(
        f"name: bench\nmodel: {{preset: {part.preset}}}\n"
        f"data: {{path: {folder / 'set'}, sequence_length: {part.sequence}, split: [100, 0, 0]}}\n"
        f"train: {{steps: 1000, global_batch: {part.batch}, microbatch: {part.batch}, eval_every: 0, compile: false}}\n"
        f"checkpoint: {{async: false}}\nlogging: {{every: 1, dir: {folder / 'runs'}}}\n"
    )
    return path


def run_part(part: Part, device: str, profiles: Path) -> dict[str, float | None] | str:
    """Run a part in a process of its own; return what it measured, or the last line that it wrote if it failed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tools.bench.gpu_rank", str(write_recipe(part, Path(folder))), *part.keys]
        words += ["--steps", str(part.steps)]
        words += ["--profile", str(profiles / f"{part.name.replace(', ', '-')}.txt")] if part.profiled else []
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, timeout=part.seconds, env={**os.environ, **hidden}
            )
        except subprocess.TimeoutExpired:
            return f"took over {part.seconds} s"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:200]
    found: dict[str, float | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(part: Part, found: dict[str, float | None] | str) -> list[str]:
    """Return the table's row."""
    if isinstance(found, str):
        return [f"{part.name}: failed ({found.replace('|', '/')})", "", "", "", ""]
    mfu, planned, measured = found["mfu"], found["planned"] or 0, found["measured"] or 0
    share = "" if mfu is None else f"{mfu:.3f}"
    return [part.name, f"{found['tokens_per_s']:,.0f}", share, f"{planned / GB:.2f}", f"{measured / GB:.2f}"]


def measure(parts: Sequence[Part], device: str, profiles: Path) -> tuple[str, bool]:
    """Run all parts; return the section of the document, and whether every part succeeded."""
    found = {part.name: run_part(part, device, profiles) for part in parts}
    text = f"## One GPU\n\n{machine(['torch', 'triton'])}. `make gpu`: medians of the steps after three; bf16.\n\n"
    text += table(HEADER, [row(part, found[part.name]) for part in parts])
    without, outside = found.get("3B"), found.get("3B, states on the host")
    if isinstance(without, dict) and isinstance(outside, dict):
        ratio = (outside["tokens_per_s"] or 0) / (without["tokens_per_s"] or 1)
        text += f"\n\n3B with its states on the host has {ratio:.2f} of the rate without offload. Goal: 0.95."
    return text, all(isinstance(result, dict) for result in found.values())


def main() -> None:
    """Print the table; exit code 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models, one of which is refused")
    parser.add_argument("--profiles", type=Path, default=Path("runs/gpu-profiles"))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    text, whole = measure(TINY if arguments.tiny else PARTS, arguments.device, arguments.profiles)
    print(text)
    if arguments.write:
        write_section(arguments.write, "gpu", text)
    sys.exit(0 if whole else 1)


if __name__ == "__main__":
    main()
