"""Field types with bounds for the numbers of a recipe, a cluster file and a site's profile.

These files may come from an untrusted source. Each bound is far above any real training run, and low enough that no
number can exhaust memory or stall the program.
"""

from typing import Annotated

from pydantic import Field

Steps = Annotated[int, Field(ge=1, le=10**9)]
StepsOrNever = Annotated[int, Field(ge=0, le=10**9)]
BatchSize = Annotated[int, Field(ge=1, le=2**24)]
SequenceLength = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=2048)]
Hidden = Annotated[int, Field(ge=1, le=2**18)]
Width = Annotated[int, Field(ge=1, le=2**20)]
MAX_IDS = 2**24
Vocab = Annotated[int, Field(ge=1, le=MAX_IDS)]
NodeRanks = Annotated[int, Field(ge=1, le=2**12)]
MAX_RANKS = 2**17
PositiveRanks = Annotated[int, Field(ge=1, le=MAX_RANKS)]
RanksOrNone = Annotated[int, Field(ge=0, le=MAX_RANKS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Socket timeouts overflow above about a month.
Seconds = Annotated[float, Field(ge=1, le=10**6, description="in seconds")]
Share = Annotated[float, Field(ge=0, le=1)]
MAX_WEIGHT = 10**9
Weight = Annotated[float, Field(ge=0, le=MAX_WEIGHT)]
# RoPE's base is 3.6e9 in models of a million positions.
Factor = Annotated[float, Field(gt=0, le=10**12)]
Rate = Annotated[float, Field(ge=0, le=10**9)]
# For numbers that a program wrote and somebody may have edited.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
