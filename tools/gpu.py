"""`make gpu`: check this machine, run the tests on its GPU, and measure training on it. `make gpu-offload` measures
models whose states are on the host. Uses no network."""

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "torch",
    "triton",
    "numpy",
    "typer",
    "rich",
    "omegaconf",
    "pydantic",
    "yaml",
    "msgspec",
    "xxhash",
    "psutil",
    "safetensors",
    "tqdm",
    "pytest",
    "pytest_timeout",
    "hypothesis",
)
# Seconds for the tests, for the benchmarks of kernels, of training, and of training with states on the host.
TESTS, KERNELS, BENCHMARKS, OFFLOAD = 600, 90, 810, 1500
# Seconds in which what took too long has to end.
GRACE = 30


def obstacle() -> str:
    """Return one sentence that says why nothing can run here; empty if it can."""
    if absent := [name for name in NEEDED if find_spec(name) is None]:
        return f"make gpu needs these Python packages, which {sys.executable} lacks: {', '.join(absent)}"
    import torch

    return "" if torch.cuda.is_available() else "make gpu needs a GPU, and torch finds none here; see llmtrain doctor"


def run(limit: int, *words: str) -> bool:
    """Run Python with `words` for at most `limit` seconds; return whether it succeeded."""
    print(f"running {' '.join(words)}", flush=True)
    paths = [str(ROOT / name) for name in ("", "trainer", "kernels", "data")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment) as process:
        try:
            return not process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{' '.join(words)} took over {limit} s, and was ended", file=sys.stderr)
        # pytest then says which tests have failed so far.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        return False


def main() -> int:
    """Return the exit code: 2 if nothing can run here, 1 if tests or benchmarks failed."""
    if sentence := obstacle():
        print(sentence, file=sys.stderr)
        return 2
    bench = ("-m", "tools.bench.gpu", "--write", "docs/benchmarks.md")
    if "offload" in sys.argv[1:]:
        return 0 if run(OFFLOAD, *bench, "--offload") else 1
    # It also reports packages that only other commands need, so that its exit code does not count here.
    run(120, "-m", "llmtrain", "doctor")
    passed = run(TESTS, "-m", "pytest", "-v", "--tb=short", "tests/gpu")
    kernels = run(KERNELS, "-m", "tools.bench.gpu_kernels", "--write", "docs/benchmarks.md")
    measured = run(BENCHMARKS, *bench)
    return 0 if passed and kernels and measured else 1


if __name__ == "__main__":
    sys.exit(main())
