"""A plan is complete: nothing is left to decide, and a resolved recipe makes the same one again."""

from collections.abc import Iterator
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cluster.layout import Axis
from llmtrain.errors import BadInputError
from llmtrain.plan.make import make_plan
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve import Facts, decided, resolve, to_yaml
from llmtrain.recipe.load import load_recipe

RECIPE = """
model: {family: gpt2, layers: 12, hidden: 64, heads: 4, vocab: 100}
data: {path: corpus, sequence_length: 32}
train: {global_batch: 64}
"""
FACTS = Facts(world=8, device="cpu", ranks_per_node=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def plan(*overrides: str, facts: Facts = FACTS) -> Plan:
    return make_plan(resolve(load_recipe("tiny.yaml", overrides), facts), facts)


def values(section: Any) -> Iterator[Any]:
    """Every value of a plan, those of its sections and lists too."""
    if is_dataclass(section):
        for entry in fields(section):
            yield from values(getattr(section, entry.name))
    elif isinstance(section, tuple | list):
        for item in section:
            yield from values(item)
    else:
        yield section


LAYOUTS = [
    (),
    ("zero.stage=3",),
    ("zero.preset=topo",),
    ("parallel.pipeline=4",),
    ("parallel.pipeline=2", "parallel.tensor=2", "pipeline.schedule=interleaved", "activation_checkpointing=auto"),
    ("parallel.pipeline=2", "pipeline.schedule=message-driven"),
]


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_nothing_is_left_to_decide(overrides: tuple[str, ...]) -> None:
    made = plan(*overrides)
    # A checkpoint's `resume: auto` is a choice that the run folder makes.
    assert [value for value in values(made) if value == "auto"] == ["auto"]
    assert made.checkpoint.resume == "auto"
    with pytest.raises(FrozenInstanceError):
        made.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_a_resolved_recipe_makes_the_same_plan(overrides: tuple[str, ...]) -> None:
    made = plan(*overrides)
    Path("tiny.yaml").write_text(to_yaml(made.record))
    assert plan() == made


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_stages_hold_every_layer_once(overrides: tuple[str, ...]) -> None:
    made = plan(*overrides)
    held = sorted((stage.first, stage.end) for stages in made.pipeline.stages for stage in stages)
    assert [end for _, end in held][:-1] == [first for first, _ in held][1:]
    assert (held[0][0], held[-1][1]) == (0, 12)
    assert tuple(end - first for first, end in held) == made.pipeline.layers
    for rank in range(8):
        assert made.stages_of(rank) == made.pipeline.stages[made.grid.coordinate(rank, Axis.PIPELINE)]


@pytest.mark.parametrize(("pipeline", "group"), [(1, 3), (2, 2), (4, 1)])
def test_recomputed_groups_follow_the_layers_of_a_stage(pipeline: int, group: int) -> None:
    assert plan("activation_checkpointing=auto", f"parallel.pipeline={pipeline}").recompute == group


def test_batches_and_microbatches() -> None:
    made = plan("parallel.pipeline=2", "train.microbatch=2")
    assert (made.batch.sequences, made.batch.microbatch, made.batch.microbatches) == (64, 2, 8)
    assert made.batch.tokens == 64 * 32
    assert made.pipeline.schedule.microbatches == 8


def test_what_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"train\.microbatch is 3; expected a divisor of the 8 sequences"):
        plan("train.microbatch=3")
    with pytest.raises(BadInputError, match=r"parallel\.tensor"):
        plan("parallel.tensor=8", "model.heads=4")


@pytest.mark.parametrize("left", ["auto", "uniform"])
def test_a_value_that_is_not_decided_is_told(left: str) -> None:
    with pytest.raises(ValueError, match=f"{left} is left in a resolved recipe"):
        decided(left)
