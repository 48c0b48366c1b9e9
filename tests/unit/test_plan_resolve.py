"""Resolving: what each `auto` becomes, and that a resolved recipe says everything."""

from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.errors import BadInputError
from llmtrain.model.config import GPTConfig
from llmtrain.model.presets import PRESETS
from llmtrain.plan.check import advice, check, found_elsewhere
from llmtrain.plan.make import make_plan
from llmtrain.plan.prepare import prepared
from llmtrain.plan.resolve import Facts, as_data, decisions, resolve, shape, to_yaml
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import EveryK, Recipe

CPU = Facts(world=2, device="cpu")
GPU = Facts(world=2, device="cuda", apex=True)


def recipe(*overrides: str, model: str = "{preset: gpt2-124m}") -> Recipe:
    Path("recipe.yaml").write_text(f"model: {model}\ndata: {{path: d, sequence_length: 64}}\n")
    return load_recipe("recipe.yaml", overrides)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refuse_hf(folder: Path) -> GPTConfig:
    raise AssertionError(f"{folder} is not to be read")


@pytest.mark.parametrize("facts", [CPU, GPU])
@pytest.mark.parametrize("model", ["{preset: gpt2-124m}", "{preset: llama3.2-1b}", "{preset: pythia-70m}"])
def test_resolving_twice_changes_nothing(facts: Facts, model: str) -> None:
    resolved = resolve(recipe("activation_checkpointing=auto", model=model), facts)
    assert resolve(resolved, facts) == resolved
    Path("resolved.yaml").write_text(to_yaml(as_data(resolved)))
    again = load_recipe("resolved.yaml")
    assert replace(again, name=resolved.name) == resolved
    assert shape(again) == shape(resolved)


def test_what_auto_becomes() -> None:
    on_cpu, on_gpu = (resolve(recipe("activation_checkpointing=auto"), facts) for facts in (CPU, GPU))
    assert (on_cpu.precision.compute, on_gpu.precision.compute) == ("fp32", "bf16")
    assert (on_cpu.optimizer.backend, on_gpu.optimizer.backend) == ("torch", "apex")
    assert on_cpu.parallel.data == 2
    assert on_cpu.train.microbatch == 4
    assert on_cpu.activation_checkpointing == EveryK(every=3)  # of 12 layers: 3 and 4 are as near, 3 comes first


@pytest.mark.parametrize(("layers", "every"), [(1, 1), (7, 1), (16, 4), (24, 4), (36, 6), (44, 4), (48, 6)])
def test_activation_checkpointing_takes_the_factor_nearest_the_root(layers: int, every: int) -> None:
    resolved = resolve(recipe("activation_checkpointing=auto", f"model.layers={layers}"), CPU)
    assert resolved.activation_checkpointing == EveryK(every=every)


@pytest.mark.parametrize(("batch", "microbatch"), [(2, 1), (12, 6), (22, 1), (64, 8), (42, 7)])
def test_microbatch_is_the_largest_divisor_up_to_8(batch: int, microbatch: int) -> None:
    assert resolve(recipe(f"train.global_batch={batch}"), CPU).train.microbatch == microbatch


@pytest.mark.parametrize(("batch", "microbatch"), [(64, 8), (32, 4), (8, 1), (4, 1), (36, 4), (7, 1)])
def test_microbatch_leaves_each_stage_four(batch: int, microbatch: int) -> None:
    resolved = resolve(recipe(f"train.global_batch={batch}", "parallel.pipeline=2"), CPU)
    assert resolved.train.microbatch == microbatch


def test_vocabulary_comes_from_the_tokenizer_unless_given() -> None:
    known = replace(CPU, tokenizer=3000)
    assert shape(resolve(recipe(), known)).vocab == 3000
    assert shape(resolve(recipe("model.vocab=auto"), known)).vocab == 3000
    assert shape(resolve(recipe("model.vocab=4096"), known)).vocab == 4096
    assert shape(resolve(recipe("model.vocab=auto"), CPU)).vocab == 50257
    with pytest.raises(BadInputError, match=r"model\.vocab is 100; expected at least the 3000"):
        check(resolve(recipe("model.vocab=100"), known), known)


def test_families_fill_in_their_sizes() -> None:
    sizes = "layers: 2, hidden: 192, heads: 6, vocab: 100"
    llama = shape(resolve(recipe(model=f"{{family: llama, {sizes}}}"), CPU))
    assert (llama.ffn, llama.kv_heads, llama.positions, llama.tie_embeddings) == (512, 6, 64, False)
    gpt2 = shape(resolve(recipe(model=f"{{family: gpt2, {sizes}}}"), CPU))
    assert (gpt2.ffn, gpt2.tie_embeddings) == (768, True)
    neox = shape(resolve(recipe(model=f"{{family: neox, {sizes}}}"), CPU))
    assert (neox.rotary_fraction, neox.rotary_dim) == (0.25, 8)


def test_a_changed_preset_stays_in_proportion() -> None:
    config = shape(resolve(recipe("model.hidden=384", "model.heads=6"), CPU))
    assert config == replace(PRESETS["gpt2-124m"], hidden=384, heads=6, kv_heads=6, ffn=1536)


def test_a_hugging_face_model_keeps_its_sizes() -> None:
    facts = replace(CPU, hf=PRESETS["llama3.2-1b"], tokenizer=128_000)
    resolved = resolve(recipe(model="{hf: somewhere}"), facts)
    assert shape(resolved) == PRESETS["llama3.2-1b"]
    assert resolved.model.hf == "somewhere"
    assert resolve(resolved, facts) == resolved
    check(resolved, facts)
    longer = resolve(recipe("model.positions=16384", model="{hf: somewhere}"), facts)
    check(longer, facts)
    with pytest.raises(BadInputError, match=r"model\.layers is 3, but the model in model\.hf has 16"):
        check(resolve(recipe("model.layers=3", model="{hf: somewhere}"), facts), facts)


def test_decisions_name_every_key_that_was_open() -> None:
    before = recipe("activation_checkpointing=auto")
    lines = decisions(before, resolve(before, CPU))
    assert lines[0].startswith("model: gpt2-124m -> family=gpt2 layers=12 hidden=768")
    assert set(lines[1:]) == {
        "train.microbatch: auto -> 4",
        "precision.compute: auto -> fp32",
        "parallel.data: auto -> 2",
        "optimizer.backend: auto -> torch",
        "activation_checkpointing: auto -> {every: 3}",
    }
    assert decisions(resolve(before, CPU), resolve(before, CPU)) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["on_spike.action=rewind"], "on_spike.action is rewind, but without on_spike.threshold"),
        (["on_spike={action: rewind, threshold: 2}"], None),
        (["pipeline.schedule=gpipe"], None),
        (["pipeline.limit=3"], "pipeline.limit is 3, which pipeline.schedule 1f1b does not have"),
        (["pipeline.limit=3", "pipeline.schedule=message-driven"], None),
        (["pipeline.limit=3", "parallel.pipeline=1"], None),
        (["zero.hierarchical=false"], "zero.hierarchical is false, but every rank holds all weights"),
        (["zero.hierarchical=false", "zero.stage=2"], "zero.hierarchical is false, but every rank holds all weights"),
        (["zero.hierarchical=false", "zero.stage=3"], None),
        (["zero.hierarchical=false", "parallel.pipeline=4"], None),
        (["zero.hierarchical=true"], None),
    ],
)
def test_keys_that_have_no_effect_are_told(overrides: list[str], said: str | None) -> None:
    facts = Facts(world=4, device="cpu")
    resolved = resolve(recipe("parallel.pipeline=2", "train.microbatch=1", *overrides), facts)
    found = advice(resolved, make_plan(resolved, facts))
    assert [sentence for sentence in found if said and sentence.startswith(said)] == found
    assert len(found) == (said is not None)


def test_prepared_looks_the_tokenizer_up() -> None:
    recipe()
    for suffix in ("bin", "idx"):
        Path(f"d.{suffix}").touch()
    Path("tokenizer").mkdir()
    Path("tokenizer/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    found = prepared("recipe.yaml", ["data.tokenizer=tokenizer"], CPU, refuse_hf)
    assert shape(found).vocab == 3
    Path("tokenizer/tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match=r"data\.tokenizer is tokenizer: .*tokenizer\.json has no vocabulary"):
        prepared("recipe.yaml", ["data.tokenizer=tokenizer"], CPU, refuse_hf)


@pytest.mark.parametrize("path", ["data.path=sets/d", "data.tokenizer=sets/tokenizer"])
def test_a_path_that_was_relative_to_another_folder_is_found(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe()
    here = Path.cwd()
    for folder in ("sets/tokenizer", "recipes", "elsewhere"):
        Path(folder).mkdir(parents=True)
    for file in ("d.bin", "d.idx", "sets/d.bin", "sets/d.idx"):
        Path(file).touch()
    Path("recipe.yaml").rename("recipes/recipe.yaml")
    monkeypatch.chdir("elsewhere")
    for file in ("d.bin", "d.idx"):
        Path(file).touch()
    key, _, value = path.partition("=")
    with pytest.raises(BadInputError) as found:
        prepared("../recipes/recipe.yaml", [path], CPU, refuse_hf)
    assert str(found.value).startswith(f"{key} is {value}, ")
    assert str(found.value).endswith(f"there is one in {here}: run from there, or give {here / value}")


def test_a_folder_that_cannot_be_looked_into_has_nothing() -> None:
    """A run's folder may be in the closed home of another user, or have a name that no file has."""
    assert found_elsewhere("d", ".bin", [Path("x" * 300), Path("\0")]) == ""


@pytest.mark.parametrize(
    ("stages", "batch", "refusal"),
    [
        (1, 100_000, None),
        (1, 2**19, "has 524,288 microbatches; expected at most 262,144"),
        (2, 2**16, "has 65,536 microbatches through 2 pieces of the model; expected a product of at most 65,536"),
    ],
)
def test_microbatches_are_counted_before_lists_of_them_are_made(stages: int, batch: int, refusal: str | None) -> None:
    given = recipe(
        f"train.global_batch={batch}", "train.microbatch=1", f"parallel.pipeline={stages}", "train.steps=200"
    )
    facts = Facts(world=stages, device="cpu")
    resolved = resolve(given, facts)
    if refusal is None:
        check(resolved, facts)
    else:
        with pytest.raises(BadInputError, match=refusal):
            check(resolved, facts)
