"""Checks before a run starts: keys without effect, references by name, and paths."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.load import given_cluster
from llmtrain.errors import BadInputError
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.check import advice, check
from llmtrain.plan.resolve.folders import check_folders, found_elsewhere
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import check_and_plan, folders_above
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe

CPU = Facts(world=2, device="cpu")


def recipe(*overrides: str, model: str = "{preset: gpt2-124m}") -> Recipe:
    Path("recipe.yaml").write_text(f"model: {model}\ndata: {{path: d, sequence_length: 64}}\n")
    return load_recipe("recipe.yaml", overrides)


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], None),
        (["on_spike.action=rewind"], "on_spike.action is rewind, but without on_spike.threshold"),
        (["on_spike={action: rewind, threshold: 2}"], None),
        (
            ["on_spike.window=9"],
            "on_spike.window is 9, but without on_spike.threshold nothing is a spike, so that it has",
        ),
        (["on_spike={window: 9, threshold: 2}"], None),
        (["optimizer.decay=0.3"], "optimizer.decay is 0.3, but optimizer.schedule is cosine, so that it has no effect"),
        (["optimizer={decay: 0.3, schedule: wsd, min_lr: 0.2}"], None),
        (
            ["optimizer={min_lr: 0.2, schedule: constant}"],
            "optimizer.min_lr is 0.2, but optimizer.schedule is constant",
        ),
        (["precision.loss_scale=256"], "precision.loss_scale is 256.0, but precision.compute is fp32"),
        (["precision.loss_scale_window=9"], "precision.loss_scale_window is 9, but precision.compute is fp32"),
        (["precision={loss_scale: 256, loss_scale_window: 9, compute: fp16}"], None),
        (["train={eval_batches: 9, eval_every: 0}"], "train.eval_batches is 9, but train.eval_every is 0"),
        (["train.eval_batches=9"], None),
        (["logging.wandb_project=mine"], "logging.wandb_project is mine, but logging.wandb is off"),
        (["logging={wandb_project: mine, wandb: offline}"], None),
        (["cluster={node: {ranks: 2}, between: {bandwidth: 1Gbit/s}}"], "cluster.between is given, but there is one"),
        (["optimizer={lr: 6e-4, min_lr: 6e-5}"], "optimizer.min_lr is 6e-05, a share of optimizer.lr, so that the"),
        (["optimizer={lr: 6e-4, min_lr: 0.01}"], None),
        (["optimizer={lr: 6e-4, min_lr: 0.0}"], None),
        (["pipeline.schedule=gpipe"], None),
        (["pipeline.limit=3"], "pipeline.limit is 3, which pipeline.schedule 1f1b does not have"),
        (["pipeline.limit=3", "pipeline.schedule=message-driven"], None),
        (["pipeline.limit=3", "parallel.pipeline=1"], "pipeline.limit is 3, but parallel.pipeline is 1, so that"),
        (["pipeline.chunks=3", "parallel.pipeline=1"], "pipeline.chunks is 3, but parallel.pipeline is 1, so that"),
        (
            ["pipeline.split=[4,8]", "parallel.pipeline=1"],
            "pipeline.split is [4, 8], but parallel.pipeline is 1, so that all layers are on one rank; leave it out",
        ),
        (["pipeline={split: balanced, chunks: 1, limit: 1}", "parallel.pipeline=1"], None),
        (
            ["pipeline={schedule: breadth-first, chunks: 3}", "parallel.pipeline=1", "activation_checkpointing=full"],
            None,
        ),
        (["zero.hierarchical=false"], "zero.hierarchical is false, but every rank holds all weights"),
        (["zero.hierarchical=false", "zero.stage=2"], "zero.hierarchical is false, but every rank holds all weights"),
        (["zero.hierarchical=false", "zero.stage=3"], None),
        (["zero.hierarchical=false", "parallel.pipeline=4"], None),
        (["zero.hierarchical=true"], None),
        (["zero.resident=2GB"], "zero.resident is 2000000000, but every rank holds all weights"),
        (["zero.resident=2GB", "zero.stage=3"], None),
        (
            ["offload={share: 0.5, bucket: 2048}"],
            "offload.share is 0.5 and offload.bucket is 2048, but offload.optimizer",
        ),
        (["precision={compute: fp32, gradients: compute}"], "precision.gradients is compute, but precision.compute is"),
        (["precision={compute: bf16, gradients: compute}"], None),
        (["precision={compute: bf16, reduce: fp32}", "zero.stage=3"], "precision.reduce is fp32, but each rank sends"),
        (["precision={compute: bf16, reduce: fp32}", "zero.stage=1"], None),
        (["precision={compute: bf16, reduce: fp32}", "zero.preset=mics", "zero.partition.weights=1"], None),
        (["precision={compute: fp32, reduce: fp32}", "zero.stage=3"], None),
        (["offload={share: 0.5, bucket: 2048, optimizer: host}"], None),
        (["offload={bucket: 2048, gradients: host}"], None),
        (["offload={share: 0.5, bucket: 2048, gradients: host}"], "offload.share is 0.5, but offload.optimizer"),
        (
            ["offload.parameters=host", "pipeline.schedule=message-driven"],
            "offload.parameters is host, but pipeline.schedule message-driven",
        ),
    ],
)
def test_keys_that_have_no_effect_are_told(overrides: list[str], said: str | None) -> None:
    given = recipe("parallel.pipeline=2", "train.microbatch=1", *overrides)
    found = advice(given, make_plan(given, Facts(world=4, device="cpu", cluster=given_cluster(given.cluster))))
    assert [sentence for sentence in found if said and sentence.startswith(said)] == found
    assert len(found) == (said is not None)


def test_the_cpu_kernel_is_refused_on_a_gpu() -> None:
    given, gpu = recipe("optimizer.backend=cpu"), Facts(world=2, device="cuda")
    check(make_plan(given, CPU), CPU)
    with pytest.raises(BadInputError, match=r"optimizer\.backend is cpu, and the run computes on a GPU"):
        check(make_plan(given, gpu), gpu)


@pytest.mark.parametrize("facts", [CPU, Facts(world=2, device="cuda", triton=False)])
def test_the_triton_kernel_is_refused_without_a_gpu_or_triton(facts: Facts) -> None:
    with pytest.raises(BadInputError, match=r"optimizer\.backend is triton, which needs Triton and a GPU"):
        check(make_plan(recipe("optimizer.backend=triton"), facts), facts)


def test_apex_is_refused_where_it_is_absent_and_assumed_on_described_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    given, gpu = recipe("optimizer.backend=apex"), Facts(world=2, device="cuda")
    with pytest.raises(BadInputError, match=r"optimizer\.backend is apex, which needs NVIDIA's apex and a GPU"):
        check(make_plan(given, gpu), gpu)
    command = ["plan", "recipe.yaml", "optimizer.backend=apex"]
    assert main([*command, "cluster={accelerator: {memory: 80GB}, node: {ranks: 2}}"]) == 0
    assert "this plan assumes that NVIDIA's apex is installed where it runs" in capsys.readouterr().out
    assert main(command) == 2
    assert "which needs NVIDIA's apex and a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["offload.gradients=host"], "offload.gradients is host, where all sums are fp32"),
        (["offload.parameters=nvme", "offload.paths=[.]"], "offload.gradients is nvme, where all sums are fp32"),
        (["optimizer.backend=torch"], "the kernel of the optimizer step (torch) reads no bf16 gradients"),
        (["precision.compute=fp16"], "the kernel of the optimizer step (cpu) reads no fp16 gradients"),
    ],
)
def test_gradients_are_not_summed_in_16_bits_everywhere(overrides: list[str], said: str) -> None:
    narrow = ("precision.compute=bf16", "precision.gradients=compute")
    check(make_plan(recipe(*overrides, narrow[0]), CPU), CPU)
    with pytest.raises(BadInputError, match=rf"precision\.gradients is compute, but {re.escape(said)}"):
        check(make_plan(recipe(*narrow, *overrides), CPU), CPU)


@pytest.mark.parametrize("key", ["precision.reduce=fp32", "precision.compute=fp32", "train.compile=true"])
def test_sums_that_tensor_parallel_ranks_average_stay_on_the_gpu(key: str) -> None:
    """NCCL's order of fp32 sums differs between their groups, and Inductor's kernels between ranks. On CPUs they do
    not."""
    keys, gpu = ("parallel.tensor=2", "offload={parameters: host}"), Facts(world=2, device="cuda")
    assert make_plan(recipe(*keys), gpu).record["offload"]["gradients"] == "host"
    for facts, found in ((gpu, "none"), (CPU, "host")):
        plan = make_plan(recipe(*keys, key), facts)
        assert plan.averages_replicas is (facts == gpu)
        assert plan.record["offload"]["gradients"] == found
        assert any(one.moves_gradients for one in plan.sharding.placements.values()) is (found == "host")
    said = rf"offload\.gradients is host, but with {re.escape(key)} tensor-parallel ranks add up gradients"
    with pytest.raises(BadInputError, match=said):
        make_plan(recipe(*keys, key, "offload.gradients=host"), gpu)


def test_buffers_that_nothing_registers_are_told() -> None:
    given = recipe("zero={stage: 3, registered: true}")
    for facts, said in (
        (Facts(world=2, device="cuda"), None),
        (Facts(world=1, device="cuda"), "no other data-parallel rank has gradients to add"),
        (Facts(world=2, device="cpu"), "NCCL does not join CPUs"),
    ):
        plan = make_plan(given, facts)
        found = [one for one in advice(given, plan) if one.startswith("zero.registered is true")]
        assert found == ([] if said is None else [f"zero.registered is true, but {said}; leave it out"])
        assert plan.sharding.registered == (said is None)


@pytest.mark.parametrize(
    ("offload", "said"),
    [
        ("{optimizer: host, parameters: host, spare: 0.5}", "offload.spare is 0.5, but no gradients are complete"),
        ("{optimizer: host, spare: 0.5}", None),
        ("{optimizer: host, parameters: host}", None),
        ("{optimizer: host, share: 0}", "offload.share is 0, so that offload.optimizer=host moves nothing"),
        ("{optimizer: host, share: 0.5}", None),
        ("{optimizer: host, spare_weights: device}", None),
        ("{optimizer: host, spare_weights: host, spare: 0}", None),
        (
            "{optimizer: host, spare_weights: device, spare: 0}",
            "offload.spare_weights is device, but offload.spare is 0",
        ),
        (
            "{optimizer: host, spare_weights: device, parameters: host, gradients: none}",
            "offload.spare_weights is device, but offload.parameters is host, so that weights rest there",
        ),
        ("{spare_weights: device}", "offload.spare_weights is device, but offload.optimizer is none"),
    ],
)
def test_keys_of_offload_that_do_nothing_are_told(offload: str, said: str | None) -> None:
    given, gpu = recipe(f"offload={offload}"), Facts(world=2, device="cuda")
    found = [one for one in advice(given, make_plan(given, gpu)) if one.startswith("offload.s")]
    assert [one[: len(said or "")] for one in found] == ([] if said is None else [said])


def test_sums_in_16_bits_are_not_sent_in_fp32() -> None:
    keys = ("precision.gradients=compute", "precision.reduce=fp32")
    for compute in ("fp32", "bf16"):
        made = make_plan(recipe(f"precision.compute={compute}", keys[1]), CPU)
        check(made, CPU)
        assert made.reduces_fp32
    check(make_plan(recipe(*keys), CPU), CPU)
    with pytest.raises(BadInputError, match=r"after every microbatch, but precision\.reduce is fp32; leave one of"):
        check(make_plan(recipe("precision.compute=bf16", *keys), CPU), CPU)


def test_16_bit_gradients_on_a_gpu() -> None:
    narrow, gpu = ("precision.compute=fp16", "precision.gradients=compute"), Facts(world=2, device="cuda")
    check(make_plan(recipe(*narrow, "offload={optimizer: host, step: device}"), gpu), gpu)
    # The CPU steps what is offloaded.
    with pytest.raises(BadInputError, match=r"kernel of the optimizer step \(cpu\) reads no fp16"):
        check(make_plan(recipe(*narrow, "offload={optimizer: host}"), gpu), gpu)


def test_planning_looks_the_tokenizer_up() -> None:
    given = recipe("data.tokenizer=tokenizer")
    for suffix in ("bin", "idx"):
        Path(f"d.{suffix}").touch()
    Path("tokenizer").mkdir()
    Path("tokenizer/tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}')
    assert check_and_plan(given, CPU).model.vocab == 3
    Path("tokenizer/tokenizer.json").write_text("{")
    with pytest.raises(BadInputError, match=r"data\.tokenizer is tokenizer: .*tokenizer\.json has no vocabulary"):
        check_and_plan(given, CPU)


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
    name = "../recipes/recipe.yaml"
    key, _, value = path.partition("=")
    with pytest.raises(BadInputError) as found:
        check_and_plan(load_recipe(name, [path]), CPU, folders_above(name))
    assert str(found.value).startswith(f"{key} is {value}, ")
    assert str(found.value).endswith(f"there is one in {here}: run from there, or give {here / value}")


def test_a_folder_that_cannot_be_looked_into_has_nothing() -> None:
    """A run's folder may be in the closed home of another user, or have a name that no file has."""
    assert found_elsewhere("d", ".bin", [Path("x" * 300), Path("\0")]) == ""


@pytest.mark.parametrize("folder", ["~/runs", "~", "$HOME/runs", "${HOME}/runs"])
def test_a_folder_as_a_shell_writes_it_is_refused(folder: str) -> None:
    given = replace(recipe().logging, dir=folder)
    wanted = replace(recipe(), data=replace(recipe().data, path="set"), logging=given)
    for suffix in (".bin", ".idx"):
        Path(f"set{suffix}").touch()
    with pytest.raises(BadInputError, match=f"logging.dir is {re.escape(folder)}, but .* stands for no other folder"):
        check_folders(wanted)
    # A run of an earlier version made it.
    Path(Path(folder).parts[0]).mkdir()
    check_folders(wanted)
