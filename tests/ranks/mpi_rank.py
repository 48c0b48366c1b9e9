"""One rank that mpirun started: trains the cases of a job, as `worker` does on ranks that it forks.

The job is the first argument: JSON of {cases}.
"""

import gc
import json
import os
import sys

import torch
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.environment import launched
from llmtrain.comm.ranks import connect, disconnect

from tests.ranks.worker import run_case


def main() -> None:
    """Train every case of the job, all on the same ranks."""
    job, place = json.loads(sys.argv[1]), launched(os.environ)
    assert place is not None
    assert place.by == "mpirun"
    os.environ.update(place.variables)
    torch.set_num_threads(1)
    ranks = connect(Layout({Axis.DATA: place.world}))
    for case in job["cases"]:
        run_case(case, ranks)
        gc.collect()
    disconnect(ranks)


if __name__ == "__main__":
    main()
