"""Splits of layers into stages: optimal by brute force, Holmes's equation, and layers that cannot be split."""

from collections.abc import Iterator
from math import floor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llmtrain.errors import BadInputError
from llmtrain.model.presets import PRESETS
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.pipeline.actions import Schedule
from llmtrain.plan.pipeline.layer_split import StageCosts, shares, split_layers, stage_costs
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan


def cuts(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    if stages == 1:
        yield (layers,)
        return
    for first in range(1, layers - stages + 2):
        yield from ((first, *rest) for rest in cuts(layers - first, stages - 1))


def slowest(split: tuple[int, ...], costs: StageCosts, speeds: list[float], chunks: int, folded: bool) -> float:
    schedule = Schedule(ranks=len(speeds), chunks=chunks, microbatches=0, actions=(), folded=folded)
    work = costs.of(split)
    return max(
        sum(work[schedule.stage(rank, chunk)] for chunk in range(chunks)) / speed for rank, speed in enumerate(speeds)
    )


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.sampled_from([(1, False), (2, False), (2, True), (3, False)]))
def test_no_cut_is_better(data: st.DataObject, ranks: int, kind: tuple[int, bool]) -> None:
    chunks, folded = kind
    if ranks * chunks > 6:
        ranks = 2
    layers = data.draw(st.integers(ranks * chunks, 13))
    part = st.sampled_from([0.0, 0.25, 1.0, 3.0, 7.5])
    costs = StageCosts(1.0, data.draw(part), data.draw(part))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 1.25, 4.0]), min_size=ranks, max_size=ranks))
    for how, counted in (("auto", speeds), ("balanced", [1.0] * ranks)):
        split = split_layers(layers, ranks, how, costs, speeds, 1.0, chunks, folded)  # type: ignore[arg-type]
        assert (sum(split), len(split), min(split) >= 1) == (layers, ranks * chunks, True)
        best = min(slowest(cut, costs, counted, chunks, folded) for cut in cuts(layers, ranks * chunks))
        assert slowest(split, costs, counted, chunks, folded) == pytest.approx(best)


@pytest.mark.parametrize("layers", [24, 30, 36, 48, 96])
@pytest.mark.parametrize(("fast", "slow"), [(197.0, 160.0), (148.0, 145.0), (3.0, 1.0)])
def test_holmes_equation_2(layers: int, fast: float, slow: float) -> None:
    """The equation's floor and the best split differ by at most one layer, from rounding."""
    layers_fast = floor(1.05 * fast / (fast + slow) * layers)
    for speeds, place in (([fast, slow], 0), ([slow, fast], 1)):
        split = split_layers(layers, 2, "auto", StageCosts(1.0), speeds, 1.05)
        assert split[place] in (layers_fast, layers_fast + 1)
    assert shares([fast, slow], 1.05)[0] == pytest.approx(1.05 * fast / (fast + slow))


def test_shares_of_many() -> None:
    found = shares([2.0, 1.0, 1.0, 4.0], 1.05)
    assert sum(found) == pytest.approx(1)
    assert found[3] == pytest.approx(1.05 * 4 / 8)
    assert found[0] / found[1] == pytest.approx(2)
    assert shares([0.1] * 3, 1.5) == pytest.approx([1 / 3] * 3)


def test_shares_that_leave_nothing() -> None:
    with pytest.raises(BadInputError, match=r"pipeline.alpha is 1.4; expected less than 1.333"):
        shares([3.0, 1.0], 1.4)


def test_a_heavy_head_gets_fewer_layers() -> None:
    costs = StageCosts(1.0, head=3.0)
    assert split_layers(9, 4, "balanced", costs) == (2, 3, 3, 1)
    assert split_layers(9, 4, "auto", costs) == (2, 3, 3, 1)
    # In a V, the first rank has both the embedding and the head.
    assert split_layers(9, 2, "balanced", costs, chunks=2, folded=True) == (2, 3, 3, 1)


def test_chunks_of_a_rank_count_together() -> None:
    """3 3 2 2 and 3 2 3 2 have equally slow stages, but 3 3 2 2 gives each rank 5 layers, and 3 2 3 2 gives the first
    6."""
    split = split_layers(10, 2, "balanced", StageCosts(1.0), chunks=2)
    assert (split[0] + split[2], split[1] + split[3]) == (5, 5)
    assert max(split) == 3


def test_uniform_and_given() -> None:
    costs = StageCosts(1.0, head=9.0)
    assert split_layers(12, 2, "uniform", costs, chunks=2) == (3, 3, 3, 3)
    assert split_layers(8, 4, [2, 1, 1, 4], costs) == (2, 1, 1, 4)


@pytest.mark.parametrize(
    ("layers", "ranks", "chunks", "how", "sentence"),
    [
        (
            10,
            4,
            1,
            "uniform",
            r"pipeline.split is uniform.*model.layers \(10\).*to 8 or 12, or pipeline.split=balanced",
        ),
        (3, 4, 1, "auto", r"model.layers is 3; expected at least 4, .*parallel.pipeline \(4\)"),
        (7, 4, 2, "balanced", r"at least 8, .*parallel.pipeline \(4\) times pipeline.chunks \(2\)"),
        (8, 2, 1, [5, 4], r"pipeline.split is \[5, 4\], which sums to 9; expected the 8 of model.layers"),
        (8, 2, 1, [4, 2, 2], r"which is 3 stages; expected 2"),
        (8, 2, 1, [8, 0], r"at least 1 layer in every stage"),
    ],
)
def test_impossible(layers: int, ranks: int, chunks: int, how: object, sentence: str) -> None:
    with pytest.raises(BadInputError, match=sentence):
        split_layers(layers, ranks, how, StageCosts(1.0), chunks=chunks)  # type: ignore[arg-type]


@pytest.mark.parametrize("preset", ["gpt2-124m", "llama3-8b", "gpt-neox-20b"])
def test_costs_sum_to_the_models_flops(preset: str) -> None:
    """With half of attention's, which the causal mask hides."""
    config = PRESETS[preset]
    costs = stage_costs(config, 1024)
    hidden_by_mask = 6 * config.layers * config.hidden * 1024
    split = [config.layers // 2, config.layers - config.layers // 2]
    assert sum(costs.of(split)) == flops_per_token(config, 1024) - hidden_by_mask


def test_a_recomputed_layer_costs_a_third_more(tmp_path: Path) -> None:
    """And the head, which costs as much as four layers, does not."""
    (tmp_path / "tiny.yaml").write_text(
        "model: {family: llama, layers: 12, hidden: 64, heads: 2, ffn: 128, vocab: 2688, tie_embeddings: false}\n"
        "data: {path: set, sequence_length: 32}\ntrain: {global_batch: 8, microbatch: 1}\nparallel: {pipeline: 2}\n"
    )
    for recomputed, expected in (("none", (8, 4)), ("full", (7, 5)), ("{every: 2}", (7, 5))):
        keys = [f"activation_checkpointing={recomputed}"]
        plan = make_plan(*described_run(str(tmp_path / "tiny.yaml"), keys, 2))
        assert plan.pipeline.layers == expected
