"""The recipe's `zero` and `quantize` sections."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from llmtrain_data.bounds import PositiveRanks, RanksOrNone
from pydantic import Field

from llmtrain.cluster.quantity import Size, quantity

# A number of ranks, the name of a link tier (node, all, or one that the cluster file names), or auto.
Degree = PositiveRanks | str
ZeroStage = Literal[0, 1, 2, 3]
STAGES: tuple[ZeroStage, ...] = (0, 1, 2, 3)
# A number of bytes, or a quantity such as 2GB.
MemorySize = Annotated[int, Field(ge=0, le=2**50)] | Size
BlockSize = Annotated[int, Field(ge=1, le=2**24)]


@dataclass(frozen=True, kw_only=True)
class PartitionConfig:
    """Over how many data-parallel ranks each model state is sharded; null follows `zero.stage` if it is set, else it is
    the degree of the state before it, and 1 for weights.

    Each degree is a number of ranks, the name of a link tier such as node, all, or auto: the smallest degree at which
    the model states fit the memory in the cluster's description. Each degree divides the next: weights, gradients,
    optimizer, all data-parallel ranks. weights: degree of the weights in the compute dtype. gradients: degree of the
    gradients. optimizer: degree of the fp32 weights and both moments.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    weights: Degree | None = None
    gradients: Degree | None = None
    optimizer: Degree | None = None


@dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """How model states are sharded over the data-parallel ranks.

    stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also weights (ZeRO, section 5); null: as `preset`
    or `partition` say, else 0. partition: a degree for each state. secondary: degree of a secondary copy of the
    weights, which later gathers of a step read instead of the primary one; 0: none; null: as `preset` or `resident`
    say, else none (ZeRO++, section 3.2; ZeRO-topo, section IV). hierarchical: gather weights first across nodes, then
    inside each node (MiCS, section 3.3); auto is true. resident: memory of a rank for gathered weights, in bytes or as
    a quantity such as 2GB; units stay gathered as long as it has room for them. 0 is the least memory in which two
    units are gathered ahead. auto is what `cluster.accelerator.memory` leaves on the fullest rank, at most room for all
    units, and 0 where it is not stated or leaves less; where neither secondary nor preset is set, part of it is a
    secondary copy if fewer bytes then cross slow links. registered: whether the buffers of gathers and reductions
    between GPUs lie in memory that NCCL has registered, so that NVLink SHARP and network cards use them without a copy
    (NCCL user guide, "User Buffer Registration"). preset: mics, zero++ or topo set the other keys of `zero`, and those
    of `quantize`, that are left out.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    preset: Literal["mics", "zero++", "topo"] | None = None
    stage: ZeroStage | None = None
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    secondary: RanksOrNone | str | None = None
    hierarchical: bool | Literal["auto"] = "auto"
    resident: Literal["auto"] | MemorySize = "auto"
    registered: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.resident, str) and self.resident != "auto":
            try:
                quantity(self.resident, "byte")
            except ValueError as error:
                raise ValueError(f"resident is {self.resident!r}; {error}") from None


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """What is quantized, in blocks that share one scale; null follows `zero.preset`.

    weights: weights in gathers. secondary: the secondary copy. gradients: gradients in reductions, whose sums stay
    fp32. block: elements that share a scale.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    weights: Literal["none", "int8"] | None = None
    secondary: Literal["none", "int8"] | None = None
    gradients: Literal["none", "int4"] | None = None
    block: BlockSize = 256

    def __post_init__(self) -> None:
        if self.gradients == "int4" and self.block % 2:
            raise ValueError(f"block is {self.block}; int4 packs two elements into a byte, so it must be even")
