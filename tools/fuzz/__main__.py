"""Gives mutated files to every reader: `python -m tools.fuzz --reader recipe --count 10000 --seed 1`."""

import argparse
import os
import sys
import time
from pathlib import Path

# The threads of libraries would use memory that counts towards the limit of an input.
for name in ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from llmtrain_data.output import say  # noqa: E402

from tools.fuzz.pool import Find, case_of, rate, run, summary  # noqa: E402
from tools.fuzz.targets import TARGETS  # noqa: E402


def main() -> int:
    """Run the inputs; return 1 if there are finds."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--reader", action="append", choices=sorted(TARGETS), help="default: all readers")
    parser.add_argument("--count", type=int, default=1000, help="inputs per reader")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same inputs")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--finds", type=Path, default=Path("fuzz-finds"), help="folder for the inputs of finds")
    arguments = parser.parse_args()
    found: list[Find] = []
    for name in arguments.reader or TARGETS:
        target, started, before = TARGETS[name], time.monotonic(), len(found)
        case_of(target, arguments.seed, 0)
        indices = range(arguments.first, arguments.first + arguments.count)
        for find in run(target, arguments.seed, indices, arguments.finds):
            found.append(find)
        say(f"{name}: {len(indices)} inputs, {len(found) - before} finds, {rate(started, len(indices))}")
        for line in summary(found[before:]):
            say(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
