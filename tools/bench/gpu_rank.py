"""One part of the benchmark of a GPU: train a recipe for some steps without saving, and print what was measured.

It may train as one rank of several, over a process group that moves nothing: that shows a rank's memory and its rate
without the time of its links. What it computes has no meaning then.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.device import device_of, is_cpu, synchronize
from llmtrain.comm.ranks import Ranks, connect
from llmtrain.launch.gpus import set_gpu_variables
from llmtrain.launch.stop import StopRequest
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.start.run import open_choices
from llmtrain.training.attention import take_planned
from llmtrain.training.collector import freeze
from llmtrain.training.loop import train_step
from llmtrain.training.rank import as_measured
from llmtrain.training.run import Run, open_run
from llmtrain.training.states import start_states
from torch.testing._internal.distributed.fake_pg import FakeStore

from tools.bench.gpu import RESULT, UNTIL_LOGGED, WARM_UP

# Steps of a profile.
PROFILED = 3


def measured(recipe: str, keys: list[str], steps: int, profile: Path | None, world: int = 1) -> None:
    """Train `WARM_UP` and then `steps` steps; print the rate of these for each rank, and planned and measured bytes.

    profile: a file for torch's table of the operators of some more steps. world: number of ranks, of which this is one.
    """
    set_gpu_variables(1)
    ranks = connect(Layout({Axis.DATA: 1})) if world == 1 else one_of(world)
    given = load_recipe(recipe, keys)
    # CPUs of one node would share memory, which the other ranks do not have.
    on_cpu = is_cpu(ranks.device)
    facts = Facts(world=world, device="cpu" if on_cpu else "cuda", ranks_per_node=1 if on_cpu else world)
    plan = check_and_plan(given, facts)
    ranks = ranks.on_grid(plan.grid, plan.tiers)
    plan, _ = as_measured(open_choices(given), plan, facts, ranks)
    take_planned(plan)
    with open_run(plan, ranks, StopRequest()) as run:
        start_states(run)
        run.log.start(run.progress.step, [], run.progress.tokens)
        for number in range(WARM_UP):
            train_step(run, number)
        freeze()
        synchronize(ranks.device)
        if not is_cpu(ranks.device):
            # torch.compile and the first choice of kernels take memory once.
            torch.cuda.reset_peak_memory_stats(ranks.device)
        begin = time.perf_counter()
        for number in range(WARM_UP, WARM_UP + steps):
            train_step(run, number)
        synchronize(ranks.device)
        rate = plan.batch.tokens / world * steps / (time.perf_counter() - begin)
        for number in range(WARM_UP + steps, WARM_UP + steps + UNTIL_LOGGED):
            train_step(run, number)
        print(RESULT + json.dumps(result(Path(plan.logging.dir) / plan.name, rate, ranks.device)), flush=True)
        if profile is not None:
            write_profile(profile, run, WARM_UP + steps + UNTIL_LOGGED)


def one_of(world: int) -> Ranks:
    """Return the first of `world` ranks, whose collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    return Ranks(0, 0, Layout({Axis.DATA: world}), device_of(0))


def result(folder: Path, rate: float, device: torch.device) -> dict[str, Any]:
    """Return what a run in a folder has measured. rate: tokens/s of its steps, what is between them included."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = [row for row in map(json.loads, lines) if "event" not in row][-1]
    return {
        "card": torch.cuda.get_device_name(device) if not is_cpu(device) else "no GPU",
        "tokens_per_s": rate,
        "mfu": None if last["mfu"] is None else last["mfu"] * rate / last["tokens_per_s"],
        "planned": json.loads((folder / "run.json").read_text())["planned"]["memory_bytes"],
        "measured": last["memory_bytes"].get("peak_allocated", last["memory_bytes"]["peak_rss"]),
        "offload": last.get("offload"),
    }


def write_profile(path: Path, run: Run, step: int) -> None:
    """Write torch's table of the operators of some steps, and beside it the trace for a viewer such as Perfetto."""
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=PROFILED)
    with torch.profiler.profile(schedule=schedule) as profiler:
        for number in range(step, step + 1 + PROFILED):
            train_step(run, number)
            if number < step + PROFILED:
                profiler.step()
        # A further step of the profiler would drop what it has.
        synchronize(run.ranks.device)
    order = "self_cpu_time_total" if is_cpu(run.ranks.device) else "self_device_time_total"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(profiler.key_averages().table(sort_by=order, row_limit=40))
    profiler.export_chrome_trace(str(path.with_suffix(".json.gz")))


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--world", type=int, default=1)
    arguments = parser.parse_args()
    measured(arguments.recipe, arguments.keys, arguments.steps, arguments.profile, arguments.world)


if __name__ == "__main__":
    main()
