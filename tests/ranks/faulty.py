"""Ranks as srun starts them, one of which comes to harm: `faulty.py FOLDER WORLD FAULT RANK STEP ARGUMENT...`.

Forked, as importing takes longer than all else. Each runs `llmtrain ARGUMENT...`; its output goes to
`FOLDER/rank-R.log`. Prints the ranks' exit codes and the seconds from the harm to the last one's end.
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from llmtrain import start, train
from llmtrain.checkpoint.safetensors_file import DurableFile
from llmtrain.cli.main import main
from llmtrain.compose import Run
from llmtrain.telemetry import about


def flip(run: Run, name: str) -> None:
    """Flip the lowest bit of a number in the middle of one unit's states."""
    states = getattr(run.engine.units["blocks.1"], name)
    states.view(torch.int32)[states.numel() // 2].bitwise_xor_(1)


def flip_shared(run: Run) -> None:
    """Flip the lowest bit of a weight that every tensor-parallel rank holds."""
    unit = run.engine.units["blocks.1"]
    unit.weight.view(torch.int32)[unit.spec.replicated].bitwise_xor_(1)


def crash(run: Run) -> None:
    raise ValueError("some bug")


def hang_in_write(run: Run) -> None:
    """Have files be written as on a network file system whose server is gone."""
    DurableFile.write = lambda *given: time.sleep(1000)  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[Run], None]] = {
    "flip weight": lambda run: flip(run, "weight"),
    "flip m": lambda run: flip(run, "m"),
    "flip shared": flip_shared,
    "hang": lambda run: time.sleep(1000),
    "stop": lambda run: os.kill(os.getpid(), signal.SIGSTOP),
    "kill": lambda run: os.kill(os.getpid(), signal.SIGKILL),
    "crash": crash,
    "lost disk": hang_in_write,
}


def be_rank(folder: Path, world: int, fault: str, faulty: int, at: int, arguments: list[str], rank: int) -> int:
    """Be one rank; return its exit code."""
    log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    start._skip_finalization = lambda code: None  # type: ignore[assignment]
    forward = train.forward_backward

    def harmed(run: Run, step: int) -> tuple[float, float, bool]:
        if run.ranks.rank == faulty and fault == "slow" and step >= at:
            # As slow hardware is: in what it computes itself.
            run.executor._stages[0].forward = slowed(run.executor._stages[0].forward)  # type: ignore[method-assign]
        elif run.ranks.rank == faulty and step == at:
            (folder / "harmed").write_text(str(time.time()))
            FAULTS[fault](run)
        return forward(run, step)

    train.forward_backward = harmed
    return main(arguments)


def slowed(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def slow(*given: object) -> torch.Tensor:
        time.sleep(0.03)
        return forward(*given)

    return forward if forward.__name__ == "slow" else slow


def serve() -> None:
    """Start the ranks and wait for them."""
    folder, world, fault, faulty, at, *arguments = sys.argv[1:]
    about.measured_peak = lambda device, dtype: 1e9  # type: ignore[assignment]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free.getsockname()[1]))
    pids = []
    for rank in range(int(world)):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = be_rank(Path(folder), int(world), fault, int(faulty), int(at), arguments, rank)
            except SystemExit as error:
                code = int(str(error.code))
            except BaseException:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    harmed = Path(folder) / "harmed"
    seconds = time.time() - float(harmed.read_text()) if harmed.exists() else 0.0
    print(json.dumps([codes, seconds]))


if __name__ == "__main__":
    serve()
