"""A user's working folder, with a Slurm of this machine to submit to."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtrain.launch.slurm.queue import ENDED

from tests.tiny import Curve, curve
from tools.slurmlab.lab import Lab

# Tensor x pipeline parallel on 2 nodes x 2 ranks. The split is given, because measured speeds may differ between runs.
# Paths are relative to the folder that the user submits from.
RECIPE = """
model: {{family: llama, layers: 2, hidden: 32, heads: 4, kv_heads: 2, vocab: 64}}
data: {{path: set, sequence_length: 16}}
train: {{steps: {steps}, global_batch: 8, microbatch: 2, eval_every: 30}}
parallel: {{tensor: 2, pipeline: 2, data: 1}}
pipeline: {{split: [1, 1]}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 25}}
logging: {{every: 1, dir: runs}}
"""
# Only in the environment of the process that submits.
SECRET = "1f00dfeed1f00dfeed1f00dfeed1f00dfeed1f00"


@dataclass(frozen=True)
class Desk:
    """A user's folder with a recipe and a site's profile, and a Slurm to submit to."""

    folder: Path
    lab: Lab

    def succeed(self, *command: str) -> str:
        """Return the output of a command, which must succeed."""
        done = self.execute(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def llmtrain(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the llmtrain command line."""
        return self.execute(sys.executable, "-m", "llmtrain", *arguments)

    def execute(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command so that Slurm's commands find the lab."""
        environment = {**os.environ, **self.lab.environment, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": SECRET}
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def write(self, name: str, steps: int, site: str = "ranks_per_node: 2\n") -> None:
        """Write a recipe and the site's profile."""
        (self.folder / f"{name}.yaml").write_text(RECIPE.format(steps=steps))
        (self.folder / "site.yaml").write_text(site)

    def submit(self, name: str, *arguments: str) -> list[str]:
        """Submit a recipe and return the jobs' numbers."""
        done = self.llmtrain("submit", f"{name}.yaml", "--site", "site.yaml", *arguments)
        assert done.returncode == 0, done.stderr
        return [line.split()[1] for line in done.stdout.splitlines()]

    def run(self, name: str) -> Path:
        """Return a run's folder."""
        return self.folder / "runs" / name

    def log(self, name: str, number: str) -> str:
        """Return a job's log so far."""
        path = self.run(name) / "slurm" / f"{number}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_step(self, name: str, step: int) -> None:
        """Wait until a run has logged a step."""
        self.wait(lambda: any(at >= step for kind, at in self.curve(name) if kind == "step"), f"step {step} of {name}")

    def wait_for_state(self, number: str, *states: str, seconds: float = 150) -> None:
        """Wait until a job is in one of these states."""
        query = ("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T")

        def there() -> bool:
            state = self.succeed(*query).strip()
            assert state in states or state not in ENDED, f"job {number} is {state}\n{self._logs()}"
            return state in states

        self.wait(there, f"job {number} to be {' or '.join(states)}", seconds)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 150) -> None:
        """Wait until a condition holds; fail after a time limit."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"waited {seconds} s for {what}\n{self._logs()}"
            time.sleep(0.1)

    def curve(self, name: str) -> Curve:
        """Return every loss of a run, by kind and step."""
        return curve(self.run(name))

    def _logs(self) -> str:
        logs = sorted(self.folder.glob("runs/*/slurm/*.log"))
        return "\n".join(f"--- {log.parent.parent.name}/{log.name}\n{log.read_text()[-2000:]}" for log in logs)
