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
from pathlib import Path
from typing import Any

import numpy as np
from llmtrain.comm.device import gpus
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe
from llmtrain_data.indexed import IndexedWriter

from tools.bench.gpu_parts import OFFLOAD, PARTS, TINY, Part
from tools.bench.table import machine, table, write_section

GB = 10**9
# Begins the line of a part's results.
RESULT = "result "
# Steps before the measured ones. After these come two more, the second of which is logged: a logged step waits for its
# offloaded states, and so does the one before it.
WARM_UP, UNTIL_LOGGED = 3, 2
HEADER = ("training on one GPU", "tokens/s", "MFU", "memory planned, GB", "measured, GB")


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


def section(found: Mapping[Part, dict[str, Any] | str], command: str, title: str) -> str:
    """Return the section of the document. command: what measures all of its parts."""
    measured = {part.name: result for part, result in found.items() if isinstance(result, dict)}
    cards = sorted({result["card"] for result in measured.values()})
    here = ", ".join((*cards, machine(["torch", "triton"])))
    text = f"{title}\n\n{here}. `make {command}`: the mean of the steps after three; bf16.\n\n"
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
    parser.add_argument("--offload", action="store_true", help="the parts with states on the host")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models, one of which is refused")
    parser.add_argument("--only", nargs="+", metavar="PART", help="the parts with these names, such as 124M")
    parser.add_argument("--profiles", type=Path, default=Path("runs/gpu-profiles"))
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    memory = gpus()[0].memory if arguments.device == "cuda" and not arguments.tiny else None
    found = dict[Part, dict[str, Any] | str]()
    command, title = ("gpu-offload", "### States on the host") if arguments.offload else ("gpu", "## One GPU")
    for part in TINY if arguments.tiny else OFFLOAD if arguments.offload else PARTS:
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
            write_section(arguments.write, command, section(found, command, title))
    print(section(found, command, title))
    sys.exit(0 if all(isinstance(result, dict) for result in found.values()) else 1)


if __name__ == "__main__":
    main()
