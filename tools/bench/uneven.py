"""A pipeline over two clusters with a slow link between them and one slower stage: schedules and splits, compared to
the timeline's prediction. `python -m tools.bench.uneven --write docs/benchmarks.md`; needs root.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

from llmtrain.cluster.load import load_cluster
from llmtrain.plan.pipeline.actions import Action
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.pipeline.timeline import Durations, Timeline, simulate, simulate_message_driven
from llmtrain.plan.views.pipeline_view import show_recipe

from tools.bench.labs import answer, write_set
from tools.bench.pipeline_recorder import Done, Message, deliveries, durations, took
from tools.bench.table import machine, median_interval, table, write_section
from tools.netlab.lab import Lab
from tools.netlab.spec import of_cluster

DESCRIPTION = """
node: {{ranks: 1}}
clusters:
  - {{name: near, nodes: 2, speed: 1.0, nic: {{kind: infiniband, interface: ib0, bandwidth: {near}mbit}}}}
  - {{name: far, nodes: 1, speed: {speed}, nic: {{kind: roce, interface: roce0, bandwidth: {near}mbit}}}}
between: {{interface: eth0, bandwidth: {rate}mbit, latency: {latency}ms}}
"""
RECIPE = """
model: {{family: gpt2, layers: 12, hidden: {hidden}, heads: 4, vocab: {vocab}, tie_embeddings: false}}
data: {{path: {folder}/set, sequence_length: {tokens}}}
train: {{steps: 100000, global_batch: {microbatches}, microbatch: 1, eval_every: 0}}
parallel: {{pipeline: 3, data: 1}}
precision: {{compute: fp32}}
activation_checkpointing: none
optimizer: {{lr: 1.0e-3, schedule: constant, warmup: 0}}
logging: {{every: 1, dir: {folder}/runs}}
"""
STAGES, VOCAB = 3, 128
# Mbit/s inside a cluster and between.
NEAR, RATE = 800, 100
HEAD = """## Uneven stages

`python -m tools.bench.uneven`. {machine}. Three stages: two in one emulated cluster, and the last in another cluster
with a slower processor; {rate} Mbit/s between the clusters. A GPT of 12 layers, fp32; schedules and splits interleaved,
medians, ratios within a step or a round. "passes" are all forward and backward passes of a step; a whole step also has
the reductions over ranks and the optimizer. "shown" is the prediction of `llmtrain pipeline show --flops` before a run,
from the cluster file and the FLOPs per second of the first rank. The split auto takes the clusters' speeds from the
cluster file. "by means" and "by each" are timelines of each step with measured durations, by `simulate` or
`simulate_message_driven`. "by means" takes the mean duration of each stage's actions in the step, including a rank's
work between actions unless it waits, and the median time of messages over each link that a rank waited for. "by each"
takes the duration of each single action and message; the remaining difference is what the timeline does not model.
Parentheses contain 95% confidence intervals of medians.

An emulated processor takes a given time for each layer, and works without a pause unless its rank waits for a message,
like an accelerator with a queue of launched kernels. The ranks share this machine's cores and sleep for the rest of
that time. So the slow processor is slower by exactly its speed, and measured and shown times are comparable."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """speed: how fast the last stage's processor is, relative to the others. latency: between the clusters, in ms.
    layer: seconds of the other emulated processors for a layer's forward pass, for the backward pass of its inputs and
    for that of its weights; 0: no emulated processors; ranks use this machine's cores, the slow one for a share of the
    time. rounds: measured steps of each contestant."""

    hidden: int
    latency: int
    layer: float
    rounds: int
    speed: float
    tokens: int = 64
    microbatches: int = 24

    def __str__(self) -> str:
        size = (
            f"{self.latency} ms of latency, speed {self.speed:g}, {self.microbatches} microbatches of {self.tokens} "
            f"tokens, hidden {self.hidden}, {self.rounds} steps"
        )
        if not self.layer:
            return f"Without emulated processors; the ranks share this machine's cores ({size}):"
        return (
            f"Each rank has an emulated processor. It takes {1e3 * self.layer:g} ms ({1e3 * self.layer / self.speed:g} "
            "ms in the slow cluster) for a layer's forward pass, for the backward pass of its inputs and for that of "
            f"its weights, and for the head a time in proportion to its FLOPs ({size}):"
        )


SETTINGS = (
    Setting(hidden=64, latency=180, layer=0.006, rounds=8, speed=0.3),
    Setting(hidden=64, latency=180, layer=0.006, rounds=8, speed=0.4),
    Setting(hidden=256, latency=60, layer=0.0, rounds=20, speed=0.4),
)
# With more microbatches in flight than stages, a link's latency overlaps with the computation of other microbatches.
SCHEDULES = {
    "1f1b": ["pipeline.schedule=1f1b"],
    "message-driven": ["pipeline.schedule=message-driven"],
    "message-driven with limit 6": ["pipeline.schedule=message-driven", "pipeline.limit=6"],
}
# The schedules with goals.
GOALS = ("1f1b", "message-driven")
SPLITS = ("uniform", "auto")
BY_SPLIT = (
    "auto against uniform",
    "rate of passes",
    "as shown",
    "measured / shown (goal: 1)",
    "by means",
    "measured / by means (goal: 1)",
    "by each",
)
ALL = list(product(SCHEDULES, SPLITS))


def measure(setting: Setting) -> dict[str, dict[str, Any]]:
    """Return the measurements of `uneven_ranks` by contestant; actions by step, rank and order."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        description, recipe = folder / "clusters.yaml", folder / "bench.yaml"
        description.write_text(DESCRIPTION.format(near=NEAR, rate=RATE, speed=setting.speed, latency=setting.latency))
        recipe.write_text(RECIPE.format(folder=folder, vocab=VOCAB, **asdict(setting)))
        write_set(folder / "set", VOCAB, 100)
        contestants = {
            _name(schedule, split): [f"name=run{number}", *SCHEDULES[schedule], f"pipeline.split={split}"]
            for number, (schedule, split) in enumerate(ALL)
        }
        wanted = {
            "recipe": str(recipe),
            "cluster": str(description),
            "contestants": contestants,
            "rounds": setting.rounds,
            "busy": busy(setting),
            "layers": [setting.layer] * (STAGES - 1) + [setting.layer / setting.speed],
        }
        emulated = of_cluster(load_cluster(description))
        with Lab(replace(emulated, speeds={}) if setting.layer else emulated) as lab:
            found: dict[str, dict[str, Any]] = answer(
                lab, ["tools.bench.uneven_ranks", json.dumps(wanted)], timeout=1800
            )
        for figures in found.values():
            figures["actions"] = [[[Done(**values) for values in rank] for rank in step] for step in figures["actions"]]
        rate = f"{first_rate(setting, found[_name('1f1b', 'uniform')]):.0f}FLOP/s"
        for key, keys in contestants.items():
            view = show_recipe(str(recipe), [f"cluster={description}", *keys], None, rate)
            found[key]["shown"] = view.timeline.makespan
    return found


def first_rate(setting: Setting, figures: dict[str, Any]) -> float:
    """Return the FLOPs per second of the first rank's emulated processor, or else of its measured forward passes."""
    forward = durations((step[0] for step in figures["actions"]), took)["F"][0]
    seconds = setting.layer or forward / figures["split"][0]
    return float(figures["layer"] * setting.tokens / seconds)


@dataclass(frozen=True, kw_only=True)
class OwnDurations(Durations):
    """Durations for each single action and message. took: seconds of an action. handed: seconds until its result was
    ready to send. late: latency of its message."""

    took: Mapping[Message, float] = field(default_factory=dict)
    handed: Mapping[Message, float] = field(default_factory=dict)
    late: Mapping[Message, float] = field(default_factory=dict)

    def of(self, action: Action, stage: int, splits_backward: bool) -> float:
        """Return the duration of an action of a stage."""
        return self.took[_message(action, stage)]

    def until_handed_back(self, action: Action, stage: int) -> float:
        """Return the duration of a backward pass of a stage until it sends the inputs' gradient."""
        return self.handed[_message(action, stage)]

    def latency_of(self, action: Action, stage: int, hop: int) -> float:
        """Return the latency of the message of an action of a stage."""
        return self.late[_message(action, stage)]


def busy(setting: Setting) -> list[float]:
    """Return the seconds that a message occupies each link."""
    return [setting.tokens * setting.hidden * 4 / (rate * 1e6 / 8) for rate in (NEAR, RATE)]


def simulated_timeline(setting: Setting, schedule: str, limit: int, own: Durations) -> Timeline:
    """Simulate a schedule with durations. limit: microbatches in flight, for message-driven."""
    if schedule == "1f1b":
        return simulate(replace(make_schedule("1f1b", STAGES, 1, setting.microbatches), hands_back=True), own)
    return simulate_message_driven(STAGES, setting.microbatches, limit, own, hands_back=True)


def timeline(setting: Setting, schedule: str, figures: dict[str, Any]) -> list[float]:
    """Return the timeline's seconds of each step's passes, from the mean durations of actions and the links' rates.
    Additional measured time of messages counts as latency."""
    transfer = busy(setting)
    latency = [max(0.0, hop - own) for hop, own in zip(figures["transfers"], transfer, strict=True)]
    every = (durations(step, took) for step in figures["actions"])
    means = [Durations(known["F"], known["B"], known["W"], transfer, latency) for known in every]
    return [simulated_timeline(setting, schedule, figures["limit"], own).makespan for own in means]


def replayed(setting: Setting, schedule: str, figures: dict[str, Any]) -> list[float]:
    """Return the timeline's seconds of each step's passes, from the duration of each action and of each message that a
    rank waited for. Other messages have the median of these, but at most their measured upper bound."""
    transfer, found = busy(setting), []
    for step in figures["actions"]:
        every = deliveries(step, transfer)
        spent, handed = {}, {}
        for rank in step:
            for done, seconds in zip(rank, took(rank), strict=True):
                message = Message(done.stage, done.microbatch, done.kind)
                spent[message], handed[message] = seconds, seconds - done.after
        late = {}
        for message, delivery in every.items():
            hop = min(message.stage, delivery.to)
            seconds = delivery.seconds if delivery.waited else min(delivery.seconds, figures["transfers"][hop])
            late[message] = seconds - transfer[hop]
        own = OwnDurations([], [], [], transfer, took=spent, handed=handed, late=late)
        found.append(simulated_timeline(setting, schedule, figures["limit"], own).makespan)
    return found


def report(setting: Setting, found: dict[str, dict[str, Any]]) -> str:
    """Return the tables of one setting, and a summary."""
    means = {key: timeline(setting, key[0], found[_name(*key)]) for key in ALL}
    each = {key: replayed(setting, key[0], found[_name(*key)]) for key in ALL}
    passes, whole = ({key: found[_name(*key)][what] for key in ALL} for what in ("passes", "whole"))
    rows = [
        (
            _name(*key),
            " ".join(map(str, figures["split"])),
            " / ".join(
                f"{forward * 1e3:.0f} + {(backward + weights) * 1e3:.0f}"
                for forward, backward, weights in zip(*(known[kind] for kind in "FBW"), strict=True)
            ),
            " / ".join(f"{seconds * 1e3:.0f}" for seconds in figures["transfers"]),
            f"{median(passes[key]):.2f}",
            f"{figures['shown']:.2f}",
            f"{median(means[key]):.2f}",
            f"{median(each[key]):.2f}",
            f"{median(passes[key]) / figures['shown']:.3f}",
            f"{median(_ratios(passes[key], means[key])):.3f}",
            f"{median(_ratios(passes[key], each[key])):.3f}",
            f"{median(whole[key]):.2f}",
            f"{min(whole[key]):.2f} to {max(whole[key]):.2f}",
        )
        for key in ALL
        for figures in (found[_name(*key)],)
        for known in (durations(chain.from_iterable(figures["actions"]), took),)
    ]
    header = (
        "schedule, split",
        "layers",
        "ms forward + backward",
        "ms of a message",
        "s of passes",
        "shown",
        "by means",
        "by each",
        "passes / shown",
        "/ by means",
        "/ by each",
        "s of a step",
        "from, to",
    )
    summary = []
    for split, schedule in product(SPLITS, list(SCHEDULES)[1:]):
        ours, theirs, goal = (schedule, split), ("1f1b", split), " (goal: 1.10)" if schedule in GOALS else ""
        rates = [median(_ratios(of[theirs], of[ours])) for of in (whole, passes, means, each)]
        summary.append(
            f"With the split {split}, {schedule} is {rates[0]:.2f} times as fast as 1f1b{goal}, its passes "
            f"{rates[1]:.2f} times (timeline: {rates[2]:.2f} by means, {rates[3]:.2f} by each)."
        )
    splits = table(BY_SPLIT, [by_split(schedule, found, passes, means, each) for schedule in SCHEDULES])
    return f"{table(header, rows)}\n\n{' '.join(summary)}\n\n{splits}"


def by_split(
    schedule: str,
    found: Mapping[str, Mapping[str, Any]],
    passes: Mapping[tuple[str, str], list[float]],
    means: Mapping[tuple[str, str], list[float]],
    each: Mapping[tuple[str, str], list[float]],
) -> tuple[str, ...]:
    """Return a row of a table: the speedup of the split auto over uniform, as measured and by the timelines."""
    ours, theirs = (schedule, "auto"), (schedule, "uniform")
    measured, by_means, by_each = (_ratios(of[theirs], of[ours]) for of in (passes, means, each))
    shown = found[_name(*theirs)]["shown"] / found[_name(*ours)]["shown"]
    return (
        f"{schedule}{'' if schedule in GOALS else ' (no goal)'}",
        f"{median(measured):.3f}",
        f"{shown:.3f}",
        _quotient([ratio / shown for ratio in measured]),
        f"{median(by_means):.3f}",
        _quotient(_ratios(measured, by_means)),
        f"{median(by_each):.3f}",
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    parts = [HEAD.format(machine=machine(), rate=RATE)]
    for setting in SETTINGS:
        parts.append(f"{setting}\n\n{report(setting, measure(setting))}")
        print(parts[-1], flush=True)
    if given.write:
        write_section(given.write, "uneven", "\n\n".join(parts))


def _ratios(some: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratios of counterparts, which are of the same step or round."""
    return [one / other for one, other in zip(some, others, strict=True)]


def _quotient(values: Sequence[float]) -> str:
    """Return the median and its 95% confidence interval."""
    least, most = median_interval(values)
    return f"{median(values):.4f} ({least:.4f} to {most:.4f})"


def _message(action: Action, stage: int) -> Message:
    return Message(stage, action.microbatch, action.kind.value)


def _name(schedule: str, split: str) -> str:
    return f"{schedule}, {split}"


if __name__ == "__main__":
    main()
