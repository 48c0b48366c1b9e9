"""Rates and memory of training on one GPU, with compilation, recomputation and offload.

Each part runs in a process of its own with a time limit, so that one that fails does not end the others.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from llmtrain.comm.device import gpus
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe
from llmtrain_data.indexed import IndexedWriter

from tools.bench.table import machine, table, write_section

GB = 10**9
# Begins the line of a part's results.
RESULT = "result "
# Steps before the measured ones. After these come two more, the second of which is logged: a logged step waits for its
# offloaded states, and so does the one before it.
WARM_UP, UNTIL_LOGGED = 3, 2
HEADER = ("training on one GPU", "tokens/s", "MFU", "memory planned, GB", "measured, GB")


@dataclass(frozen=True, kw_only=True)
class Part:
    """A row of the table. batch: sequences of a step of each rank. world: number of ranks; of several, the first trains
    without the others. microbatch: sequences of a microbatch, None for all of the step.
    seconds: the part's time limit. profiled: whether a profile of a step is written. peer: what trains it with
    torch.compile in place of llmtrain: transformers, or plain torch."""

    name: str
    preset: str
    keys: tuple[str, ...] = ()
    sequence: int = 1024
    batch: int = 8
    seconds: int = 120
    steps: int = 10
    profiled: bool = False
    microbatch: int | None = None
    peer: Literal["", "transformers", "plain"] = ""
    world: int = 1

    @property
    def slug(self) -> str:
        """The name of its files."""
        return self.name.replace(",", "").replace(" ", "-")


COMPILED, RECOMPUTED = "train.compile=true", "activation_checkpointing=full"
# A fresh model's gradients would be clipped, and then nothing is stepped before the norm is known.
NO_CLIP = "optimizer.clip=0"
HOST = ("offload.optimizer=host",)
BREADTH_FIRST = "pipeline.schedule=breadth-first"
# Stepped before the norm is known. States of 8B that are stepped ahead do not fit 128 GiB of host memory too.
AHEAD, NOT_AHEAD = ("offload.spare=1", "offload.spare_weights=device"), "offload.spare=0"
PARTS = (
    Part(name="124M", preset="gpt2-124m", keys=(), sequence=1024, batch=64, profiled=True),
    Part(name="124M, small batch", preset="gpt2-124m", keys=(), sequence=1024, batch=16),
    Part(name="350M", preset="gpt2-355m", keys=(), sequence=1024, batch=32, profiled=True),
    Part(name="1B", preset="llama3.2-1b", keys=(), sequence=2048, batch=16, microbatch=8, profiled=True),
    Part(name="1B, small batch", preset="llama3.2-1b", keys=(), sequence=2048, batch=4),
    # As many tokens as the GPU computes while the CPU steps 3B parameters, in one microbatch: only the last one's
    # backward pass has complete gradients, which are stepped meanwhile.
    Part(name="3B", preset="llama3.2-3b", keys=(RECOMPUTED, NO_CLIP), sequence=2048, batch=32, seconds=150, steps=5),
    Part(
        name="3B, states on the host",
        preset="llama3.2-3b",
        keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD),
        sequence=2048,
        batch=32,
        seconds=200,
        steps=5,
    ),
    # Those of the first layers stay: nothing hides their steps.
    Part(
        name="3B, four fifths of the states on the host",
        preset="llama3.2-3b",
        keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD, "offload.share=0.8"),
        sequence=2048,
        batch=32,
        seconds=200,
        steps=5,
    ),
    # With several microbatches, all of which pass a layer before the next one, most gradients are complete early.
    Part(
        name="3B, states on the host, breadth-first",
        preset="llama3.2-3b",
        keys=(RECOMPUTED, NO_CLIP, *HOST, *AHEAD, BREADTH_FIRST),
        sequence=2048,
        batch=32,
        microbatch=4,
        seconds=200,
        steps=5,
    ),
    Part(
        name="8B, states on the host",
        preset="llama3-8b",
        keys=(RECOMPUTED, NO_CLIP, *HOST, NOT_AHEAD),
        sequence=2048,
        batch=4,
        seconds=300,
        steps=3,
        profiled=True,
    ),
    Part(
        name="8B, one rank of 8 without its links",
        preset="llama3-8b",
        keys=("zero.stage=3", NO_CLIP),
        sequence=2048,
        batch=4,
        microbatch=2,
        seconds=200,
        steps=5,
        profiled=True,
        world=8,
    ),
    # The largest that one H200 and 128 GiB of its host's memory hold, with 16-bit sums of gradients: 15.6B parameters.
    Part(
        name="16B, states on the host and the GPU",
        preset="llama2-13b",
        keys=(
            "model.layers=48",
            RECOMPUTED,
            NO_CLIP,
            *HOST,
            NOT_AHEAD,
            "offload.share=0.62",
            "precision.gradients=compute",
        ),
        sequence=2048,
        batch=8,
        microbatch=4,
        seconds=300,
        steps=3,
    ),
    Part(name="124M, compiled", preset="gpt2-124m", keys=(COMPILED,), sequence=1024, batch=64),
    Part(
        name="124M, small batch, compiled", preset="gpt2-124m", keys=(COMPILED,), sequence=1024, batch=16, profiled=True
    ),
    Part(name="1B, small batch, compiled", preset="llama3.2-1b", keys=(COMPILED,), sequence=2048, batch=4),
    Part(
        name="124M, small batch, plain torch and torch.compile",
        preset="gpt2-124m",
        keys=(),
        sequence=1024,
        batch=16,
        peer="plain",
    ),
    Part(
        name="124M, small batch, transformers and torch.compile",
        preset="gpt2-124m",
        keys=(),
        sequence=1024,
        batch=16,
        peer="transformers",
    ),
    Part(
        name="1B, small batch, transformers and torch.compile",
        preset="llama3.2-1b",
        keys=(),
        sequence=2048,
        batch=4,
        peer="transformers",
    ),
    Part(name="1B, recomputed", preset="llama3.2-1b", keys=(RECOMPUTED,), sequence=2048, batch=16, microbatch=8),
    Part(name="124M, microbatches of 16", preset="gpt2-124m", sequence=1024, batch=64, microbatch=16),
    # No rows of padding are copied.
    Part(name="124M, vocabulary of 50304", preset="gpt2-124m", keys=("model.vocab=50304",), sequence=1024, batch=64),
)
_tiny = partial(Part, preset="llama-1m", sequence=64, batch=2, seconds=300, steps=1)
TINY = (
    _tiny(name="tiny", profiled=True),
    _tiny(name="tiny, one rank of 8 without its links", keys=("zero.stage=3",), world=8),
    _tiny(name="tiny, states outside", keys=HOST),
    _tiny(name="tiny, transformers and torch.compile", peer="transformers"),
    _tiny(name="tiny, plain torch and torch.compile", preset="gpt2-1m", peer="plain"),
    _tiny(name="tiny, refused", keys=("zero.stage=9",)),
)


def write_recipe(part: Part, folder: Path) -> Path:
    """Write the part's recipe, with random tokens as data; return its path."""
    writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
    length = 50 * part.batch * part.world * part.sequence
    writer.add(np.random.default_rng(0).integers(0, 2000, length, np.uint16), np.array([length]))
    writer.commit()
    path, logged = folder / "bench.yaml", WARM_UP + part.steps + UNTIL_LOGGED
    path.write_text(
        f"name: bench\nmodel: {{preset: {part.preset}}}\n"
        f"data: {{path: {folder / 'set'}, sequence_length: {part.sequence}, split: [100, 0, 0]}}\n"
        f"train: {{steps: 1000, global_batch: {part.batch * part.world}, microbatch: {part.microbatch or part.batch}, "
        "eval_every: 0, compile: false}\n"
        f"checkpoint: {{async: false}}\nlogging: {{every: {logged}, dir: {folder / 'runs'}}}\n"
    )
    return path


def planned_bytes(part: Part) -> int:
    """Return the memory that the plan of a part has on one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = load_recipe(str(write_recipe(part, Path(folder))), list(part.keys))
        plan = make_plan(recipe, named_facts(recipe, Facts(world=part.world, device="cuda", ranks_per_node=part.world)))
        return max(sum(row.device.values()) for row in memory_budget(plan).rows)


def command(part: Part, recipe: Path, profiles: Path) -> list[str]:
    """Return the command that measures a part. recipe: its recipe."""
    words = [sys.executable, "-m"]
    if part.peer:
        shape = ["--sequence", str(part.sequence), "--batch", str(part.batch)]
        plain = ["--plain"] if part.peer == "plain" else []
        return [*words, "tools.bench.gpu_peer", part.preset, *shape, "--steps", str(part.steps), *plain]
    words += ["tools.bench.gpu_rank", str(recipe), *part.keys, "--steps", str(part.steps), "--world", str(part.world)]
    return words + (["--profile", str(profiles / f"{part.slug}.txt")] if part.profiled else [])


def run_part(part: Part, device: str, profiles: Path) -> dict[str, Any] | str:
    """Run a part in a process of its own; return what it measured, or the last line that it wrote if it failed. All
    that it wrote then is in `profiles`."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with tempfile.TemporaryDirectory() as folder:
        words = command(part, write_recipe(part, Path(folder)), profiles)
        log = Path(folder, "log")
        with log.open("w") as written:
            try:
                done = subprocess.run(
                    words, stdout=subprocess.PIPE, stderr=written, text=True, check=False, timeout=part.seconds,
                    env={**os.environ, **hidden},
                )  # fmt: skip
                code, said = done.returncode, done.stdout
            except subprocess.TimeoutExpired as expired:
                code, said = None, (expired.stdout or b"").decode()
        # What was measured is printed before the profile is made.
        if found := [line for line in said.splitlines() if line.startswith(RESULT)]:
            measured: dict[str, Any] = json.loads(found[-1].removeprefix(RESULT))
            return measured
        profiles.mkdir(parents=True, exist_ok=True)
        (profiles / f"{part.slug}.log").write_text(said + log.read_text())
        if code is None:
            return f"took over {part.seconds} s"
        return (log.read_text().strip().splitlines() or [f"exit code {code}"])[-1][:200]


def row(part: Part, found: dict[str, Any] | str) -> list[str]:
    """Return the table's row."""
    if isinstance(found, str):
        return [f"{part.name}: failed ({found.replace('|', '/')})", "", "", "", ""]
    mfu, planned, measured = found["mfu"], found["planned"] or 0, found["measured"] or 0
    share = "" if mfu is None else f"{mfu:.3f}"
    memory = [f"{one / GB:.2f}" if one else "" for one in (planned, measured)]
    return [part.name, f"{found['tokens_per_s']:,.0f}", share, *memory]


def section(found: Mapping[Part, dict[str, Any] | str]) -> str:
    """Return the section of the document."""
    measured = {part.name: result for part, result in found.items() if isinstance(result, dict)}
    cards = sorted({result["card"] for result in measured.values()})
    here = ", ".join((*cards, machine(["torch", "triton"])))
    text = f"## One GPU\n\n{here}. `make gpu`: the mean of the steps after three; bf16.\n\n"
    text += table(HEADER, [row(part, result) for part, result in found.items()])
    for name, one in measured.items():
        if one.get("offload"):
            text += f"\n\n{name}, what a step moved and waited for: `{json.dumps(one['offload'])}`."
    if {"3B", "3B, states on the host"} <= measured.keys():
        ratio = measured["3B, states on the host"]["tokens_per_s"] / measured["3B"]["tokens_per_s"]
        text += f"\n\n3B with its states on the host has {ratio:.2f} of the rate without offload. Goal: 0.95."
    return text


def main() -> None:
    """Run the parts, and print and write the table after each of them; exit code 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models, one of which is refused")
    parser.add_argument("--only", nargs="+", metavar="PART", help="the parts with these names, such as 124M")
    parser.add_argument("--profiles", type=Path, default=Path("runs/gpu-profiles"))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    memory = gpus()[0].memory if arguments.device == "cuda" and not arguments.tiny else None
    found = dict[Part, dict[str, Any] | str]()
    for part in TINY if arguments.tiny else PARTS:
        if arguments.only and part.name not in arguments.only:
            continue
        if memory and not part.peer and (needed := planned_bytes(part)) > memory:
            print(
                f"{part.name} needs {needed / GB:.1f} GB, and this GPU has {memory / GB:.1f} GB: left out", flush=True
            )
            continue
        found[part] = run_part(part, arguments.device, arguments.profiles)
        print(" | ".join(row(part, found[part])), flush=True)
        if arguments.write:
            write_section(arguments.write, "gpu", section(found))
    print(section(found))
    sys.exit(0 if all(isinstance(result, dict) for result in found.values()) else 1)


if __name__ == "__main__":
    main()
