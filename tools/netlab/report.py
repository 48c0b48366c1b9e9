"""Time and traffic of a run in a lab, as a table and as JSON."""

import json
from dataclasses import asdict
from typing import Any

from tools.netlab.lab import LabResult
from tools.netlab.spec import Spec


def as_table(result: LabResult) -> str:
    """Return one line per card: its rate, the bytes in both directions, and the used share of the rate."""
    rows = [("node", "card", "network", "Mbit/s", "sent MB", "received MB", "used")]
    for card in result.traffic:
        busiest = max(card.sent, card.received)
        used = f"{busiest / result.seconds / card.rate:.0%}" if card.rate else "-"
        rate = f"{card.rate * 8 / 1e6:g}" if card.rate else "unshaped"
        sizes = (f"{card.sent / 1e6:.3f}", f"{card.received / 1e6:.3f}")
        rows.append((str(card.node), card.interface, card.network, rate, *sizes, used))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([*lines, f"{result.seconds:.2f} s, exit code {result.returncode}"])


def as_json(spec: Spec, command: list[str], result: LabResult) -> str:
    """Return the run as JSON; rates in bytes per second."""
    report: dict[str, Any] = {
        "command": command,
        "nodes": len(spec.nodes),
        "ranks_per_node": spec.ranks_per_node,
        "returncode": result.returncode,
        "seconds": round(result.seconds, 3),
        "cards": [asdict(card) for card in result.traffic],
    }
    return json.dumps(report, indent=2) + "\n"
