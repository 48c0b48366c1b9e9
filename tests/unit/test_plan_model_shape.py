"""The shape of a recipe's model, and the source of each size."""

from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.model.config import RopeScaling
from llmtrain.model.presets import PRESETS
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.check import check
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.model_shape import model_shape
from llmtrain.recipe.load import load_recipe, parse_recipe
from llmtrain.recipe.schema import Recipe

CPU = Facts(world=2, device="cpu")


def recipe(*overrides: str, model: str = "{preset: gpt2-124m}") -> Recipe:
    Path("recipe.yaml").write_text(f"model: {model}\ndata: {{path: d, sequence_length: 64}}\n")
    return load_recipe("recipe.yaml", overrides)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_vocabulary_comes_from_the_tokenizer_unless_given() -> None:
    known = replace(CPU, tokenizer=3000)
    assert model_shape(recipe(), known).vocab == 3000
    assert model_shape(recipe("model.vocab=auto"), known).vocab == 3000
    assert model_shape(recipe("model.vocab=4096"), known).vocab == 4096
    assert model_shape(recipe("model.vocab=auto"), CPU).vocab == 50257
    with pytest.raises(BadInputError, match=r"model\.vocab is 100; expected at least the 3000"):
        check(make_plan(recipe("model.vocab=100"), known), known)
    # A model that exists already keeps its vocabulary: raising model.vocab would be refused next.
    imported = replace(known, hf=replace(PRESETS["gpt2-124m"], vocab=100))
    for given, facts in (
        (recipe(model="{hf: d}"), imported),
        (recipe("model.vocab=100", "checkpoint.weights=d"), known),
        (recipe("model.vocab=100", "checkpoint.resume=d"), known),
    ):
        with pytest.raises(BadInputError, match=r"vocab is 100; data\.tokenizer has 3000 ids; leave data\.tokenizer"):
            check(make_plan(given, facts), facts)


def test_a_tokenizer_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    recipe("data.tokenizer=gone")
    assert main(["plan", "recipe.yaml", "data.tokenizer=gone"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "data.tokenizer is gone, which is not here, so this plan has the 50257 ids of model.preset; set" in said
    assert main(["plan", "recipe.yaml", "data.tokenizer=gone", "model.vocab=300"]) == 0
    assert "which is not here" not in capsys.readouterr().out
    recipe(model="{family: llama, layers: 2, hidden: 192, heads: 6}")
    assert main(["plan", "recipe.yaml", "data.tokenizer=gone"]) == 2
    assert "data.tokenizer is gone, which is not here; set model.vocab to its size" in capsys.readouterr().err


def test_families_fill_in_their_sizes() -> None:
    sizes = "layers: 2, hidden: 192, heads: 6, vocab: 100"
    llama = model_shape(recipe(model=f"{{family: llama, {sizes}}}"), CPU)
    assert (llama.ffn, llama.kv_heads, llama.positions, llama.tie_embeddings) == (512, 6, 64, False)
    gpt2 = model_shape(recipe(model=f"{{family: gpt2, {sizes}}}"), CPU)
    assert (gpt2.ffn, gpt2.tie_embeddings) == (768, True)
    neox = model_shape(recipe(model=f"{{family: neox, {sizes}}}"), CPU)
    assert (neox.rotary_fraction, neox.rotary_dim) == (0.25, 8)


def test_swiglu_is_of_one_family() -> None:
    with pytest.raises(BadInputError, match=r"family llama, and no other, has swiglu; leave model\.activation out"):
        model_shape(recipe("model.activation=gelu", model="{preset: llama3.2-1b}"), CPU)


def test_a_changed_preset_stays_in_proportion() -> None:
    config = model_shape(recipe("model.hidden=384", "model.heads=6"), CPU)
    assert config == replace(PRESETS["gpt2-124m"], hidden=384, heads=6, kv_heads=6, ffn=1536)


def test_a_hugging_face_model_keeps_its_sizes() -> None:
    facts = replace(CPU, hf=PRESETS["llama3.2-1b"], tokenizer=128_000)
    plan = make_plan(recipe(model="{hf: somewhere}"), facts)
    assert plan.model == PRESETS["llama3.2-1b"]
    assert plan.import_from == "somewhere"
    assert make_plan(parse_recipe(dict(plan.record)), facts) == plan
    check(plan, facts)
    longer = recipe("model.positions=16384", "model.rope_theta=1e6", model="{hf: somewhere}")
    check(make_plan(longer, facts), facts)
    scaled = recipe("model.rope_scaling={factor: 8, original_positions: 8192}", model="{hf: somewhere}")
    plan = make_plan(scaled, facts)
    assert plan.model.rope_scaling == RopeScaling(factor=8, original_positions=8192)
    assert make_plan(parse_recipe(dict(plan.record)), facts) == plan
    check(plan, facts)
    with pytest.raises(BadInputError, match=r"model\.layers is 3, but the model in model\.hf has 16"):
        check(make_plan(recipe("model.layers=3", model="{hf: somewhere}"), facts), facts)
