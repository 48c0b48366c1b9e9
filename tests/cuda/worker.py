"""Rehearses cases and twins in one process, which has loaded the device before torch.

`worker.py LIBRARY ANSWER` reads names from stdin, JSON of {cases, twins}, and writes what was found to the file ANSWER.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import chdir, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tools.fake_cuda.library import load

load(Path(sys.argv[1]))

from tests.cuda.cases import CASES, Case  # noqa: E402
from tests.cuda.nccl_calls import Decisions, Group  # noqa: E402
from tests.cuda.order import deadlock, disagreements  # noqa: E402
from tests.cuda.rehearsal import Rehearsed, rehearse  # noqa: E402
from tests.cuda.twins import TWINS  # noqa: E402


def found_in(case: Case) -> dict[str, Any]:
    """Rehearse all ranks of a case."""
    decisions = Decisions()
    ranks = [rehearse(case, rank, decisions) for rank in range(case.world)]
    groups = [one.groups for one in ranks]
    # Nobody knows in which order, see test_rehearsal.py.
    as_they_come = "message-driven" in str(case.keys)
    return {
        "races": sorted({race for one in ranks for race in one.races}),
        "early": sorted({use for one in ranks for use in one.early}),
        "waits": max((one.waits for one in ranks), key=len),
        "drained": max((one.drained for one in ranks), key=len),
        "pageable": sorted({copy for one in ranks for copy in one.pageable}),
        "strays": sorted({stray for one in ranks for stray in one.strays}),
        "rounded": sorted({number for one in ranks for number in one.rounded}),
        "applied": min(one.applied for one in ranks),
        "copied": [one.copied for one in ranks],
        "linked": [one.linked for one in ranks],
        "planned": [one.planned for one in ranks],
        "beside": min(_messages_beside(each) for each in groups),
        "unregistered": sorted(
            {
                call.what
                for each in groups
                for group in each
                if group.pools
                for call in group.calls
                if not call.registered
            }
        ),
        "left": all(group.left == group.pools for each in groups for group in each),
        "registered": sum(bool(group.pools) for each in groups for group in each),
        "calls": sum(len(group.calls) for each in groups for group in each),
        "disagreements": disagreements(groups),
        "deadlock": None if as_they_come else deadlock(groups),
        "ctas": sorted({group.ctas for each in groups for group in each if group.ctas is not None}),
        "priorities": sorted({one for rank in ranks for one in rank.priorities}),
    }


def _messages_beside(groups: Sequence[Group]) -> int:
    """Return how many messages a rank receives beside computation that the host has launched before it posts them."""
    calls = [call for group in groups for call in group.calls]
    return sum(call.receives and call.beside > 0 for call in calls if call.what.startswith("message"))


def found_in_twin(name: str) -> dict[str, Any]:
    """Rehearse the first rank of a twin, and the others if some of them are as they should be."""
    twin = TWINS[name]
    found = list[Rehearsed]()
    for rank in range(twin.case.world if twin.breaks else 1):
        with twin.broken if rank in (twin.breaks or (0,)) else nullcontext():
            found.append(rehearse(twin.case, rank))
    first, groups = found[0], [one.groups for one in found]
    return {
        "races": list(first.races),
        "early": list(first.early),
        "waits": first.waits,
        "drained": first.drained,
        "pageable": first.pageable,
        "strays": first.strays,
        "rounded": first.rounded,
        "disagreements": disagreements(groups) if twin.breaks else [],
        "deadlock": deadlock(groups) if twin.breaks else [],
    }


def main() -> None:
    """Answer."""
    asked, answers = json.load(sys.stdin), dict[str, Any]()
    for kind, rehearsed in (("cases", lambda name: found_in(CASES[name])), ("twins", found_in_twin)):
        for name in asked[kind]:
            try:
                # They write files.
                with TemporaryDirectory() as folder, chdir(folder):
                    answers[f"{kind} {name}"] = rehearsed(name)
            except Exception:
                answers[f"{kind} {name}"] = {"failed": traceback.format_exc()}
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
