"""The strategies that tests train: each with whether it quantizes."""

from harness import Case

INT8, SECOND, INT4 = "quantize.weights=int8", "quantize.secondary=int8", "quantize.gradients=int4"


def partition(weights: int, gradients: int, optimizer: int) -> tuple[str, ...]:
    return (f"zero.partition={{weights: {weights}, gradients: {gradients}, optimizer: {optimizer}}}",)


def strategies(world: int) -> dict[tuple[str, ...], bool]:
    """Every strategy for so many ranks, and whether it quantizes."""
    half = world // 2 if world % 2 == 0 else 1
    stages = [(f"zero.stage={stage}",) for stage in range(4)]
    numbers = {
        8: [(2, 2, 2), (2, 4, 8), (4, 4, 8), (8, 8, 8), (1, 2, 8), (1, 4, 4)],
        4: [(2, 2, 2), (2, 4, 4), (1, 2, 2)],
    }
    partitions = [partition(*each) for each in numbers.get(world, [(1, 1, 2), (half, half, world)])]
    second = [("zero.stage=3", f"zero.secondary={degree}") for degree in (2, 4) if world % degree == 0]
    presets = [("zero.preset=mics",), ("zero.preset=zero++",), ("zero.preset=topo",)]
    flat = [(*keys, "zero.hierarchical=false") for keys in (("zero.stage=3",), ("zero.preset=mics",), *second)]
    one, two = ("zero.stage=3",), ("zero.stage=3", "zero.secondary=2")
    quantized = [
        *((stage, INT8) for stage in ("zero.stage=1", "zero.stage=2", "zero.stage=3")),
        (*two, SECOND), (*one, INT4), ("zero.stage=0", INT4), ("zero.stage=2", INT4), (*two, INT8, SECOND, INT4),
        (*two, INT8, SECOND, INT4, "quantize.block=64"), (*two, INT8, SECOND, INT4, "zero.hierarchical=false"),
    ]  # fmt: skip
    exact = [*stages, *partitions, *second, presets[0], *flat]
    return {**dict.fromkeys(exact, False), **dict.fromkeys([*presets[1:], *quantized], True)}


def some(world: int, node: int, accumulation: int, *picked: int) -> list[tuple[Case, bool]]:
    """Return the strategies picked by place, or all of them."""
    found = [
        (Case(world, keys, node=node, accumulation=accumulation), lossy) for keys, lossy in strategies(world).items()
    ]
    return [found[place] for place in picked] if picked else found


COVERING = [
    *some(2, 1, 4, 0, 1, 2, 3, 6), *some(2, 1, 1, 8, 12, 13), (Case(2, ("zero.preset=zero++",), node=1), True),
    *some(4, 2, 4), *some(4, 1, 1, 3, 8),
    *some(6, 3, 1, 0, 2, 5, 7, 11, 15), *some(6, 2, 4, 3, 5, 6, 7),
    *some(8, 4, 1, 1, 3, 5, 8, 9, 12, 16, 18, 26), *some(8, 2, 4, 5, 7),
]  # fmt: skip
