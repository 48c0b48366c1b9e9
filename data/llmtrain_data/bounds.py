"""How large the numbers of a recipe, a cluster's description and a site's profile may be, as types of their fields.

Each bound lies far above what is trained anywhere, and low enough that nothing that is built from such a number fills
the memory or takes longer than it takes to read a sentence: the file may come from a stranger.
"""

from typing import Annotated

from pydantic import Field

Steps = Annotated[int, Field(ge=1, le=10**9)]
StepsOrNever = Annotated[int, Field(ge=0, le=10**9)]
Batch = Annotated[int, Field(ge=1, le=2**24)]
SequenceLength = Annotated[int, Field(ge=1, le=2**24)]
Layers = Annotated[int, Field(ge=1, le=2048)]
Hidden = Annotated[int, Field(ge=1, le=2**18)]
Width = Annotated[int, Field(ge=1, le=2**20)]
MOST_IDS = 2**24
Vocab = Annotated[int, Field(ge=1, le=MOST_IDS)]
NodeRanks = Annotated[int, Field(ge=1, le=2**12)]
MOST_RANKS = 2**17
Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS)]
RanksOrNone = Annotated[int, Field(ge=0, le=MOST_RANKS)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# Above a month, the waits of sockets overflow.
Seconds = Annotated[float, Field(ge=1, le=10**6)]
Share = Annotated[float, Field(ge=0, le=1)]
MOST_WEIGHT = 10**9
Weight = Annotated[float, Field(ge=0, le=MOST_WEIGHT)]
Factor = Annotated[float, Field(gt=0, le=10**9)]
Rate = Annotated[float, Field(ge=0, le=10**9)]
# What a program has written down, and a stranger may have changed.
Count = Annotated[int, Field(ge=0, lt=2**63)]
Number = Annotated[float, Field(allow_inf_nan=False)]
