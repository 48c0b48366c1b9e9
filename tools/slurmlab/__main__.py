"""Run a real Slurm on this machine, for experiments and tests. Needs root and Debian's slurm-wlm and munge.

python -m tools.slurmlab run -- sbatch --wait job.sh    # for one command
eval "$(python -m tools.slurmlab up)"                   # until `python -m tools.slurmlab down`
"""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from llmtrain.errors import BadInputError, RunFailedError

from tools.slurmlab.files import Spec
from tools.slurmlab.lab import Lab, bring_up, environment, stop

FOLDER = Path("/run/slurmlab")


def main() -> int:
    """Run the command line; return the exit code."""
    arguments = _parse()
    try:
        if arguments.action == "run":
            return _run(_spec(arguments), arguments.command)
        if arguments.action == "up":
            bring_up(_spec(arguments), arguments.dir)
            print("\n".join(f"export {name}={value}" for name, value in environment(arguments.dir).items()))
        else:
            print("stopped" if stop(arguments.dir) else "no lab was running", file=sys.stderr)
    except BadInputError as error:
        print(f"slurmlab: {error}", file=sys.stderr)
        return 2
    except RunFailedError as error:
        print(f"slurmlab: {error}", file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tools.slurmlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    up = actions.add_parser("up", help="start a Slurm; print the environment variables for its commands")
    down = actions.add_parser("down", help="stop it and all its jobs")
    run = actions.add_parser("run", help="start a Slurm, run a command that uses it, stop it")
    for action in (up, run):
        action.add_argument("--nodes", type=int, default=2)
        action.add_argument("--cpus", type=int, default=8, help="configured CPUs of each node")
        action.add_argument("--kill-wait", type=int, default=30, metavar="SECONDS", help="time from SIGTERM to SIGKILL")
    for action in (up, down):
        action.add_argument("--dir", type=Path, default=FOLDER, help="folder of the lab")
    run.add_argument("command", nargs=argparse.REMAINDER, help="after --: the command")
    arguments = parser.parse_args()
    if arguments.action == "run":
        arguments.command = [word for place, word in enumerate(arguments.command) if (place, word) != (0, "--")]
        if not arguments.command:
            parser.error("the command is missing; put it after --")
    return arguments


def _spec(arguments: argparse.Namespace) -> Spec:
    return Spec(arguments.nodes, arguments.cpus, arguments.kill_wait)


def _run(spec: Spec, command: list[str]) -> int:
    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    with Lab(spec) as lab:
        dies_with_this = ("setpriv", "--pdeathsig", "KILL", "--")
        done = subprocess.run([*dies_with_this, *command], env={**os.environ, **lab.environment}, check=False)
        return done.returncode if done.returncode >= 0 else 128 - done.returncode


if __name__ == "__main__":
    sys.exit(main())
