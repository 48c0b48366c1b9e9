"""What the comments of recipes that come along say of hardware and work, against what the recipes come to."""

import re
from typing import Literal

import pytest
from llmtrain.plan.degrees import STATES_SHARE
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.resolve import Facts, resolve, shape, state_bytes
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain.yaml.shipped import shipped_folder, shipped_names

NEEDS = re.compile(
    r"Needs (\d+) (GPUs of|CPU with) (\d+) GB(?: of memory)?; model states take ([\d.]+) ([GM]B) of (?:each|it)\. "
    r"([\d.]+e\d+) FLOPs, (?:(\S+) GPU-hours at 300 TFLOP/s|minutes)\."
)
UNIT = {"GB": 1e9, "MB": 1e6}


def needs(name: str) -> tuple[re.Match[str], str]:
    """Return what a recipe's comment says that it needs, and the comment."""
    lines = (shipped_folder() / f"{name}.yaml").read_text().splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    found = NEEDS.search(comment)
    assert found, comment
    return found, comment


def resolved_on(name: str, ranks: int, device: Literal["cpu", "cuda"]) -> Recipe:
    # What is left to the user; quickstart's vocabulary is the size of its tokenizer.
    overrides = ["data.path=corpus", "data.tokenizer=null", *(["model.vocab=2048"] if name == "quickstart" else [])]
    return resolve(load_recipe(name, overrides), Facts(world=ranks, device=device, ranks_per_node=min(ranks, 8)))


@pytest.mark.parametrize("name", shipped_names())
def test_a_recipe_needs_what_its_comment_says(name: str) -> None:
    found, comment = needs(name)
    ranks, kind, memory, states, unit, flops, hours = found.groups()
    recipe = resolved_on(name, int(ranks), "cpu" if kind.startswith("CPU") else "cuda")
    held = state_bytes(recipe)
    assert f"{held / UNIT[unit]:.{len(states.partition('.')[2])}f}" == states
    # Activations and gathered weights need the rest; a microbatch's logits, of the largest of them, are there in the
    # compute dtype, in fp32, and as a gradient.
    assert held <= STATES_SHARE * int(memory) * 1e9
    logits = int(recipe.train.microbatch) * recipe.data.sequence_length * shape(recipe).vocab * (2 + 4 + 4)
    assert held + logits <= 0.8 * int(memory) * 1e9
    tokens = recipe.train.steps * recipe.train.global_batch * recipe.data.sequence_length
    work = tokens * flops_per_token(shape(recipe), recipe.data.sequence_length)
    assert f"{work:.1e}".replace("e+", "e") == flops
    assert hours is None or float(hours) == pytest.approx(work / 300e12 / 3600, rel=0.01)
    stated = re.search(r"([\d.]+) billion tokens", comment)
    assert stated is None or float(stated[1]) == pytest.approx(tokens / 1e9, rel=0.02)
