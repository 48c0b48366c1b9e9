"""A plan is complete: the value of each `auto`, and that a plan's record makes the same plan again."""

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from llmtrain.cluster.layout import Axis
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import decisions, record_changes
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe, parse_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.dump import to_yaml

RECIPE = """
model: {family: gpt2, layers: 12, hidden: 64, heads: 4, vocab: 100}
data: {path: corpus, sequence_length: 32}
train: {global_batch: 64}
"""
CPU = Facts(world=2, device="cpu")
GPU = Facts(world=2, device="cuda", apex=True)
FACTS = Facts(world=8, device="cpu", ranks_per_node=4)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def plan(*overrides: str, facts: Facts = FACTS) -> Plan:
    return make_plan(load_recipe("tiny.yaml", overrides), facts)


def recipe(*overrides: str, model: str = "{preset: gpt2-124m}") -> Recipe:
    Path("recipe.yaml").write_text(f"model: {model}\ndata: {{path: d, sequence_length: 64}}\n")
    return load_recipe("recipe.yaml", overrides)


def values(section: Any) -> Iterator[Any]:
    """Yield every value of a plan, including those in its sections, lists and record."""
    if is_dataclass(section):
        for entry in fields(section):
            yield from values(getattr(section, entry.name))
    elif isinstance(section, tuple | list | Mapping):
        for item in section.values() if isinstance(section, Mapping) else section:
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
    ("parallel.pipeline=2", "pipeline.split=[9,3]", "activation_checkpointing=auto"),
    ("parallel.pipeline=2", "activation_checkpointing={every: [2, 3]}"),
]


@pytest.mark.parametrize("overrides", LAYOUTS, ids=" ".join)
def test_nothing_is_left_to_decide(overrides: tuple[str, ...]) -> None:
    made = plan(*overrides)
    # Two keys have auto as a value: for a run without a description, and for a way to start.
    record = {**made.record, "cluster": None, "checkpoint": {**made.record["checkpoint"], "resume": None}}
    assert [value for value in values(replace(made, record=record)) if value == "auto"] == []
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
    assert (
        plan("activation_checkpointing=auto", f"parallel.pipeline={pipeline}").pipeline.recompute == (group,) * pipeline
    )


def test_recomputed_groups_of_unlike_stages() -> None:
    uneven = ("parallel.pipeline=2", "pipeline.split=[9,3]")
    made = plan("activation_checkpointing=auto", *uneven)
    assert made.pipeline.recompute == (3, 1)
    assert made.record["activation_checkpointing"] == {"every": [3, 1]}
    whole, last = made.stages_of(0)[0].groups, made.stages_of(7)[0].groups
    assert (whole, last) == (tuple(map(range, (0, 3, 6), (3, 6, 9))), tuple(map(range, (9, 10, 11), (10, 11, 12))))
    # One number applies to all stages; the last group of a stage may be smaller.
    one = plan("activation_checkpointing={every: 2}", *uneven)
    assert one.pipeline.recompute == (2, 2)
    assert one.stages_of(7)[0].groups == (range(9, 11), range(11, 12))
    assert one.record["activation_checkpointing"] == {"every": 2}


@pytest.mark.parametrize("pipeline", [1, 4])
def test_recomputed_groups_of_other_stages_are_refused(pipeline: int) -> None:
    said = rf"activation_checkpointing\.every is \[2, 3\], which is 2 stages; expected {pipeline}, one for each chunk"
    with pytest.raises(BadInputError, match=said):
        plan("activation_checkpointing={every: [2, 3]}", f"parallel.pipeline={pipeline}")


def test_recomputed_groups_have_at_most_all_layers() -> None:
    made = plan("activation_checkpointing={every: [2, 13]}", "parallel.pipeline=2")
    with pytest.raises(BadInputError, match=r"activation_checkpointing\.every is 13; expected at most .* \(12\)"):
        check(made, FACTS)


def test_batches_and_microbatches() -> None:
    made = plan("parallel.pipeline=2", "train.microbatch=2")
    assert (made.batch.sequences, made.batch.microbatch, made.batch.microbatches) == (64, 2, 8)
    assert made.batch.tokens == 64 * 32
    assert made.pipeline.schedule.microbatches == 8


def test_what_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"train\.microbatch is 3; expected a divisor of 8, the sequences"):
        plan("train.microbatch=3")
    with pytest.raises(BadInputError, match=r"parallel\.tensor"):
        plan("parallel.tensor=8", "model.heads=4")


@pytest.mark.parametrize("facts", [CPU, GPU])
@pytest.mark.parametrize("model", ["{preset: gpt2-124m}", "{preset: llama3.2-1b}", "{preset: pythia-70m}"])
def test_the_record_of_a_preset_makes_the_same_plan(facts: Facts, model: str) -> None:
    made = make_plan(recipe("activation_checkpointing=auto", model=model), facts)
    Path("resolved.yaml").write_text(to_yaml(made.record))
    assert make_plan(load_recipe("resolved.yaml"), facts) == made


def test_what_auto_becomes() -> None:
    on_cpu, on_gpu = (make_plan(recipe("activation_checkpointing=auto"), facts) for facts in (CPU, GPU))
    assert (on_cpu.compute, on_gpu.compute) == ("fp32", "bf16")
    without = [make_plan(recipe(), replace(GPU, triton=False, apex=apex)) for apex in (True, False)]
    made = (on_cpu, on_gpu, *without)
    backends = [{one.backend for one in each.sharding.placements.values()} for each in made]
    assert backends == [{"cpu"}, {"triton"}, {"apex"}, {"torch"}]
    assert on_cpu.grid.degree(Axis.DATA) == 2
    assert on_cpu.batch.microbatch == 4
    assert on_cpu.pipeline.recompute == (3,)  # of 12 layers: 3 and 4 are as near, 3 comes first


@pytest.mark.parametrize(("layers", "every"), [(1, 1), (7, 1), (16, 4), (24, 4), (36, 6), (44, 4), (48, 6)])
def test_activation_checkpointing_takes_the_factor_nearest_the_root(layers: int, every: int) -> None:
    made = make_plan(recipe("activation_checkpointing=auto", f"model.layers={layers}"), CPU)
    assert made.pipeline.recompute == (every,)
    assert made.record["activation_checkpointing"] == {"every": every}


@pytest.mark.parametrize(("batch", "microbatch"), [(2, 1), (12, 6), (22, 1), (64, 8), (42, 7)])
def test_microbatch_is_the_largest_divisor_up_to_8(batch: int, microbatch: int) -> None:
    assert make_plan(recipe(f"train.global_batch={batch}"), CPU).batch.microbatch == microbatch


@pytest.mark.parametrize(("batch", "microbatch"), [(64, 8), (32, 4), (8, 1), (4, 1), (36, 4), (7, 1)])
def test_microbatch_leaves_each_stage_four(batch: int, microbatch: int) -> None:
    made = make_plan(recipe(f"train.global_batch={batch}", "parallel.pipeline=2"), CPU)
    assert made.batch.microbatch == microbatch


@pytest.mark.parametrize(("compute", "without"), [("fp32", "efficient"), ("bf16", "flash")])
def test_attention_is_deterministic_where_the_recipe_is(compute: str, without: str) -> None:
    """torch's memory-efficient kernel adds with atomics in its backward pass."""
    keys = (f"precision.compute={compute}",)
    assert plan(*keys, facts=GPU).kernels.attention == without
    exact = plan(*keys, "train.deterministic=true", facts=GPU)
    assert exact.training.deterministic
    assert exact.kernels.attention == ("math" if compute == "fp32" else "flash")


def test_decisions_name_every_key_that_was_open() -> None:
    before = recipe("activation_checkpointing=auto")
    record = make_plan(before, CPU).record
    lines = decisions(before, record)
    assert lines[0].startswith("model: gpt2-124m -> family=gpt2 layers=12 hidden=768")
    assert set(lines[1:]) == {
        "train.microbatch: auto -> 4",
        "precision.compute: auto -> fp32",
        "parallel.data: auto -> 2",
        "optimizer.backend: auto -> cpu",
        "activation_checkpointing: auto -> {every: 3}",
    }
    assert decisions(parse_recipe(dict(record)), record) == []


def test_what_an_earlier_version_left_open_is_no_change() -> None:
    now = plan("zero.stage=1").record
    before = {**now, "train": {**now["train"], "attention": "auto", "steps": 7}, "offload": {"share": "auto"}}
    assert record_changes(before, now) == [f"train.steps: 7 -> {now['train']['steps']}"]


@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize("facts", [CPU, GPU])
def test_compiled_blocks_hand_nothing_back(facts: Facts, compiles: bool) -> None:
    made = plan("parallel.pipeline=2", f"train.compile={str(compiles).lower()}", facts=facts)
    assert made.training.compile is compiles
    # torch.compile hides the border between the gradients of inputs and of weights.
    assert made.pipeline.schedule.hands_back is not compiles


@pytest.mark.parametrize(
    ("stages", "batch", "refusal"),
    [
        (1, 100_000, None),
        (1, 2**19, "has 524,288 microbatches; expected at most 262,144"),
        (2, 2**16, "has 65,536 microbatches through 2 stages; expected a product of at most 65,536"),
    ],
)
def test_microbatches_are_counted_before_lists_of_them_are_made(stages: int, batch: int, refusal: str | None) -> None:
    given = recipe(
        f"train.global_batch={batch}", "train.microbatch=1", f"parallel.pipeline={stages}", "train.steps=200"
    )
    facts = Facts(world=stages, device="cpu")
    if refusal is None:
        make_plan(given, facts)
    else:
        with pytest.raises(BadInputError, match=refusal):
            make_plan(given, facts)
