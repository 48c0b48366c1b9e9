"""Whether all ranks have planned the same run: each plans by what its machine says of itself."""

import json
import socket

from llmtrain.comm.ranks import Ranks
from llmtrain.errors import RunFailedError
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import record_changes

# Machines may have these in folders of their own.
_PATHS = ("data.path", "data.validation", "data.tokenizer", "logging.dir", "model.hf", "offload.paths")


def check_same_plan(plan: Plan, ranks: Ranks) -> None:
    """Raise RunFailedError on a rank whose plan differs from the main rank's: they would exchange other sizes, or in
    another order, and wait for each other. Collective."""
    main = json.loads(ranks.from_main("plan", json.dumps(plan.record)))
    own = json.loads(json.dumps(plan.record))
    differing = [line for line in record_changes(main, own) if line.partition(":")[0] not in _PATHS]
    if differing:
        raise RunFailedError(
            f"rank {ranks.rank} on {socket.gethostname()} plans another run than rank 0 ({'; '.join(differing)}), as "
            "their machines differ in GPUs, drivers or Python packages; make them alike (llmtrain doctor shows each), "
            "or set these keys in the recipe"
        )
