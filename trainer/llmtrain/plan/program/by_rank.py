"""The programs of a plan's ranks. No torch in here."""

from collections.abc import Callable
from functools import cache

from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec

ProgramsOf = Callable[[int], Programs]


def programs_of(plan: Plan) -> ProgramsOf:
    """Return a function that returns the programs of a rank of the run, and makes them once: a program of many
    microbatches takes long."""
    return cache(lambda rank: Programs(ProgramSpec.of(plan, rank)))
