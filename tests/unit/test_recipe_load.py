"""Reading recipes: which source overrides which, and that recipes contain only their own text."""

import re
from dataclasses import dataclass, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import NoneType
from typing import ClassVar, Literal, get_args, get_type_hints

import pytest
from llmtrain.cli.main import COMMANDS as OWN_COMMANDS
from llmtrain.cli.main import GROUPS
from llmtrain.cli.other_words import COMMANDS, OPTIONS
from llmtrain.cluster.description import Cluster
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError
from llmtrain.model.presets import PRESETS
from llmtrain.plan.resolve.check import check_given
from llmtrain.recipe.explain import unknown_key
from llmtrain.recipe.keys import recipe_keys
from llmtrain.recipe.load import as_data, load_recipe, parse_recipe
from llmtrain.recipe.other_words import KEYS, SECTIONS, UNSUPPORTED, VALUES, unsupported
from llmtrain.recipe.schema import EveryK
from llmtrain.yaml.dump import to_yaml
from llmtrain.yaml.expected import choices, options
from llmtrain.yaml.shipped import shipped_folder, shipped_names
from llmtrain.yaml.strict_file import StrictFile
from llmtrain.yaml.yaml11 import WORDS

BASE = (
    "name: the-base\nmodel: {preset: gpt2-1m}\ndata: {path: d, split: [8, 1, 1]}\ntrain: {steps: 5, global_batch: 4}\n"
)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("folder/base.yaml").write_text(BASE)


def test_the_later_wins() -> None:
    Path("folder/child.yaml").write_text("extends: base.yaml\ntrain: {steps: 6}\ndata: {split: [1, 1, 0]}\n")
    Path("grandchild.yaml").write_text("extends: folder/child.yaml\noptimizer: {lr: 1e-3}\n")
    recipe = load_recipe(
        "grandchild.yaml", ["train.global_batch=2", "optimizer.betas=[0.8, 0.9]", "train.compile=true"]
    )
    assert (recipe.train.steps, recipe.train.global_batch, recipe.train.compile) == (6, 2, True)
    assert recipe.data.split == (1.0, 1.0, 0.0)
    assert (recipe.optimizer.lr, recipe.optimizer.betas) == (1e-3, (0.8, 0.9))


def test_the_name_is_the_files_own() -> None:
    Path("child.yaml").write_text("extends: folder/base.yaml\n")
    assert load_recipe("folder/base.yaml").name == "the-base"
    assert load_recipe("child.yaml").name == "child"
    assert load_recipe("child.yaml", ["name=other"]).name == "other"


def test_extends_a_shipped_recipe_by_name() -> None:
    Path("mine.yaml").write_text("extends: quickstart\ntrain: {steps: 7}\n")
    mine, shipped = as_data(load_recipe("mine.yaml")), as_data(load_recipe("quickstart"))
    shipped["train"]["steps"] = 7
    assert mine == {**shipped, "name": "mine"}


def test_a_circle_of_recipes_is_refused() -> None:
    Path("a.yaml").write_text("extends: b.yaml\n")
    Path("b.yaml").write_text("extends: a.yaml\n")
    with pytest.raises(BadInputError, match=r"a\.yaml -> b\.yaml -> a\.yaml"):
        load_recipe("a.yaml")


def test_a_word_and_a_section_replace_each_other() -> None:
    first = load_recipe("folder/base.yaml", ["activation_checkpointing.every=2"])
    assert first.activation_checkpointing == EveryK(every=2)
    by_stage = load_recipe("folder/base.yaml", ["activation_checkpointing={every: [2, 3]}"])
    assert by_stage.activation_checkpointing == EveryK(every=(2, 3))
    with pytest.raises(BadInputError, match=r"activation_checkpointing\.every is \[\]; expected the blocks of a group"):
        load_recipe("folder/base.yaml", ["activation_checkpointing={every: []}"])
    Path("every.yaml").write_text(BASE + "activation_checkpointing: {every: 3}\n")
    assert load_recipe("every.yaml", ["activation_checkpointing=full"]).activation_checkpointing == "full"


def test_overrides_change_a_description_by_name() -> None:
    keys = ["cluster=p4d", "cluster.accelerator.memory=30GB", "cluster.accelerator.peak.bf16=300TFLOP/s"]
    found, whole = load_recipe("folder/base.yaml", keys).cluster, load_cluster("p4d")
    assert isinstance(found, Cluster)
    assert found.accelerator is not None
    assert (found.accelerator.memory, found.accelerator.peak["bf16"]) == ("30GB", "300TFLOP/s")
    assert replace(found, accelerator=whole.accelerator) == whole
    assert load_recipe("folder/base.yaml", [*keys, "cluster=frontier"]).cluster == "frontier"


def test_references_follow_overrides() -> None:
    Path("linked.yaml").write_text(BASE + "optimizer: {warmup: '${train.steps}'}\n")
    assert load_recipe("linked.yaml", ["train.steps=9"]).optimizer.warmup == 9


def test_the_environment_does_not_enter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    for text in ("${oc.env:SECRET}", "${oc.decode:${oc.env:SECRET}}", "${train.${oc.env:SECRET}}"):
        with pytest.raises(BadInputError) as caught:
            load_recipe("folder/base.yaml", [f"logging.wandb_project='{text}'"])
        assert "hunter2" not in str(caught.value)


def test_plain_data_and_back() -> None:
    recipe = load_recipe("folder/base.yaml", ["checkpoint.async=false", "activation_checkpointing.every=2"])
    data = as_data(recipe)
    assert data["checkpoint"]["async"] is False
    assert parse_recipe(data) == recipe


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_recipes_are_short_and_load(name: str) -> None:
    """A recipe without data names the missing key in a sentence; each recipe fits a screen."""
    if name != "quickstart":
        with pytest.raises(BadInputError, match=r"data\.path is missing; .* leaves it to you"):
            load_recipe(name)
    assert load_recipe(name, ["data.path=d"]).name == name
    assert len((shipped_folder() / f"{name}.yaml").read_text().splitlines()) <= 20


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("optimizer.weightdecay", "optimizer.weight_decay"),
        ("model.lr", "optimizer.lr"),
        ("sequence_length", "data.sequence_length"),
        ("data.sequence", "data.sequence_length"),
        ("train.step", "train.steps"),
        ("train.hiden", "model.hidden"),
        ("cluster.nodes[0].rank", "cluster.node.ranks"),
        ("parallel.tp", "parallel.tensor"),
        ("PARALLEL.Tensor", "parallel.tensor"),
        ("train.micro-batch-size", "train.microbatch"),
        ("zero_optimization.stage", "zero.stage"),
        ("fp16.loss_scale", "precision.loss_scale"),
        ("fp16.enabled", "precision.compute"),
        ("zero.offload_optimizer.device", "offload.optimizer"),
        ("data_parallel_replicate_degree", "parallel.data or zero.partition.weights"),
        ("optimizer.type", "optimizer.name"),
        ("checkpoint.interval", "checkpoint.every"),
        ("compile.enable", "train.compile"),
        ("activation_checkpoint.mode", "activation_checkpointing"),
        ("fsdp_reshard_after_forward", "zero.stage"),
        ("pipe-parallel-size", "parallel.pipeline"),
    ],
)
def test_nearest_key(key: str, nearest: str) -> None:
    assert unknown_key(key).endswith(f"; did you mean {nearest}?")


@pytest.mark.parametrize(
    "key",
    ["parallel.xp", "parallel.dat", "model.mod", "model.mode", "parallel.model", "parallel.ranking", "zero.level"],
)
def test_no_guess_from_few_letters_nor_of_what_is_far_off_nor_of_a_section(key: str) -> None:
    section = key.partition(".")[0]
    assert f"; {section} has the keys " in unknown_key(key)


@pytest.mark.parametrize(
    ("key", "near"), [("optimzer", "optimizer"), ("activation_checkpoint", "activation_checkpointing"), ("lr", None)]
)
def test_a_section_is_near_what_has_keys_of_its_own(key: str, near: str | None) -> None:
    advice = f"did you mean {near}?" if near else "`llmtrain recipes schema` lists the keys"
    for given in ([f"{key}={{a: 1}}"], []):
        Path("recipe.yaml").write_text(BASE + ("" if given else f"{key}: {{a: 1}}\n"))
        with pytest.raises(BadInputError) as caught:
            load_recipe("recipe.yaml", given)
        assert str(caught.value) == f"{key} is not a recipe key; {advice}"


def test_other_programs_words_lead_to_keys_that_are_there() -> None:
    known = recipe_keys()
    sections = {key for key, hint in known.items() if all(map(is_dataclass, {*options(hint)} - {NoneType}))}
    targets = {key for keys in KEYS.values() for key in keys.split(" or ")} | set(SECTIONS.values())
    targets |= {key for key, _ in VALUES if not key.startswith("--")}
    assert targets <= set(known) - sections
    assert set(SECTIONS) <= sections
    assert {value for (key, _), value in VALUES.items() if key == "model.preset"} <= set(PRESETS)
    for (key, _), value in VALUES.items():
        if key not in ("model.preset", "--split"):
            assert value in choices(known[key])


def test_other_programs_words_are_in_one_table() -> None:
    known = recipe_keys()
    accepted = {(key, word) for key, hint in known.items() for word in choices(hint)}
    accepted |= {("model.preset", preset) for preset in PRESETS}
    # A word that is a key in some section, or that a key accepts, must keep its own advice.
    assert not KEYS.keys() & {key.rpartition(".")[2] for key in known}
    assert not VALUES.keys() & accepted
    words = [*KEYS, *known, *(value for _, value in [*VALUES, *accepted])]
    assert [word for word in words if unsupported(word)] == []
    # As they are looked for.
    assert all(word == word.lower().replace("-", "_") for word in KEYS)
    assert all(value == value.lower() for _, value in VALUES)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("parallel.ep moe moe_router.topk model.num_experts expert-model-parallel-size parallel.expert", "mixtures"),
        ("parallel.cp parallel.context context_parallel_size context_parallel_degree", "context parallelism"),
        ("fsdp zero.fsdp_config.reshard", "the names of FSDP"),
        ("zero_optimization.overlap_comm reduce_bucket_size", "setting how communication overlaps"),
        ("init_method_std", "another standard deviation"),
        ("activation_checkpointing.selective_ac_option", "recomputing a part"),
        ("fp8_format", "computing in fp8"),
        ("lora peft.rank model.qlora", "adapters (LoRA)"),
        ("data.reset_attention_mask block_causal", "attention within single documents"),
        ("train.rampup_batch_size", "a batch that grows"),
        ("logging.tensorboard", "TensorBoard is not supported"),
    ],
)
def test_features_that_are_not_supported(words: str, why: str) -> None:
    for key in words.split():
        assert f"{key} is not a recipe key; {why}" in unknown_key(key)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("zero.preset=fsdp", "expected one of mics, zero++, topo; the names of FSDP are not supported"),
        ("zero.stage=FULL_SHARD", "expected one of 0, 1, 2, 3; the names of FSDP are not supported"),
        ("activation_checkpointing=selective", "recomputing a part of a block is not supported"),
        ("precision.compute=fp8", "computing in fp8 is not supported"),
        ("model.family=mixtral", "mixtures of experts (MoE) are not supported"),
        ("offload.optimizer=cpu", "did you mean host?"),
        ("pipeline.schedule=ZB-H1", "did you mean zero-bubble?"),
        ("pipeline.schedule=1F1B", "did you mean 1f1b?"),
    ],
)
def test_values_of_other_programs(override: str, said: str) -> None:
    with pytest.raises(BadInputError, match=rf"; {re.escape(said)}"):
        load_recipe("folder/base.yaml", [override])


def test_a_preset_with_experts_is_not_supported() -> None:
    with pytest.raises(BadInputError, match=r"is no preset; mixtures of experts \(MoE\) are not supported"):
        check_given(load_recipe("folder/base.yaml", ["model.preset=Mixtral-8x7B"]))


@pytest.mark.parametrize("why", UNSUPPORTED.values())
def test_what_is_nearest_is_there(why: str) -> None:
    assert re.fullmatch(r"[^.;]+ (?:is|are) not supported; the nearest .*[^.]", why)
    overrides = [word.rstrip(",") for word in why.split() if "=" in word]
    load_recipe("folder/base.yaml", overrides)
    keys = {word.rstrip(",") for word in why.split() if "." in word and "=" not in word}
    assert keys <= set(recipe_keys())
    assert overrides or keys


def test_other_programs_commands_lead_to_commands_and_options_that_are_there() -> None:
    for target in COMMANDS.values():
        command, _, inner = target.partition(" ")
        assert command in OWN_COMMANDS or hasattr(import_module(f"llmtrain.cli.{command}"), inner)
    assert not COMMANDS.keys() & {*OWN_COMMANDS, *GROUPS}
    for (command, _), option in OPTIONS.items():
        names = get_type_hints(getattr(import_module(f"llmtrain.cli.{command}"), command))
        assert option.removeprefix("--").replace("-", "_") in names


def test_what_is_like_no_key_gets_the_list() -> None:
    assert unknown_key("parallel.width").endswith("; parallel has the keys tensor, pipeline, data, sequence, order")
    assert unknown_key("width").endswith("; `llmtrain recipes schema` lists the keys")


UNQUOTED = ("off", "on", "yes", "no", "Off", "ON")
KEYS_OF_WORDS = [
    (key, word)
    for key, hint in recipe_keys().items()
    for word in get_args(hint)
    if word in (*WORDS[False], *WORDS[True])
]


@pytest.mark.parametrize(("key", "word"), KEYS_OF_WORDS)
def test_a_word_that_yaml_takes_for_a_boolean(key: str, word: str) -> None:
    section, _, leaf = key.rpartition(".")
    Path("recipe.yaml").write_text(f"extends: folder/base.yaml\n{section}: {{{leaf}: {word}}}\n")
    for recipe in (load_recipe("recipe.yaml"), load_recipe("folder/base.yaml", [f"{key}={word}"])):
        assert getattr(getattr(recipe, section), leaf) == word
        Path("again.yaml").write_text(to_yaml(as_data(recipe)))
        assert load_recipe("again.yaml") == recipe


def test_there_is_such_a_key() -> None:
    assert ("logging.wandb", "off") in KEYS_OF_WORDS


@dataclass(frozen=True, kw_only=True)
class Inner:
    """A section inside another section."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    answer: Literal["yes", "no"] = "no"
    count: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A section with keys of every kind that holds words or whole numbers."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    switch: Literal["off", "on"] | int = "off"
    flag: bool = False
    share: float = 0.0
    text: str | None = None
    inner: tuple[Inner, ...] = ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("switch: off", Outer(switch="off")),
        ("switch: On", Outer(switch="on")),
        ("switch: 1e3", Outer(switch=1000)),
        ("flag: on", Outer(flag=True)),
        ("flag: no", Outer(flag=False)),
        ("share: 1e-3", Outer(share=0.001)),
        ("share: 1e3", Outer(share=1000.0)),
        ("inner: [{answer: yes, count: 1e6}, {answer: off}]", Outer(inner=(Inner(answer="yes", count=10**6), Inner()))),
    ],
)
def test_a_file_of_any_section_is_taken_as_meant(text: str, expected: Outer) -> None:
    Path("outer.yaml").write_text(text)
    file = StrictFile(Outer, "an outer")
    assert file.parse(file.read(Path("outer.yaml")), "") == expected


@pytest.mark.parametrize(
    "text", ["text: off", "flag: 1", "share: on", "inner: [{count: 1.5}]", "inner: [{count: yes}]"]
)
def test_what_cannot_be_meant_is_refused(text: str) -> None:
    Path("outer.yaml").write_text(text)
    file = StrictFile(Outer, "an outer")
    with pytest.raises(BadInputError, match="expected"):
        file.parse(file.read(Path("outer.yaml")), "")


@pytest.mark.parametrize(
    "name", [*UNQUOTED, "1e3", "1:30", "0x1f", "1_000", "null", "~", "2024-01-01", "5.", "- a", "a: b"]
)
def test_what_is_written_reads_back(name: str) -> None:
    recipe = replace(load_recipe("folder/base.yaml"), name=name)
    Path("again.yaml").write_text(to_yaml(as_data(recipe)))
    assert load_recipe("again.yaml") == recipe


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "train: {steps:500, global_batch: 8}",
            "train has 'steps:500'; put a space after the colon: steps: 500",
        ),
        ("{name:first, seed: 1}", "the recipe has no space after 'name:'; put one there"),
    ],
)
def test_a_missing_space_after_a_colon(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "first.yaml").write_text(text)
    with pytest.raises(BadInputError) as raised:
        load_recipe(str(tmp_path / "first.yaml"))
    assert str(raised.value) == sentence
