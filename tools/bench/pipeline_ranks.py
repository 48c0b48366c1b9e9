"""The rank program of the pipeline benchmark: trains one GPT in stages, by llmtrain's schedules and by torch's 1F1B.

`pipeline.py` starts it on every rank of one machine, with the settings as JSON. The last line of rank 0's stdout is the
result as JSON.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks, connect, disconnect
from llmtrain.launch.stop import StopRequest
from llmtrain.model.gpt import GPT
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training.loop import train_step
from llmtrain.training.run import Run, open_run
from llmtrain_kernels.cross_entropy.op import linear_cross_entropy
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tools.bench.pace import pace, pace_run
from tools.bench.pipeline_recorder import Recorder, bubbles, durations, peak_live, record_run, step_seconds, transfer

WARMUP = 2
PEER = "torch"


@dataclass(frozen=True)
class Contestant:
    """A training method. passes: runs the forward and backward passes of a step, given its number. whole: runs the
    whole optimizer step."""

    passes: Callable[[int], object]
    whole: Callable[[int], object]
    recorder: Recorder


def rows_of(run: Run, number: int) -> Tensor:
    """Return the batch of a step, int64 `[sequences, tokens + 1]`."""
    batch = run.plan.batch.sequences
    return torch.from_numpy(run.train_data.batch(run.plan.seed, number * batch, batch))


def ours(run: Run, seconds: float) -> Contestant:
    """Return the contestant of an llmtrain run."""
    executor, recorder, microbatch = run.executor, Recorder(), run.plan.batch.microbatch
    pace_run(run, seconds)
    record_run(run, recorder)
    factor = microbatch / run.plan.batch.sequences
    return Contestant(
        lambda number: executor.train(rows_of(run, number).split(microbatch), factor),
        lambda number: train_step(run, number),
        recorder,
    )


class PlainStage(nn.Module):
    """A stage of the same blocks for torch's pipeline: maps tokens or activations to activations."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Run a microbatch."""
        if self.model.embedding is not None:
            x = self.model.embedding(x)
        for block in self.model.blocks.values():
            x = block(x, self.model.rotary)
        return x if self.model.head is None else self.model.head.norm(x)[1]


def peer(run: Run, seconds: float) -> Contestant:
    """Return the contestant of torch.distributed.pipelining's 1F1B, with the stages of `run` and fused AdamW.

    It uses the same loss kernel. The loss is already scaled, so torch's extra pass that scales gradients is off.
    """
    rank, recorder = run.ranks.rank, Recorder()
    count = run.plan.batch.sequences // run.plan.batch.microbatch
    module, last = PlainStage(plain_copy(run)), run.executor._stages[-1].layout.closes
    if seconds:
        pace(module.model, seconds, lambda: False)

    def loss_of(x: Tensor, targets: Tensor) -> Tensor:
        assert module.model.head.weight is not None
        return linear_cross_entropy(x.flatten(0, 1), module.model.head.weight, targets.flatten()) / count

    stage = PipelineStage(module, rank, run.ranks.layout.world, torch.device("cpu"))
    record_chunks(stage, "forward_one_chunk", "F", recorder)
    record_chunks(stage, "backward_one_chunk", "B", recorder)
    schedule = Schedule1F1B(stage, count, loss_of, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    def passes(number: int) -> None:
        optimizer.zero_grad()
        rows = rows_of(run, number)
        if last:
            schedule.step(target=rows[:, 1:], losses=[], return_outputs=False)
        else:
            schedule.step(*(() if rank else (rows[:, :-1],)))

    def whole(number: int) -> None:
        passes(number)
        optimizer.step()

    return Contestant(passes, whole, recorder)


def record_chunks(stage: Any, name: str, kind: str, recorder: Recorder) -> None:
    """Record every forward or backward pass of torch's stage."""
    inner = getattr(stage, name)

    def recorded(index: int, *args: Any, **kwargs: Any) -> Any:
        return recorder.act(stage.stage_index, index, kind, lambda: inner(index, *args, **kwargs))

    setattr(stage, name, recorded)


def plain_copy(run: Run) -> GPT:
    """Return a copy of this rank's part of the model. Its parameters are separate tensors, not views of a buffer."""
    model = GPT(run.plan.model, torch.device("cpu"))
    for name in set(model.blocks) - set(run.model.blocks):
        del model.blocks[name]
    for name in ("embedding", "head"):
        if getattr(run.model, name) is None:
            setattr(model, name, None)
    weights = {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}
    for path, module in model.named_modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(weights[f"{path}.{name}"]))
    return model


def our_run(name: str, settings: dict[str, Any], ranks: Ranks, stack: ExitStack) -> Run:
    """Compose a real llmtrain run, with its logging."""
    facts = Facts(world=ranks.layout.world, device="cpu", ranks_per_node=ranks.layout.world)
    recipe = load_recipe(settings["recipe"], [f"name={name}", f"pipeline.schedule={name}"])
    plan = make_plan(recipe, facts)
    run = stack.enter_context(open_run(plan, ranks.on_grid(plan.grid, plan.tiers), StopRequest()))
    run.log.start(0, [])
    run.engine.update()
    return run


def run_interleaved(contestants: dict[str, Contestant], rounds: int, whole: bool) -> None:
    """Run `rounds` interleaved steps of each contestant after the warm-up, and record them in its recorder."""
    for number in range(-WARMUP, rounds):
        for name in list(contestants) if number % 2 else list(reversed(contestants)):
            contestant = contestants[name]
            if number == 0:
                contestant.recorder.actions.clear()
                contestant.recorder.steps.clear()
                contestant.recorder.cpu.clear()
            dist.barrier()
            cpu, started = time.process_time(), time.perf_counter()
            (contestant.whole if whole else contestant.passes)(number + WARMUP)
            contestant.recorder.steps.append((started, time.perf_counter()))
            contestant.recorder.cpu.append(time.process_time() - cpu)


def figures(contestants: dict[str, Contestant], runs: dict[str, Run]) -> dict[str, dict[str, Any]]:
    """Return the measurements of all ranks' recorders, by name. Collective."""
    found = {}
    for name, contestant in contestants.items():
        recorders: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(recorders, contestant.recorder)
        schedule = runs[name].executor._schedule if name in runs else None
        found[name] = {
            "cpu": [sum(step) for step in zip(*(recorder.cpu for recorder in recorders), strict=True)],
            "seconds": step_seconds(recorders),
            "bubbles": bubbles(recorders),
            "durations": [durations(step) for step in zip(*map(Recorder.by_step, recorders), strict=True)],
            "transfer": transfer(recorders),
            "live": peak_live(recorders, "W" if schedule and schedule.splits_backward else "B"),
        }
    return found


def main(settings: dict[str, Any]) -> None:
    """Measure, and print the result."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    ranks = connect(Layout({Axis.DATA: settings["world"]}))
    with ExitStack() as stack:
        runs = {name: our_run(name, settings, ranks, stack) for name in settings["schedules"]}
        contestants = {PEER: peer(runs["1f1b"], settings["pace"])}
        contestants.update({name: ours(run, settings["pace"]) for name, run in runs.items()})
        found = {}
        for whole in (False, True):
            some = {name: contestants[name] for name in settings["whole"]} if whole else contestants
            run_interleaved(some, settings["rounds"], whole)
            found["whole" if whole else "passes"] = figures(some, runs)
    if ranks.is_main:
        print(json.dumps(found), flush=True)
    disconnect(ranks)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
