"""The largest GPT that trains in a limited memory: peers on a CPU, and a recipe of ours.

    python -m tools.bench.memory_limit [--limits 1.5 6] [--peers ...] [--write docs/memory.md]
    python -m tools.bench.memory_limit --recipe RECIPE --layers N --limits 1.5 [--write docs/memory.md]

A memory cgroup holds all of a process: its own memory and the pages of its files. Each size is a process of its own;
it fits if it trains 5 steps, and it does not if the kernel kills it. The peers' layers are found by bisection. Hidden
1024, vocabulary 32768, one sequence of 256 tokens, fp32. Needs root and the memory controller of cgroup v1. It measures
no times, but a busy machine takes long.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.bench.labs import write_set
from tools.bench.memory_limit_rank import HIDDEN, PEERS, STEPS, TOKENS, VOCAB
from tools.bench.table import machine, table, write_section

GROUPS = Path("/sys/fs/cgroup/memory")
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@contextmanager
def limited(nbytes: int) -> Iterator[Path]:
    """Make a memory group of `nbytes`."""
    group = GROUPS / f"bench-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        yield group
    finally:
        group.rmdir()


def inside(group: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a memory group."""
    entered = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *words]
    env = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(entered, capture_output=True, text=True, env=env, check=False)


def peer_parameters(peer: str, layers: int, limit: int) -> int | None:
    """Return the parameters of a peer's model that trained; None if the kernel killed it. Raises SystemExit."""
    with limited(limit) as group:
        done = inside(group, [sys.executable, "-m", "tools.bench.memory_limit_rank", peer, str(layers)])
    print(peer, layers, done.returncode, flush=True)
    if done.returncode in KILLED:
        return None
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return int(json.loads(done.stdout.splitlines()[-1])["parameters"])


def largest(peer: str, limit: int) -> tuple[int, int]:
    """Return the most layers with which a peer trains, and their parameters; 0 and 0 if not even one."""
    first, most, found = 0, limit // (16 * 12 * HIDDEN**2), 0
    while first < most:
        middle = (first + most + 1) // 2
        parameters = peer_parameters(peer, middle, limit)
        first, most, found = (first, middle - 1, found) if parameters is None else (middle, most, parameters)
    return first, found


def trains(recipe: str, layers: int, limit: int, folder: Path) -> bool:
    """Return whether a recipe of ours trains with so many layers, checkpoint included. Raises SystemExit."""
    write_set(folder / "set", VOCAB, 20)
    keys = [f"model.layers={layers}", f"data.path={folder}/set", f"logging.dir={folder}/runs", "name=limited"]
    with limited(limit) as group:
        done = inside(group, [sys.executable, "-m", "llmtrain", "run", recipe, *keys])
    if done.returncode and done.returncode not in KILLED:
        raise SystemExit(done.stderr[-3000:])
    return not done.returncode


def peers_text(peers: Sequence[str], limits: Sequence[float]) -> str:
    """Measure the peers, and return their section."""
    rows = []
    for gib in limits:
        for peer in peers:
            layers, parameters = largest(peer, int(gib * 2**30))
            rows.append([peer, f"{gib:g} GiB", str(layers), f"{parameters / 1e6:.0f}M"])
    return "\n\n".join(
        (
            "## The largest model in a limited memory: peers",
            f"`python -m tools.bench.memory_limit`. {machine(('torch', 'deepspeed'))}. A memory cgroup holds the "
            f"process and the pages of its files. GPT of hidden {HIDDEN}, vocabulary {VOCAB}, {TOKENS} tokens a step, "
            f"fp32, {STEPS} steps, activations recomputed; one process, states on the host. 0 layers: not even one. "
            "DeepSpeed's NVMe tier hangs on CPUs, so it has none.",
            table(("trainer", "limit", "most layers", "parameters"), rows),
        )
    )


def ours_text(recipe: str, layers: int, limits: Sequence[float]) -> str:
    """Train a recipe of ours, and return its section."""
    rows = []
    for gib in limits:
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            rows.append(
                [
                    "llmtrain",
                    f"{gib:g} GiB",
                    str(layers),
                    "yes" if trains(recipe, layers, int(gib * 2**30), Path(folder)) else "no",
                ]
            )
    head = f"`python -m tools.bench.memory_limit --recipe {Path(recipe).name} --layers {layers}`. {machine()}."
    return "\n\n".join(
        (
            "## The largest model in a limited memory: llmtrain",
            head,
            table(("trainer", "limit", "layers", "trained"), rows),
        )
    )


def main() -> None:
    """Measure, and print or write a section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limits", type=float, nargs="+", default=[1.5, 6.0], help="GiB")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--recipe", help="measure this recipe of ours instead")
    parser.add_argument("--layers", type=int, default=1, help="model.layers of the recipe")
    parser.add_argument("--write", type=Path, help="document whose section to replace")
    given = parser.parse_args()
    if given.recipe:
        name, text = "limit-ours", ours_text(given.recipe, given.layers, given.limits)
    else:
        name, text = "limit-peers", peers_text(given.peers, given.limits)
    print(text)
    if given.write:
        write_section(given.write, name, text)


if __name__ == "__main__":
    main()
