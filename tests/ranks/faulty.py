"""Ranks as srun starts them, with a fault in one of them.

Forks the ranks for each line on stdin, because the imports take longer than all else. A line is JSON of {folder, world,
port, fault, rank, step, arguments}. Each rank runs `llmtrain ARGUMENT...`; its output goes to `FOLDER/rank-R.log`. The
answer on stdout is a line with the ranks' exit codes and the seconds from the fault to the end of the last rank.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from llmtrain.checkpoint.safetensors_file import DurableFile
from llmtrain.cli.main import main
from llmtrain.launch import ending
from llmtrain.telemetry import about
from llmtrain.training import loop as train
from llmtrain.training.run import Run


def flip_weight(run: Run) -> None:
    """Flip a bit of a number in the middle of one unit's weights; the next step may round away the lowest bit."""
    weight = run.engine.units["blocks.1"].weight
    weight.view(torch.int32)[weight.numel() // 2].bitwise_xor_(1 << 12)


def flip_moment(run: Run) -> None:
    """Flip a bit of a number in the middle of one unit's first moments. The next step rounds it away in bf16 weights,
    not in the moment."""
    states = run.engine.units["blocks.1"].optimizer
    middle = sum(states.bounds) // 2
    moment = states.read("m", middle, middle + 1).clone()
    moment.view(torch.int32).bitwise_xor_(1 << 8)
    states.write("m", middle, moment)


def flip_shared(run: Run) -> None:
    """Flip a bit of a weight that every tensor-parallel rank holds."""
    unit = run.engine.units["blocks.1"]
    unit.weight.view(torch.int32)[unit.spec.replicated_from].bitwise_xor_(1 << 12)


def crash(run: Run) -> None:
    raise ValueError("some bug")


def hang_in_write(run: Run) -> None:
    """From the next checkpoint on, make writes hang, as on a network file system that has lost its server."""
    # The current save may still write its manifest, which is no shard file.
    run.checkpoints.wait()
    DurableFile.write = lambda *given: time.sleep(1000)  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Run], None]] = {
    "flip weight": flip_weight,
    "flip m": flip_moment,
    "flip shared": flip_shared,
    "hang": lambda run: time.sleep(1000),
    "stop": lambda run: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda run: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "lost disk": hang_in_write,
}


def be_rank(job: dict[str, Any], rank: int) -> int:
    """Run one rank of a job; return its exit code."""
    folder, world, fault, faulty, at = Path(job["folder"]), job["world"], job["fault"], job["rank"], job["step"]
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    # Set only srun's variables: the ranks must derive torch's variables themselves.
    place = {"PROCID": rank, "LOCALID": rank, "STEP_NUM_TASKS": world, "STEP_TASKS_PER_NODE": world}
    os.environ.update({f"SLURM_{name}": str(number) for name, number in place.items()})
    torch.set_num_threads(1)
    ending._skip_finalization = lambda code: None
    forward = train.forward_backward

    def harmed(run: Run, step: int) -> train.Passes:
        if run.ranks.rank == faulty and fault == "slow" and step >= at:
            # Simulate slow hardware, which slows only this rank's own computation.
            run.executor._stages[0].forward = slowed(run.executor._stages[0].forward)  # type: ignore[method-assign]
        elif run.ranks.rank == faulty and step == at:
            (folder / "harmed").write_text(str(time.time()))
            FAULTS[fault](run)
        return forward(run, step)

    train.forward_backward = harmed
    return main(job["arguments"])


def slowed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def slow(*given: object) -> torch.Tensor:
        time.sleep(0.15)
        return forward(*given)

    return forward if forward.__name__ == "slow" else slow


def forked(job: dict[str, Any], rank: int) -> int:
    """Start a rank and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        code = be_rank(job, rank)
    except SystemExit as error:
        code = int(str(error.code))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Serve jobs until stdin ends."""
    about.measured_peak = lambda device, dtype, budget=0.3: 1e9
    os.environ["MASTER_ADDR"] = "localhost"
    for line in sys.stdin:
        job = json.loads(line)
        os.environ["MASTER_PORT"] = str(job["port"])
        pids = [forked(job, rank) for rank in range(job["world"])]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        harmed = Path(job["folder"]) / "harmed"
        seconds = time.time() - float(harmed.read_text()) if harmed.exists() else 0.0
        print(json.dumps([codes, seconds]), flush=True)


if __name__ == "__main__":
    serve()
