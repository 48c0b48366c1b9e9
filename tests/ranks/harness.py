"""Trains cases on forked ranks, all cases of one number of ranks together, and reads back their results."""

import json
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import sha1
from math import isfinite
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from llmtrain.checkpoint.read import CheckpointReader

from tests.ranks.forks import environment
from tests.tiny import Curve, curve, rows, write_corpus
from tools.ports import free_ports

# 1, 2, 4, 6 and 8 ranks share the batch evenly, in 1 or 4 microbatches; they do not share the validation samples
# evenly.
BATCH, STEPS = 96, 20
RECIPE = """
model: {{family: llama, layers: 3, hidden: 32, heads: 4, kv_heads: 2, ffn: 96, vocab: 61}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: {batch}, eval_every: {steps}, eval_batches: 1}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 10}}
logging: {{every: 1, dir: {folder}/runs}}
"""


@dataclass(frozen=True)
class Case:
    """A run. keys: how states are spread and travel. base: all other keys, which its reference shares. counted: whether
    tensors that come into being are counted, which takes time. handed: whether collectives are counted. spiking:
    whether the loss spikes on one batch of the data. tensor, pipeline: degrees of those axes."""

    world: int = 1
    keys: tuple[str, ...] = ()
    base: tuple[str, ...] = ()
    _: KW_ONLY
    node: int = 0
    accumulation: int = 1
    counted: bool = False
    handed: bool = False
    spiking: bool = False
    tensor: int = 1
    pipeline: int = 1

    @property
    def reference(self) -> "Case":
        """The same run in one process."""
        return Case(base=self.base, accumulation=4)

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return f"run-{sha1(repr(self).encode()).hexdigest()[:12]}"

    def __str__(self) -> str:
        nodes = f" in nodes of {self.node}" if self.node else ""
        grid = f" as {self.tensor}x{self.pipeline}" if self.tensor * self.pipeline > 1 else ""
        return f"{self.world} ranks{grid}{nodes} x{self.accumulation}: {' '.join(self.keys + self.base) or 'as it is'}"

    def job(self, recipe: Path) -> dict[str, Any]:
        """Return the case as the worker takes it."""
        data = self.world // self.tensor // self.pipeline
        grid = [f"parallel.tensor={self.tensor}", f"parallel.pipeline={self.pipeline}"]
        microbatch = BATCH // data // self.accumulation
        overrides = [f"name={self.name}", f"train.microbatch={microbatch}", *grid, *self.base, *self.keys]
        return {
            "recipe": str(recipe),
            "overrides": overrides,
            "ranks_per_node": self.node or self.world,
            "counted": self.counted,
            "handed": self.handed,
            "spiking": self.spiking,
        }


@dataclass
class Trainer:
    """A worker that trains cases in `folder`. failed: the output of cases that did not succeed."""

    folder: Path
    failed: dict[Case, str] = field(default_factory=dict)

    def __enter__(self) -> Self:
        write_corpus(self.folder / "set", 300, 61)
        self.recipe = self.folder / "tiny.yaml"
        self.recipe.write_text(RECIPE.format(folder=self.folder, steps=STEPS, batch=BATCH))
        self._worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.communicate()

    def train(self, cases: Sequence[Case]) -> None:
        """Train the cases that have not been trained, and their references; a failed case does not stop the others."""
        by_world: dict[int, list[Case]] = defaultdict(list)
        for case in dict.fromkeys([case.reference for case in cases] + list(cases)):
            if not self._done(case) and case not in self.failed:
                by_world[case.world].append(case)
        for world, left in sorted(by_world.items()):
            while left:
                self.run(world, [case.job(self.recipe) for case in left])
                left = [case for case in left if not self._done(case)]
                if left:
                    self.failed[left.pop(0)] = self.printed(world)

    def run(self, world: int, jobs: list[dict[str, Any]]) -> list[int]:
        """Train jobs on ranks of their own and return the ranks' exit codes."""
        assert self._worker.stdin is not None
        assert self._worker.stdout is not None
        (port,) = free_ports(1)
        job = {"world": world, "port": port, "folder": str(self.folder), "cases": jobs}
        print(json.dumps(job), file=self._worker.stdin, flush=True)
        codes: list[int] = json.loads(self._worker.stdout.readline())
        return codes

    def printed(self, world: int) -> str:
        """Return the last lines that each rank of the last job printed."""
        logs = [(rank, (self.folder / f"rank-{rank}.log").read_text()[-3000:]) for rank in range(world)]
        return "\n".join(f"--- rank {rank}\n{text}" for rank, text in logs)

    def result(self, case: Case) -> "Result":
        """Return the result of a trained case."""
        assert case not in self.failed, self.failed[case]
        return Result(self.folder / "runs" / case.name)

    def forget(self, case: Case) -> None:
        """Train a case again."""
        shutil.rmtree(self.folder / "runs" / case.name, ignore_errors=True)

    def _done(self, case: Case) -> bool:
        folder = self.folder / "runs" / case.name
        return all((folder / f"rank-{rank}.json").exists() for rank in range(case.world))


@dataclass(frozen=True)
class Result:
    """A run's folder."""

    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The logged steps."""
        return [row for row in rows(self.folder) if "event" not in row]

    @property
    def curve(self) -> Curve:
        """Every loss, by kind and step."""
        return curve(self.folder)

    @property
    def norms(self) -> dict[int, float]:
        """The norm of all gradients before clipping, by step."""
        return {row["step"]: row["grad_norm"] for row in self.rows}

    def notes(self, name: str) -> list[Any]:
        """What each rank recorded of its engine after each step."""
        paths = sorted(self.folder.glob("rank-*.json"))
        return [json.loads(path.read_text())[name] for path in paths]

    def states(self, step: int = STEPS, state: str = "master") -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint."""
        with CheckpointReader(self.folder / "checkpoints" / f"step-{step:08d}") as reader:
            return {name: reader.full_tensor(name, state) for name in reader.manifest.tensors}


Trained = Callable[[Case], Result]
"""Trains a case, if it is not yet trained, and returns its result."""


def soak_except(soon: Container[Any], every: Iterable[Any]) -> list[ParameterSet]:
    """Return every case, or each tuple of parameters, as parameters of a test; those that are not in `soon` are soak
    tests."""
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in soon else pytest.mark.soak)
        for one in every
    ]


def assert_same_states(ours: "Result", theirs: "Result") -> None:
    """Check that all states at the end are equal to the bit."""
    for state in ("master", "m", "v"):
        found, expected = ours.states(state=state), theirs.states(state=state)
        assert found
        assert found.keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in found.items())


def resumed(case: Case, source: Result, step: int) -> Case:
    """Return `case` resumed from a checkpoint of another run."""
    return replace(case, keys=(*case.keys, f"checkpoint.resume={source.folder}/checkpoints/step-{step:08d}"))


def worst_difference(ours: dict[Any, Any], theirs: dict[Any, Any]) -> tuple[float, Any]:
    """Return the largest relative difference of losses or of tensors' norms, and its place."""
    assert ours.keys() == theirs.keys()
    found = {key: float(np.linalg.norm(ours[key] - value) / np.linalg.norm(value)) for key, value in theirs.items()}
    # `max` would pass over a number that is none.
    assert all(map(isfinite, found.values())), found
    return max((difference, key) for key, difference in found.items())
