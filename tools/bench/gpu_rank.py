"""One part of the benchmark of a GPU: train a recipe for some steps without saving, and print what was measured."""

import argparse
import json
import statistics
from pathlib import Path

import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.device import is_cpu, synchronize
from llmtrain.comm.ranks import connect
from llmtrain.launch.gpus import set_gpu_variables
from llmtrain.launch.stop import StopRequest
from llmtrain.plan.facts import Facts
from llmtrain.plan.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training.attention import with_kernel
from llmtrain.training.loop import train_step
from llmtrain.training.run import open_run
from llmtrain.training.states import start_states

WARM_UP = 3


def measured(recipe: str, keys: list[str], steps: int, profile: Path | None) -> dict[str, float | None]:
    """Train `WARM_UP` and then `steps` steps; return medians of tokens/s and MFU, and planned and measured bytes.

    profile: a file for torch's table of the operators of one more step.
    """
    set_gpu_variables(1)
    ranks = connect(Layout({Axis.DATA: 1}))
    given = load_recipe(recipe, keys)
    plan = check_and_plan(given, Facts(world=1, device="cpu" if is_cpu(ranks.device) else "cuda"))
    ranks = ranks.on_grid(plan.grid, plan.tiers)
    plan, _ = with_kernel(plan, given.train.attention, ranks)
    folder = Path(plan.logging.dir) / plan.name
    with open_run(plan, ranks, StopRequest()) as run:
        start_states(run)
        run.log.start(run.progress.step, [], run.progress.tokens)
        for number in range(WARM_UP + steps):
            train_step(run, number)
        synchronize(ranks.device)
        if profile is not None:
            with torch.profiler.profile() as profiler:
                train_step(run, WARM_UP + steps)
                synchronize(ranks.device)
            order = "self_cpu_time_total" if is_cpu(ranks.device) else "self_device_time_total"
            profile.parent.mkdir(parents=True, exist_ok=True)
            profile.write_text(profiler.key_averages().table(sort_by=order, row_limit=40))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "event" not in row][WARM_UP : WARM_UP + steps]
    mfu = [row["mfu"] for row in rows if row["mfu"] is not None]
    memory = rows[-1]["memory_bytes"]
    return {
        "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
        "mfu": statistics.median(mfu) if mfu else None,
        "planned": json.loads((folder / "run.json").read_text())["planned"]["memory_bytes"],
        "measured": memory.get("peak_allocated", memory["peak_rss"]),
    }


def main() -> None:
    """Measure, and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(measured(arguments.recipe, arguments.keys, arguments.steps, arguments.profile)), flush=True)


if __name__ == "__main__":
    main()
