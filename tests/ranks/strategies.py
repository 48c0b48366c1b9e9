"""The ways to shard model states that tests train, by name."""

from dataclasses import dataclass

from tests.ranks.harness import Case

INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"
FLAT = "zero.hierarchical=false"
PARTITIONS = {
    2: [(1, 1, 2)],
    4: [(2, 2, 2), (2, 4, 4), (1, 2, 2)],
    6: [(1, 1, 2), (3, 3, 6)],
    8: [(2, 2, 2), (2, 4, 8), (4, 4, 8), (8, 8, 8), (1, 2, 8), (1, 4, 4)],
}


@dataclass(frozen=True)
class Strategy:
    """keys: overrides of a recipe. quantized: whether it quantizes what ranks send."""

    keys: tuple[str, ...]
    quantized: bool = False


def strategies(world: int) -> dict[str, Strategy]:
    """Return every strategy for `world` ranks."""
    found = {f"stage{stage}": Strategy((f"zero.stage={stage}",)) for stage in range(4)}
    for w, g, o in PARTITIONS[world]:
        keys = (f"zero.partition={{weights: {w}, gradients: {g}, optimizer: {o}}}",)
        found[f"partition-{w}-{g}-{o}"] = Strategy(keys)
    for degree in (2, 4):
        if world % degree == 0:
            found[f"stage3-secondary{degree}"] = Strategy(("zero.stage=3", f"zero.secondary={degree}"))
    found["mics"] = Strategy(("zero.preset=mics",))
    for name in [name for name in found if name in ("stage3", "mics") or "secondary" in name]:
        found[f"{name}-flat"] = Strategy((*found[name].keys, FLAT))
    return found | _quantized()


def _quantized() -> dict[str, Strategy]:
    """Return the strategies that quantize."""
    copies = ("zero.stage=3", "zero.secondary=2")
    everything = (*copies, INT8, SECOND, INT4)
    keys = {
        "zero++": ("zero.preset=zero++",),
        "topo": ("zero.preset=topo",),
        **{f"stage{stage}-int8": (f"zero.stage={stage}", INT8) for stage in (1, 2, 3)},
        "stage3-secondary2-int8copy": (*copies, SECOND),
        **{f"stage{stage}-int4": (f"zero.stage={stage}", INT4) for stage in (3, 0, 2)},
        "stage3-secondary2-quantized": everything,
        "stage3-secondary2-quantized-block64": (*everything, "quantize.block=64"),
        "stage3-secondary2-quantized-flat": (*everything, FLAT),
    }
    return {name: Strategy(overrides, quantized=True) for name, overrides in keys.items()}


def cases(world: int, node: int, accumulation: int, *names: str) -> list[tuple[Case, bool]]:
    """Return runs of the named strategies, of all where none is named, and whether each quantizes."""
    known = strategies(world)
    chosen = [known[name] for name in names or known]
    return [(Case(world, one.keys, node=node, accumulation=accumulation), one.quantized) for one in chosen]


BF16, NARROW, WIDE = "precision.compute=bf16", "precision.gradients=compute", "precision.reduce=fp32"
SEQUENCE = "parallel.sequence=true"
# Sums of gradients in the compute dtype: whole, sharded, with copies, sliced, packed, and of tied embeddings.
NARROW_SUMS = [
    Case(2, ("zero.stage=0", BF16, NARROW), accumulation=4),
    Case(2, ("zero.stage=3", BF16, NARROW), node=1, accumulation=4),
    Case(4, ("zero.partition={weights: 1, gradients: 2, optimizer: 2}", BF16, NARROW), node=1, accumulation=4),
    Case(4, ("zero.stage=1", SEQUENCE, BF16, NARROW), accumulation=4, tensor=2),
    Case(4, ("zero.stage=0", INT4, BF16, NARROW), accumulation=4, tensor=2),
    Case(4, ("zero.stage=1", BF16, NARROW), ("model.tie_embeddings=true",), accumulation=4, pipeline=2),
]
# Sums of 16-bit gradients, sent in fp32: whole, sharded, over two levels, with copies, sliced, packed, tied, and of
# runs of passes.
WIDE_SUMS = [
    Case(2, ("zero.stage=0", BF16, WIDE), accumulation=4),
    Case(2, ("zero.stage=3", BF16, WIDE), node=1, accumulation=4),
    Case(4, ("zero.stage=3", "zero.secondary=2", BF16, WIDE), node=2, accumulation=4),
    Case(4, ("zero.partition={weights: 1, gradients: 2, optimizer: 2}", BF16, WIDE), node=1, accumulation=4),
    Case(4, ("zero.stage=2", SEQUENCE, BF16, WIDE), accumulation=4, tensor=2),
    Case(4, ("zero.stage=0", INT4, BF16, WIDE), accumulation=4, tensor=2),
    Case(4, ("zero.stage=1", BF16, WIDE), ("model.tie_embeddings=true",), accumulation=4, pipeline=2),
    Case(2, ("zero.stage=3", "pipeline.schedule=breadth-first", BF16, WIDE), accumulation=4),
]

# Every strategy once, and some at other numbers of ranks and microbatches.
COVERING = [
    *cases(2, 1, 4, "stage0", "stage1", "stage3"),
    *cases(2, 1, 1, "mics-flat", "stage2-int8", "zero++"),
    *cases(4, 2, 2),
    *cases(6, 3, 1, "stage2", "partition-3-3-6", "zero++"),
    *cases(8, 4, 1, "partition-2-4-8", "stage3-secondary4-flat", "topo"),
]
# Further ones, which are soak tests.
FURTHER = [
    *cases(2, 1, 4, "stage2", "mics"),
    *cases(2, 1, 1, "stage1-int8"),
    *cases(4, 2, 4),
    *cases(4, 1, 1, "stage3", "stage3-secondary4"),
    *cases(6, 3, 1, "stage0", "mics", "stage3-int8"),
    *cases(6, 2, 4, "stage3", "partition-3-3-6", "stage3-secondary2", "mics"),
    *cases(8, 4, 1, "stage1", "stage3", "partition-1-2-8", "partition-1-4-4", "mics", "stage3-secondary2-quantized"),
    *cases(8, 2, 4, "partition-2-4-8", "partition-8-8-8"),
]
