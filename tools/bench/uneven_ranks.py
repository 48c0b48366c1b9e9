"""The rank program of the benchmark of uneven stages: trains one GPT with each schedule and split, interleaved.

`uneven.py` starts it on every rank of an emulated cluster, with the settings as JSON. The last line of rank 0's stdout
is the result as JSON.
"""

import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis
from llmtrain.cluster.load import load_cluster
from llmtrain.comm.ranks import Ranks, connect, disconnect
from llmtrain.launch.stop import StopRequest
from llmtrain.plan.facts import Facts
from llmtrain.plan.pipeline.layer_split import stage_costs
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.training.loop import train_step
from llmtrain.training.run import Run, open_run

from tools.bench.pipeline_recorder import Recorder, record_run, step_seconds, transfers
from tools.bench.processor import emulate

WARMUP = 1


class Contestant:
    """An llmtrain run with recorded actions. layer: seconds of a layer's forward pass on this rank's emulated
    processor, 0 without one. whole: seconds of its steps, including the optimizer."""

    def __init__(self, run: Run, layer: float) -> None:
        self.run, self.recorder, self.whole = run, Recorder(), list[float]()
        plan = run.plan
        split, stage = plan.pipeline.layers, run.ranks.layout.coordinate(run.ranks.rank, Axis.PIPELINE)
        self._costs = stage_costs(plan.model, plan.batch.sequence_length)
        if layer:
            # Spread the head's work over the layers of its stage.
            emulate(run, layer * self._costs.of(split)[stage] / (self._costs.layer * split[stage]))
        record_run(run, self.recorder)
        executor, train = run.executor, run.executor.train

        def passes(*given: Any) -> torch.Tensor:
            started = time.perf_counter()
            losses = train(*given)
            self.recorder.steps.append((started, time.perf_counter()))
            return losses

        executor.train = passes  # type: ignore[method-assign, assignment]

    def step(self, number: int) -> None:
        """Run an optimizer step, given its number."""
        started = time.perf_counter()
        train_step(self.run, number)
        self.whole.append(time.perf_counter() - started)

    def forget(self) -> None:
        """Discard the records of earlier steps."""
        self.recorder.actions.clear()
        self.recorder.steps.clear()
        self.whole.clear()

    def figures(self, busy: list[float]) -> dict[str, Any]:
        """Return the measurements of all ranks. busy: seconds that a message occupies each link. Collective."""
        recorders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(recorders, self.recorder)
        pipeline = self.run.plan.pipeline
        return {
            "split": list(pipeline.layers),
            "limit": pipeline.limit,
            # FLOPs of a token's forward pass through a layer.
            "layer": self._costs.layer / 3,
            "whole": self.whole,
            "passes": step_seconds(recorders),
            "transfers": transfers(recorders, busy),
            "actions": [
                [[asdict(done) for done in rank] for rank in step]
                for step in zip(*map(Recorder.by_step, recorders), strict=True)
            ],
        }


def our_run(name: str, recipe: Recipe, facts: Facts, ranks: Ranks, stack: ExitStack) -> Run:
    """Compose a real llmtrain run, with its logging."""
    run = stack.enter_context(open_run(make_plan(recipe, facts), ranks, StopRequest()))
    run.log.start(0, [])
    run.engine.update()
    return run


def main(settings: dict[str, Any]) -> None:
    """Measure, and print the result."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    cluster = load_cluster(settings["cluster"])
    facts = Facts(
        world=int(os.environ["WORLD_SIZE"]),
        device="cpu",
        ranks_per_node=int(os.environ["LOCAL_WORLD_SIZE"]),
        cluster=cluster,
    )
    recipes = {name: load_recipe(settings["recipe"], keys) for name, keys in settings["contestants"].items()}
    parallel = next(iter(recipes.values())).parallel
    topology = facts.topology(parallel)
    ranks = connect(topology.grid, topology.tiers, cluster=cluster)
    with ExitStack() as stack:
        layer = settings["layers"][ranks.layout.coordinate(ranks.rank, Axis.PIPELINE)]
        runs = {name: our_run(name, recipe, facts, ranks, stack) for name, recipe in recipes.items()}
        contestants = {name: Contestant(run, layer) for name, run in runs.items()}
        for number in range(WARMUP + settings["rounds"]):
            for name in list(contestants) if number % 2 else list(reversed(contestants)):
                if number == WARMUP:
                    contestants[name].forget()
                dist.barrier()
                contestants[name].step(number)
        found = {name: contestant.figures(settings["busy"]) for name, contestant in contestants.items()}
    if ranks.is_main:
        print(json.dumps(found), flush=True)
    disconnect(ranks)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
