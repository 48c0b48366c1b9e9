"""What the benchmarks share: the machine's description, and a section of a document that a bench owns."""

import math
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine(packages: Sequence[str] = ("torch",)) -> str:
    """Return one line: processor, usable cores, memory, system, Python and the versions of `packages`."""
    cores = len(os.sched_getaffinity(0))
    parts = [f"{_processor()}, {cores} cores", f"{_memory_gib():.0f} GiB memory"]
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
    """Return a markdown table; the first column is left-aligned, the others to the right."""
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return between which two of `values` the median of what they are drawn from lies in at least 95 of 100 such
    draws, or the least and the greatest where there are too few for that; by order statistics alone."""
    ordered, count = sorted(values), len(values)
    below = outside = 0
    # Each end leaves out the most values that all lie on one side of the median in at most 2.5 of 100 draws.
    while (outside := outside + math.comb(count, below)) <= 0.025 * 2**count:
        below += 1
    left_out = max(below - 1, 0)
    return ordered[left_out], ordered[count - 1 - left_out]


def write_section(path: Path | str, name: str, markdown: str) -> None:
    """Put `markdown` between `<!-- name:start -->` and `<!-- name:end -->` of the file at `path`.

    The file is made with a title, and the markers appended at its end, where they do not exist yet.
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
    """Return the processor's name, by /proc/cpuinfo where there is one."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
