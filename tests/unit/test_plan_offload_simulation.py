"""The lanes of offloaded states: what a step moves, in which order, and how long it takes."""

from pathlib import Path

import pytest
from llmtrain.plan.cost.offload_simulation import Computation, Order, Rates, exact_least, least_seconds, simulate_steps
from llmtrain.plan.cost.simulated_step import rank_computation
from llmtrain.plan.facts import Facts
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.program.offload_moves import MoveEvent, Moves, bucket_moves, order_problems
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe

UNITS, PER_UNIT, ELEMENTS = 32, 4, 1000
TOTAL = UNITS * PER_UNIT * ELEMENTS
RECIPE = """
model: {family: gpt2, layers: 4, hidden: 64, heads: 2, vocab: 512}
data: {path: set, sequence_length: 32}
precision: {compute: bf16}
offload: {optimizer: host, bucket: 4096}
"""


def moves_with(spare: int, on_device: bool = False) -> list[Moves]:
    """Equal buckets, of which one in `spare` may be stepped ahead; none if it is 0. on_device: whether their weights
    wait there for the norm."""
    numbered = enumerate(unit for unit in range(UNITS) for _ in range(PER_UNIT))
    return [
        Moves(
            unit=unit,
            spare=bool(spare) and place % spare == 0,
            elements=ELEMENTS,
            on_device=False,
            there=4 * ELEMENTS,
            back=2 * ELEMENTS,
            back_ahead=2 * ELEMENTS if on_device else 0,
            commit=0 if on_device else 2 * ELEMENTS,
        )
        for place, unit in numbered
    ]


def computation(microbatches: int = 1, by_unit: bool = False) -> Computation:
    """One second for each microbatch."""
    runs = (1,) * UNITS if by_unit else ()
    return Computation([1 / 3 / UNITS] * UNITS, [2 / 3 / UNITS] * UNITS, microbatches, runs)


def rates(link: float, step: float) -> Rates:
    """Rates with which all gradients come down in `link` seconds, and all buckets are stepped in `step` seconds."""
    return Rates(down=4 * TOTAL / link, up=4 * TOTAL / link, step=TOTAL / step)


@pytest.mark.parametrize("by_unit", [False, True])
@pytest.mark.parametrize("microbatches", [1, 4, 16])
@pytest.mark.parametrize(("link", "step"), [(0.25, 0.25), (0.5, 0.5), (1, 0.5), (0.5, 1), (0.5, 2)])
def test_all_ahead_is_near_the_least_time(link: float, step: float, microbatches: int, by_unit: bool) -> None:
    given = moves_with(1), computation(microbatches, by_unit), rates(link, step)
    simulated = simulate_steps(*given, Order(4))
    assert order_problems(given[0], simulated.events) == []
    assert max(least_seconds(*given).values()) - 1e-9 <= exact_least(*given) <= simulated.seconds + 1e-9
    assert simulated.seconds <= 1.07 * exact_least(*given)


@pytest.mark.parametrize(("link", "step"), [(0.25, 0.25), (0.5, 0.5), (1, 0.5), (0.5, 1), (0.5, 2)])
def test_weights_that_wait_on_the_device_are_never_slower(link: float, step: float) -> None:
    found = []
    for on_device in (False, True):
        moves = moves_with(1, on_device)
        simulated = simulate_steps(moves, computation(), rates(link, step), Order(4))
        assert order_problems(moves, simulated.events) == []
        found.append(simulated.seconds)
    assert found[1] <= found[0] + 1e-9
    # Where the link is busy for a whole step, weights no longer wait for all gradients.
    assert link < 1 or found[1] < 0.9 * found[0]


@pytest.mark.parametrize(("link", "step"), [(1, 0.5), (0.5, 2)])
def test_breadth_first_hides_what_moves_beside_several_microbatches(link: float, step: float) -> None:
    """All but the passes of the last unit run beside the other lanes."""
    found = {}
    for by_unit in (False, True):
        given = moves_with(1), computation(4, by_unit), rates(link, step)
        found[by_unit] = simulate_steps(*given, Order(4)).seconds
        busiest = max(least_seconds(*given).values())
    assert found[True] <= 1.05 * busiest
    assert found[True] < found[False]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_all_microbatches_pass_the_units_of_a_stage_together(tied: str, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)
    keys = [
        "cluster={accelerator: {name: H100-80GB}, node: {ranks: 1}}",
        f"model.tie_embeddings={tied}",
        "activation_checkpointing=full",
    ]
    keys += ["train.global_batch=8", "train.microbatch=2"]

    def ranges_of(*more: str) -> list[range]:
        recipe = load_recipe(str(tmp_path / "r.yaml"), [*keys, *more])
        found = rank_computation(make_plan(recipe, named_facts(recipe, Facts(world=1, device="cuda"))), 0)
        assert found is not None
        assert (len(found.forward), found.microbatches) == (6, 4)
        return found.ranges

    assert ranges_of("pipeline.schedule=breadth-first", "pipeline.chunks=2") == [range(3), range(3, 6)]
    each = [range(2), range(2, 3), range(3, 4), range(4, 6)]
    assert ranges_of("pipeline.schedule=breadth-first") == each
    assert ranges_of() == [range(6)]


def test_more_spare_memory_is_never_slower() -> None:
    for link, step in ((0.5, 1), (1, 0.5), (0.5, 2)):
        none, quarter, full = (
            simulate_steps(moves_with(spare), computation(), rates(link, step), Order(4)).seconds for spare in (0, 4, 1)
        )
        two = simulate_steps(moves_with(0), computation(), rates(link, step), Order(4, waits_for=2)).seconds
        whole = simulate_steps(moves_with(0), computation(), rates(link, step), Order(4, waits_for=None)).seconds
        apart = simulate_steps(moves_with(0), computation(), rates(link, step), Order(1, waits_for=None)).seconds
        assert full < quarter < none < two < whole < apart
        # Without any overlap, everything follows.
        assert apart == pytest.approx(1 + link + link / 2 + step)


def test_files_are_read_ahead_and_written_behind() -> None:
    moves = [Moves(unit=unit, spare=False, elements=ELEMENTS, files=(12 * ELEMENTS,)) for unit in range(UNITS)]
    given = moves, computation(), Rates(step=ELEMENTS * UNITS / 1.0, files=(12 * ELEMENTS * UNITS / 4.0,))
    apart, together = (simulate_steps(*given, Order(1, waits_for=None, fetched=fetched)).seconds for fetched in (0, 3))
    assert together == pytest.approx(1 + 4 + 1 / UNITS)
    assert apart == pytest.approx(1 + 4 + 1)


def events(*texts: str) -> list[MoveEvent]:
    found = []
    for text in texts:
        kind, _, place = text.partition(" ")
        found.append(MoveEvent(kind, int(place or 0), applies=kind == "decide" and not place))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("happened", "said"),
    [
        (("gradient 1", "ahead 1", "gradient 0", "decide", "step 0", "commit 1"), None),
        (("gradient 1", "ahead 1", "gradient 0", "decide 1", "step 0", "step 1"), None),
        (("gradient 1", "ahead 1", "commit 1"), "the norm is not known"),
        (("ahead 1",), "gradients are not complete"),
        (("gradient 0", "ahead 0"), "has no spare memory"),
        (("gradient 1", "ahead 1", "ahead 1"), "ahead twice"),
        (("decide", "step 0", "commit 1"), "was not stepped ahead with these numbers"),
        (("gradient 1", "ahead 1", "decide 1", "step 0", "commit 1"), "was not stepped ahead with these numbers"),
        (("gradient 1", "ahead 1", "decide", "step 1"), "its step ahead counts"),
        (("decide", "step 0", "step 0"), "was stepped already"),
        (("decide", "step 1", "step 0"), "after one that follows it"),
        (("decide", "step 0"), r"buckets \[1\] are not stepped"),
        (("decide", "step 0", "decide"), r"buckets \[1\] of the step before"),
    ],
    ids=str,
)
def test_wrong_orders_are_found(happened: tuple[str, ...], said: str | None) -> None:
    moves = [Moves(unit=0, spare=False, elements=1), Moves(unit=1, spare=True, elements=1)]
    problems = order_problems(moves, events(*happened))
    if said is None:
        assert problems == []
    else:
        with pytest.raises(AssertionError, match=said):
            raise AssertionError(problems)


def test_moves_are_those_of_the_plan(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(RECIPE)

    def moves_on(*keys: str) -> list[Moves]:
        plan = make_plan(load_recipe(str(tmp_path / "r.yaml"), keys), Facts(world=1, device="cuda"))
        found = bucket_moves(plan, 0)
        assert sum(one.elements for one in found) == sum(one.numel for one in rank_buckets(plan, 0))
        return found

    host, device = moves_on("offload.spare=0"), moves_on("offload.spare=0", "offload.step=device")
    numel = sum(one.elements for one in host)
    assert (sum(one.down for one in host), sum(one.up for one in host)) == (4 * numel, 2 * numel)
    assert (sum(one.down for one in device), sum(one.up for one in device)) == (12 * numel, 12 * numel)
    host, device = moves_on("offload.spare=1"), moves_on("offload.spare=1", "offload.step=device")
    # The weights of a step ahead of the device wait on the host.
    assert (sum(one.down for one in host), sum(one.up for one in host)) == (4 * numel, 2 * numel)
    assert (sum(one.down for one in device), sum(one.up for one in device)) == (14 * numel, 14 * numel)
    waiting = ("offload.spare=1", "offload.spare_weights=device")
    host, device = moves_on(*waiting), moves_on(*waiting, "offload.step=device")
    # Weights that wait on the device come up before the norm is known, or do not leave it.
    assert (sum(one.down for one in host), sum(one.up for one in host)) == (4 * numel, 2 * numel)
    assert (sum(one.down for one in device), sum(one.up for one in device)) == (12 * numel, 12 * numel)
    assert not any(one.commit for one in (*host, *device))
    narrow = moves_on("offload.spare=0", "precision.gradients=compute")
    assert (sum(one.down for one in narrow), sum(one.up for one in narrow)) == (2 * numel, 2 * numel)
    files = moves_on("offload.spare=0", "offload.optimizer=nvme", "offload.paths=[/scratch]")
    assert sum(one.files[0] for one in files) >= 12 * numel
