"""Shared code of the benchmarks: the machine's description, tables, and a benchmark's section of a document."""

import math
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil


def machine(packages: Sequence[str] = ("torch",)) -> str:
    """Return one line: CPU, usable cores, memory, system, Python and the versions of `packages`."""
    cores = len(os.sched_getaffinity(0))
    parts = [f"{_processor()}, {cores} cores", f"{psutil.virtual_memory().total / 2**30:.0f} GiB memory"]
    parts += [
        f"{platform.system()} {platform.release().split('-')[0]}",
        f"Python {platform.python_version()}",
    ]
    for name in packages:
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"no {name}")
    return ", ".join(parts)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table; the first column is left-aligned, the others right-aligned."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of at least 95% for the median, from order statistics alone. With too few values,
    return the smallest and the largest."""
    ordered, count = sorted(values), len(values)
    below = outside = 0
    # Each end drops the most values that all lie on one side of the median with a probability of at most 2.5%.
    while (outside := outside + math.comb(count, below)) <= 0.025 * 2**count:
        below += 1
    left_out = max(below - 1, 0)
    return ordered[left_out], ordered[count - 1 - left_out]


def write_section(path: Path | str, name: str, markdown: str) -> None:
    """Put `markdown` between `<!-- name:start -->` and `<!-- name:end -->` of the file at `path`.

    If the file does not exist, create it with a title. If the markers do not exist, append them.
    """
    path = Path(path)
    text = path.read_text() if path.exists() else "# Benchmarks\n"
    start, end = f"<!-- {name}:start -->", f"<!-- {name}:end -->"
    section = f"{start}\n{markdown.strip()}\n{end}"
    pattern = re.compile(re.escape(start) + ".*?" + re.escape(end), re.DOTALL)
    found = pattern.search(text)
    text = pattern.sub(lambda _: section, text) if found else f"{text.rstrip()}\n\n{section}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _processor() -> str:
    """Return the CPU's name, from /proc/cpuinfo if it exists."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()
