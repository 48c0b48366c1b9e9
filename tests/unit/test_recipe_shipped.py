"""The hardware and work in the comments of shipped recipes, against the values that the recipes resolve to."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from llmtrain.cluster.load import given_cluster
from llmtrain.plan.facts import Facts
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.per_rank.states import STATES_SHARE, most_states
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.views.view import view_recipe
from llmtrain.recipe.load import load_recipe
from llmtrain.yaml.shipped import shipped_folder, shipped_names

NEEDS = re.compile(
    r"Made for (\d+) (GPUs? of|CPU with) (\d+) GB(?: of memory)?; model states take ([\d.]+) ([GM]B) of (?:each|it)\. "
    r"([\d.]+e\d+) FLOPs, (?:(\S+) GPU-hours at 300 TFLOP/s|minutes)\."
)
UNIT = {"GB": 1e9, "MB": 1e6}


def needs(name: str) -> tuple[re.Match[str], str]:
    """Return the needs in a recipe's comment, and the comment."""
    lines = (shipped_folder() / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    found = NEEDS.search(comment)
    assert found, comment
    return found, comment


def plan_on(name: str, ranks: int, device: Literal["cpu", "cuda"]) -> Plan:
    # Keys that the user must set; quickstart's vocabulary is the size of its tokenizer.
    overrides = ["data.path=corpus", "data.tokenizer=null", *(["model.vocab=2048"] if name == "quickstart" else [])]
    # The cluster file names the volumes, but how much leaves is to be decided without its memory.
    if load_recipe(name, overrides).offload.optimizer == "nvme":
        overrides.append("offload.paths=[/scratch]")
    return make_plan(load_recipe(name, overrides), Facts(world=ranks, device=device, ranks_per_node=min(ranks, 8)))


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_needs_what_its_comment_says(name: str) -> None:
    found, comment = needs(name)
    ranks, kind, memory, states, unit, flops, hours = found.groups()
    plan = plan_on(name, int(ranks), "cpu" if kind.startswith("CPU") else "cuda")
    held = most_states(plan).total
    assert f"{held / UNIT[unit]:.{len(states.partition('.')[2])}f}" == states
    assert held <= STATES_SHARE * int(memory) * 1e9
    tokens = plan.training.steps * plan.batch.tokens
    work = tokens * flops_per_token(plan.model, plan.batch.sequence_length)
    assert f"{work:.1e}".replace("e+", "e") == flops
    assert hours is None or float(hours) == pytest.approx(work / 300e12 / 3600, rel=0.01)
    stated = re.search(r"([\d.]+) billion tokens", comment)
    assert stated is None or float(stated[1]) == pytest.approx(tokens / 1e9, rel=0.02)


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_without_released_weights_has_a_rate_for_training_from_scratch(name: str) -> None:
    recipe = load_recipe(name, ["data.path=corpus"])
    assert recipe.model.hf is not None or recipe.optimizer.lr > 9e-5


# config.json of Llama 3.1 8B and of Llama 3.2 1B, without what the program does not read.
SCALING = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
RELEASED_8B = {
    "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rope_scaling": SCALING,
}  # fmt: skip
RELEASED_1B = RELEASED_8B | {
    "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "head_dim": 64,
    "tie_word_embeddings": True, "rope_scaling": SCALING | {"factor": 32.0},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"), [("llama-1b", RELEASED_1B), ("llama-8b", RELEASED_8B), ("offload-llama-8b", RELEASED_8B)]
)
def test_a_recipe_starts_from_released_weights_as_its_comment_says(
    name: str, config: dict[str, object], tmp_path: Path
) -> None:
    """They have the sizes of the recipe's preset, so that its other numbers stay true."""
    Path(tmp_path, "config.json").write_text(json.dumps(config))
    found, comment = needs(name)
    keys = re.search(r"To start from released Llama [^#]*, add (model\.preset=null model\.hf=)FOLDER (\S+)", comment)
    assert keys, comment
    ranks, data = int(found[1]), ["data.path=corpus", "data.tokenizer=null"]
    own, released = (
        view_recipe(name, [*data, *words.split()], ranks) for words in ("", f"{keys[1]}{tmp_path} {keys[2]}")
    )
    assert released.problem is None
    assert replace(released.plan.model, positions=own.plan.model.positions, rope_scaling=None) == own.plan.model


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_fits_the_hardware_in_its_comment(name: str) -> None:
    found, _ = needs(name)
    ranks, kind, memory = found.groups()[:3]
    keys = ["data.path=corpus", "data.tokenizer=null"]
    if kind.startswith("CPU"):
        keys += [f"cluster={{accelerator: {{memory: {memory}GB}}, node: {{ranks: 1}}}}", "model.vocab=2048"]
        recipe = load_recipe(name, keys)
        plan = make_plan(recipe, Facts(world=1, device="cpu", cluster=given_cluster(recipe.cluster)))
        budget = memory_budget(plan)
    else:
        view = view_recipe(name, keys, int(ranks))
        assert (view.plan.device, view.problem, view.advice) == ("cuda", None, [])
        budget = view.budget
    assert budget.limit == int(memory) * 10**9
    assert 0 < budget.fullest.total <= budget.limit


def test_recomputation_where_memory_demands_it() -> None:
    """A 1B model needs none on cards of 80 GB, and some on half of them."""
    keys = ["data.path=corpus", "data.tokenizer=null"]
    assert view_recipe("llama-1b", keys, 8).plan.recomputes is False
    small = view_recipe("llama-1b", [*keys, "train.microbatch=8", "cluster.accelerator.memory=40GB"], 8)
    assert small.plan.recomputes
    assert small.problem is None


@pytest.mark.parametrize("name", [name for name in shipped_names() if name.startswith("offload-")])
def test_offload_fills_the_card(name: str) -> None:
    """The recipe fits its machine with a part of the states outside of the card, and does not fit without."""
    keys = ["data.path=corpus", "data.tokenizer=null"]
    view = view_recipe(name, keys, 1)
    assert view.problem is None
    assert 0 < view.plan.sharding.offload.share < 1
    assert view.budget.limit is not None
    assert view.budget.host_limit is not None
    assert view.budget.fullest.total > 0.98 * view.budget.limit
    assert view_recipe(name, [*keys, "offload.optimizer=none"], 1).problem is not None


@pytest.mark.parametrize("name", ["offload-llama-8b", "offload-llama-40b"])
def test_two_volumes(name: str) -> None:
    view = view_recipe(name, ["data.path=corpus", "data.tokenizer=null"], 1)
    assert view.plan.sharding.offload.paths == ("/scratch0", "/scratch1")
    assert view.budget.fullest.files > 0
