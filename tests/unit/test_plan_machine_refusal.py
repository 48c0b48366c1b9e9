"""Runs on CPUs that need more memory than this machine has: the sentence and the change that it names."""

import re
from pathlib import Path

import pytest
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import memory_budget
from llmtrain.plan.resolve.machine_refusal import machine_bytes, machine_refusal
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.schema import Recipe
from llmtrain_data import units

MIB = 2**20
TINY = (
    "model: {family: llama, layers: 4, hidden: 64, heads: 4, vocab: 4096, positions: 65536}\n"
    "data: {path: d, sequence_length: 512}\ntrain: {global_batch: 16, microbatch: 16}\n"
)
LEAN = ["activation_checkpointing=full", "train.microbatch=1"]


def recipe(folder: Path, *overrides: str) -> Recipe:
    (folder / "recipe.yaml").write_text(TINY)
    return load_recipe(str(folder / "recipe.yaml"), list(overrides))


def needed(given: Recipe, facts: Facts) -> int:
    return machine_bytes(make_plan(given, facts), facts, 2**60)


def refused(monkeypatch: pytest.MonkeyPatch, given: Recipe, facts: Facts, memory: int) -> str | None:
    monkeypatch.setattr("llmtrain.plan.resolve.machine_refusal.machine_memory", lambda swap: memory)
    return machine_refusal(given, facts, make_plan(given, facts))


def whole(usable: int) -> int:
    """Return the least memory of a machine of which ranks on GPUs may take `usable` bytes."""
    return -(-usable * 8 // 7)


def test_activations_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence is refused though the states are small, with a change that makes it fit."""
    facts, long = Facts(world=1, device="cpu"), recipe(tmp_path, "data.sequence_length=16384")
    there = needed(long, facts)
    assert there > 2 * needed(recipe(tmp_path), facts)
    assert refused(monkeypatch, long, facts, there) is None
    said = refused(monkeypatch, long, facts, there - MIB) or ""
    change = re.search(r"set (\S+), which needs .* \(--force takes it as it is\)", said)
    assert change is not None
    assert needed(recipe(tmp_path, "data.sequence_length=16384", change[1]), facts) < there - MIB


@pytest.mark.parametrize(
    ("overrides", "world", "like", "advised"),
    [
        (["data.sequence_length=4096"], 1, ["activation_checkpointing=full"], "activation_checkpointing=full"),
        (["activation_checkpointing=full"], 1, ["train.microbatch=2"], "train.microbatch=2"),
        ([*LEAN, "data.sequence_length=16384"], 1, ["data.sequence_length=4096"], "data.sequence_length=4096"),
        (LEAN, 2, ["zero.stage=3"], "zero.stage="),
    ],
)
def test_the_advice_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], world: int, like: list[str], advised: str
) -> None:
    """like: a change whose memory the machine has."""
    facts = Facts(world=world, device="cpu")
    memory = needed(recipe(tmp_path, *overrides, *like), facts)
    assert memory < needed(recipe(tmp_path, *overrides), facts)
    said = refused(monkeypatch, recipe(tmp_path, *overrides), facts, memory) or ""
    assert f"; set {advised}" in said


def test_one_rank_is_not_told_to_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where a change helps nor where none does."""
    for overrides in ([], ["model.hidden=4096"]):
        said = refused(monkeypatch, recipe(tmp_path, *overrides), Facts(world=1, device="cpu"), 470 * MIB) or ""
        assert "but this machine has 470 MiB" in said
        assert "zero" not in said
    two = Facts(world=2, device="cpu")
    assert "zero.stage, parallel," in (refused(monkeypatch, recipe(tmp_path, *LEAN), two, MIB) or "")


def test_what_a_gpu_offloads_must_fit_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on one machine. What stays on the GPUs does not count."""
    facts, large = Facts(world=2, device="cuda"), ["model.hidden=1024", "model.layers=16", "train.microbatch=1"]
    large.append("checkpoint.async=false")
    offloaded = recipe(tmp_path, *large, "offload.optimizer=host", "offload.spare=0")
    resident = needed(recipe(tmp_path, *large), facts)
    there = needed(offloaded, facts)
    parameters = 16 * 12 * 1024**2
    assert there - resident > 2 * 12 * parameters
    assert refused(monkeypatch, offloaded, facts, whole(there)) is None
    said = refused(monkeypatch, offloaded, facts, whole(there) - 1) or ""
    assert "of memory besides that of its GPUs for 2 ranks, but this machine has" in said
    assert "; set offload.share=0.9, which needs " in said


def test_spare_memory_shrinks_as_little_as_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts, keys = (
        Facts(world=1, device="cuda"),
        ["model.hidden=1024", "checkpoint.async=false", "offload.optimizer=host"],
    )
    less, more = (recipe(tmp_path, *keys, f"offload.spare={spare}") for spare in (0.375, 0.5))
    said = refused(monkeypatch, more, facts, whole(needed(less, facts))) or ""
    assert "; set offload.spare=0.375, which needs " in said


@pytest.mark.parametrize("stated", [[], ["cluster.node.host.memory=1000MiB", "cluster.node.ranks=1"]])
def test_a_gpus_host_keeps_a_reserve(stated: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the description states all of the machine's memory; what fits seven eighths of it is not refused."""
    keys = ["model.hidden=1024", "model.layers=4", "checkpoint.async=false", "offload.optimizer=host", *stated]
    given, facts = recipe(tmp_path, *keys, "offload.spare=0"), Facts(world=1, device="cuda")
    there = needed(given, facts)
    machine = there * 20 // 19
    said = refused(monkeypatch, given, facts, machine) or ""
    usable = units.size(machine * 7 // 8)
    assert f"but this machine has {units.size(machine)}, of which ranks may take {usable}; set " in said
    assert refused(monkeypatch, given, facts, whole(there)) is None


def test_what_stays_on_a_gpu_must_fit_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller share would fit the host, and not the GPU, whose memory is full."""
    keys = ["model.hidden=1024", "model.layers=4", "train.microbatch=1", "checkpoint.async=false", "zero.resident=0"]
    keys += ["offload.optimizer=host", "offload.share=1", "offload.spare=0", "offload.bucket=1024"]

    def facts(given: Recipe) -> Facts:
        return named_facts(given, Facts(world=1, device="cuda", ranks_per_node=1))

    def on(memory: int) -> Recipe:
        return recipe(tmp_path, *keys, f"cluster={{accelerator: {{name: X, memory: {memory}B}}, node: {{ranks: 1}}}}")

    full = memory_budget(make_plan(on(10**12), facts(on(10**12)))).fullest.total
    for memory, advised in ((10**12, "; set offload.share=0.9, which needs "), (full, "; set ")):
        there = needed(on(memory), facts(on(memory)))
        said = refused(monkeypatch, on(memory), facts(on(memory)), whole(there) - 1) or ""
        assert advised in said
    change = re.search(r"; set (.*), which needs", said)
    assert change is not None
    advice = [word for word in change[1].split() if "=" in word]
    stated = f"cluster={{accelerator: {{name: X, memory: {full}B}}, node: {{ranks: 1}}}}"
    followed = recipe(tmp_path, *keys, stated, *advice)
    assert not memory_budget(make_plan(followed, facts(followed))).excess


def test_files_are_advised_where_folders_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(world=1, device="cuda")
    given = ["offload.activations=host", "activation_checkpointing=full", "checkpoint.async=false", "model.layers=16"]
    activations = recipe(tmp_path, *given, "data.sequence_length=16384")
    there = needed(activations, facts)
    assert "set offload.activations=none" in (refused(monkeypatch, activations, facts, whole(there) - 1) or "")
    files = ["offload.optimizer=nvme", "offload.paths=[a]", "data.sequence_length=16384"]
    folders = recipe(tmp_path, *given, *files)
    there = needed(folders, facts)
    assert "set offload.activations=nvme" in (refused(monkeypatch, folders, facts, whole(there) - 1) or "")


def test_files_on_a_volume_that_nobody_has_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no change in memory makes fit a CPU's."""
    facts, large = Facts(world=1, device="cpu"), [*LEAN, "model.hidden=1024", "data.sequence_length=128"]
    files = ["offload.optimizer=nvme", "offload.share=1"]
    there = needed(recipe(tmp_path, *large, *files, "offload.paths=[.]"), facts)
    said = refused(monkeypatch, recipe(tmp_path, *large), facts, there) or ""
    advised = re.search(r"; set (.*) with the folder of an NVMe volume in place of \., which needs ", said)
    assert advised, said
    assert needed(recipe(tmp_path, *large, *advised[1].split()), facts) <= there


def test_the_ranks_of_one_machine_count(tmp_path: Path) -> None:
    """Four ranks on two machines of two; with stages, those of the fullest machine."""
    four = recipe(tmp_path, "parallel.data=4", "train.microbatch=2")
    by_node = [needed(four, Facts(world=4, device="cpu", ranks_per_node=ranks)) for ranks in (1, 2, 4)]
    # Ranks of one machine reduce through memory that they share.
    assert by_node == pytest.approx([by_node[0], 2 * by_node[0], 4 * by_node[0]], rel=0.02)
    staged = recipe(tmp_path, "parallel.pipeline=4", "train.microbatch=2", "model.vocab=65536")
    one, two, all_four = (needed(staged, Facts(world=4, device="cpu", ranks_per_node=ranks)) for ranks in (1, 2, 4))
    assert one < two < 2 * one
    assert two < all_four < 2 * two + one
