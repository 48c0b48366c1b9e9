"""The memory that two papers report for given models and machines, beside what `llmtrain plan` says of the same.

    python -m tools.bench.papers_memory [--write docs/memory.md]

It plans and trains nothing: neither the machines nor torch are needed.
"""

import argparse
from pathlib import Path

from tools.bench.axonn_memory import axonn_text
from tools.bench.node_memory import deepspeed_text
from tools.bench.table import write_section


def main() -> None:
    """Plan, and print or write the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="document whose sections to replace")
    given = parser.parse_args()
    for name, text in (("axonn", axonn_text()), ("deepspeed", deepspeed_text())):
        print(text, end="\n\n")
        if given.write:
            write_section(given.write, name, text)


if __name__ == "__main__":
    main()
