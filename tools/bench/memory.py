"""Planned against measured memory of training processes on CPUs, over models 10 times apart.

`python -m tools.bench.memory --write docs/benchmarks.md`. It measures no times, so the machine may have other work.

glibc's allocator keeps freed blocks below a threshold that grows up to 32 MiB, and gives no guarantee about gaps
between them. MALLOC_MMAP_THRESHOLD_ holds the threshold at 128 KiB, its initial value, so that larger tensors go back
to the system when they are freed. `--default-allocator` leaves it as it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.model.tensors import parameter_count
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.recipe.load import load_recipe

from tools.bench.labs import write_set
from tools.bench.table import machine, table, write_section
from tools.ports import free_ports

RECIPE = """
model: {{family: llama, layers: 8, hidden: 384, heads: 6, vocab: 8192, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: 256}}
train: {{steps: 3, global_batch: 4, microbatch: 1, eval_every: 3, eval_batches: 1}}
optimizer: {{warmup: 1}}
logging: {{dir: {folder}/runs}}
"""
MODELS: Mapping[str, tuple[str, ...]] = {
    "small": (),
    "medium": ("model.layers=10", "model.hidden=640", "model.heads=10", "model.vocab=12288"),
    "large": ("model.layers=14", "model.hidden=1024", "model.heads=16", "model.vocab=16384"),
}
CASES: Mapping[str, tuple[int, tuple[str, ...]]] = {
    "1 rank": (1, ()),
    "1 rank, bf16": (1, ("precision.compute=bf16",)),
    "1 rank, recomputation": (1, ("activation_checkpointing=full",)),
    "stage 0": (2, ()),
    "stage 3": (2, ("zero.stage=3",)),
    "stage 3, quantized": (2, ("zero.stage=3", "quantize.weights=int8", "quantize.gradients=int4")),
    "tensor 2": (2, ("parallel.tensor=2",)),
    "pipeline 2": (2, ("parallel.pipeline=2",)),
}
FIXED = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_ARENA_MAX": "1"}
GOAL = 64 << 20


def trained(folder: Path, world: int, overrides: Sequence[str], fixed: bool) -> list[dict[str, Any]]:
    """Return what each rank printed."""
    (port,) = free_ports(1)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    env |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "WORLD_SIZE": str(world)} | (FIXED if fixed else {})
    command = [sys.executable, "-m", "tools.bench.memory_rank", str(folder / "bench.yaml"), *overrides]
    ranks = [
        subprocess.Popen(
            command, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed with {' '.join(overrides)}")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def compared(name: str, fixed: bool, verbose: bool) -> tuple[list[list[str]], int]:
    """Return a row for each model with a case's strategy, and the spread of measured minus planned bytes over them."""
    world, keys = CASES[name]
    rows, left = [], []
    for model, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as where:
            folder = Path(where)
            write_set(folder / "set", 8192, 20)
            (folder / "bench.yaml").write_text(RECIPE.format(folder=folder))
            recipe = load_recipe(str(folder / "bench.yaml"), [*shape])
            parameters = parameter_count(model_shape(recipe, Facts(world=1, device="cpu")))
            found = trained(folder, world, (*shape, *keys), fixed)
        # The rank whose plan is furthest from what it took.
        for rank, one in enumerate(found):
            planned = sum(size for purpose, size in one["planned"].items() if purpose != "context")
            left.append(one["measured"] - planned)
            figures = (planned, one["measured"], left[-1])
            rows.append([f"{name}, rank {rank}", f"{parameters / 1e6:.0f}M", *(f"{n / 2**20:.1f}" for n in figures)])
            if verbose:
                print(model, *rows[-1], {key: round(size / 2**20, 1) for key, size in one["planned"].items()})
                print({key: round(size / 2**20, 1) for key, size in one["seen"].items() if "Rss" in key or "Vm" in key})
    return rows, max(left) - min(left)


def text(rows: Sequence[Sequence[str]], spreads: Sequence[Sequence[str]]) -> str:
    """Return the section's text."""
    return "\n\n".join(
        (
            "## Memory: planned and measured",
            f"`python -m tools.bench.memory`. {machine()}. Peak of a process's own memory in three steps, an "
            "evaluation and a checkpoint, without mapped files, and with glibc's threshold for blocks of their own at "
            "128 KiB; planned without the process's context. MiB. The difference is Python and torch before the first "
            "tensor, minus temporaries that are not there at the peak.",
            table(("strategy", "parameters", "planned", "measured", "difference"), rows),
            table(("strategy", "spread of the difference over models", "within 64 MiB"), spreads),
        )
    )


def main() -> None:
    """Measure, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", help="document whose section to replace")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--default-allocator", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    given = parser.parse_args()
    rows, spreads = [], []
    for name in given.only:
        found, spread = compared(name, not given.default_allocator, given.verbose)
        rows += found
        spreads.append([name, f"{spread / 2**20:.1f}", "yes" if spread <= GOAL else "no"])
        print(spreads[-1], flush=True)
    markdown = text(rows, spreads)
    print(markdown)
    if given.write:
        write_section(given.write, "memory", markdown)


if __name__ == "__main__":
    main()
