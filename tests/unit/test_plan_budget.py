"""The memory of a run against the stated memory, and what is refused."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llmtrain.cli.main import main
from llmtrain.errors import BadInputError
from llmtrain.launch.slurm.config import Site
from llmtrain.plan.collective_buffers import CTAS, LANE_CTAS
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.activations import live_activations
from llmtrain.plan.memory.device_overhead import CPU, GPU, MIB
from llmtrain.plan.memory.memory_budget import Budget, memory_budget
from llmtrain.plan.memory.temporaries import gradient_bytes, loss_bytes
from llmtrain.plan.per_rank.process_groups import connections, group_sizes
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.per_rank.states import role_states
from llmtrain.plan.plan import Plan
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.pools import pool_bytes
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.kernels import kernels_of
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.views.figure import drawn_memory
from llmtrain.plan.views.view import view_recipe
from llmtrain.start.job import plan_job
from llmtrain_data.indexed import IndexedWriter
from llmtrain_kernels.accumulate.kept import kept

RECIPE = """
model: {family: llama, layers: 8, hidden: 512, heads: 8, vocab: 1001}
data: {path: set, sequence_length: 32, split: [1, 0, 0]}
train: {global_batch: 64, eval_every: 0}
"""


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = IndexedWriter(Path("set"), np.dtype(np.uint16))
    writer.add(np.zeros(5000, dtype=np.uint16), np.array([5000]))
    writer.commit()
    Path("tiny.yaml").write_text(RECIPE)


def cluster(memory: int | None, ranks: int = 8, name: str | None = None) -> str:
    stated = {"memory": f"{memory}B"} if memory else {}
    named = {"name": name} if name else {}
    return f"cluster={json.dumps({'accelerator': {**stated, **named}, 'node': {'ranks': ranks}})}"


def made(*overrides: str, ranks: int = 8) -> tuple[Plan, Budget]:
    recipe, facts = described_run("tiny.yaml", overrides, ranks)
    plan = make_plan(recipe, facts)
    return plan, memory_budget(plan)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code of `plan --json`, what it printed, and its error."""
    code = main(["plan", "tiny.yaml", *arguments, "--json"])
    said = capsys.readouterr()
    return code, json.loads(said.out), said.err


GRIDS = [
    (),
    ("zero.stage=3",),
    ("parallel.tensor=2", "parallel.pipeline=2", "pipeline.schedule=interleaved"),
    ("parallel.tensor=8",),
]


@pytest.mark.parametrize("keys", GRIDS, ids=" ".join)
def test_one_byte_decides(keys: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    plan, budget = made(*keys, cluster(None))
    needed = budget.fullest.total
    # By default a smaller one is taken where memory lacks.
    keys = (*keys, f"train.microbatch={plan.batch.microbatch}")
    assert needed == max(row.total for row in budget.rows)
    code, found, error = planned(capsys, *keys, cluster(needed), "--ranks", "8")
    assert (code, error, found["memory"]["excess"], found["problem"]) == (0, "", 0, None)
    assert found["memory"]["limit"] == needed
    code, found, error = planned(capsys, *keys, cluster(needed - 1), "--ranks", "8")
    assert (code, found["memory"]["excess"]) == (2, 1)
    assert error == f"llmtrain: {found['problem']}\n"
    assert f"1 B more than cluster.accelerator.memory ({needed - 1}B)" in error
    code, found, error = planned(capsys, *keys, cluster(needed - 1), "--ranks", "8", "--force")
    assert (code, error, found["memory"]["excess"]) == (0, "", 1)


EIGHT = "train.microbatch=8"


@pytest.mark.parametrize(("spare", "extra", "code"), [(0, (), 0), (-1, (), 2), (-1, ("--force",), 0)])
def test_a_run_is_refused_before_it_starts(
    spare: int, extra: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[object] = []
    monkeypatch.setattr("llmtrain.training.rank.run_rank", lambda *given: started.append(given))
    _, budget = made("precision.compute=fp32", EIGHT, ranks=1)
    memory = replace(budget, limit=budget.fullest.total + spare).limit
    before = sorted(Path().iterdir())
    assert main(["run", "tiny.yaml", EIGHT, cluster(memory), "--nproc", "1", *extra]) == code
    assert len(started) == (code == 0)
    said = capsys.readouterr().err
    assert ("cluster.accelerator.memory" in said) == (code == 2)
    assert sorted(Path().iterdir()) == before


def test_a_job_is_refused_before_it_is_submitted() -> None:
    memory = cluster(1000)
    with pytest.raises(BadInputError, match=r"more than cluster\.accelerator\.memory \(1000B\)"):
        plan_job("tiny.yaml", [memory], Site(), nodes=1)
    assert plan_job("tiny.yaml", [memory], Site(), nodes=1, force=True).command[-1] == "--force"
    assert "--force" not in plan_job("tiny.yaml", [cluster(None)], Site(), nodes=1).command


def test_a_dry_run_says_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", cluster(1000), "--nproc", "1", "--dry-run"]) == 0
    assert re.search(
        r"^# rank 0 needs .* more than cluster\.accelerator\.memory", capsys.readouterr().out, re.MULTILINE
    )


def test_parts_of_a_budget() -> None:
    plan, budget = made("parallel.tensor=2", "zero.preset=topo", cluster(None, ranks=4))
    assert [row.role for row in budget.rows] == roles(plan)
    for row in budget.rows:
        states = role_states(plan, row.role)
        temporaries = max(gradient_bytes(plan, row.role), loss_bytes(plan, row.role))
        passing = live_activations(plan, row.role.rank), temporaries
        groups, programs = group_sizes(plan, row.role.pipeline), Programs(ProgramSpec.of(plan, row.role.rank))
        program = programs.step
        exchanged = 12 * MIB * connections(plan, row.role.pipeline)
        assert program.weights > 0
        assert row.device == {
            "weights": states.weights,
            "gradients": states.gradients,
            "optimizer": states.optimizer,
            "secondary": states.secondary,
            "replicated": states.replicated,
            "gathered_weights": program.weights * plan.compute_bytes,
            "gradient_buffers": program.gradients * plan.buffered_gradient_bytes,
            "in_flight": sum(pool_bytes(plan, row.role.rank, programs).values()),
            "offload_slots": 0,
            "weights_ahead": 0,
            "activation_slots": 0,
            "activations": passing[0],
            "temporaries": passing[1],
            "context": GPU.context,
            "communicators": sum(GPU.pair if size == 2 else GPU.group for size in groups) + exchanged,
            "fragmentation": int(0.15 * sum(passing)),
        }
    assert budget.limit is None
    assert budget.excess == 0


def test_the_largest_gradient() -> None:
    """The two matrices of the MLP's first product are one parameter."""
    plan, budget = made("parallel.tensor=2", ranks=2)
    ffn = plan.model.ffn
    assert [gradient_bytes(plan, row.role) for row in budget.rows] == [4 * ffn * 512] * 2
    plan, budget = made("model.vocab=8001", "parallel.tensor=2", ranks=2)
    assert [gradient_bytes(plan, row.role) for row in budget.rows] == [4 * 4000 * 512, 4 * 4001 * 512]
    # Of many narrow layers, all norms in fp32 are larger than one matrix.
    narrow = ("model.hidden=8", "model.heads=2", "model.ffn=8", "model.vocab=8", "model.layers=64")
    plan, budget = made(*narrow, "quantize.gradients=int4", "parallel.tensor=2", ranks=4)
    assert gradient_bytes(plan, budget.rows[0].role) == 4 * (2 * 64 + 1) * 8


def test_a_gpu_keeps_small_gradients() -> None:
    """Of a block: all but the MLP's first product, which is added while they wait."""
    plan, budget = made("model.hidden=1024", "model.ffn=3072", ranks=1)
    width, ffn = plan.model.hidden, plan.model.ffn
    small = 2 * width + 4 * width**2 + ffn * width
    assert kept(ffn * width)
    assert not kept(2 * ffn * width)
    on_gpu = replace(plan, device="cuda")
    assert gradient_bytes(on_gpu, budget.rows[0].role) == plan.compute_bytes * (small + 2 * ffn * width)


def test_a_chunk_of_logits() -> None:
    """Beside its input and the logits, the loss makes a product of the size of the output matrix on AMD's GPUs, and
    without Triton probabilities in fp32. The output matrix is copied if it gets rows of padding, to a multiple of
    64."""
    half = "precision.compute=bf16"
    plan, budget = made("model.vocab=8000", half, cluster(10**12))
    tokens, role = plan.batch.microbatch * 32, budget.rows[0].role
    given = tokens * (512 * 2 + 8 + 4)
    assert loss_bytes(plan, role) == given + 8000 * tokens * 2
    amd, without = (
        replace(plan, kernels=kernels_of(Facts(world=1, device="cuda", amd=True, triton=triton), plan.model, "bf16"))
        for triton in (True, False)
    )
    assert loss_bytes(amd, role) == given + 8000 * (tokens * 2 + 512 * 2)
    assert loss_bytes(without, role) == given + 8000 * max(tokens * (2 + 4), tokens * 2 + 512 * 2)
    plan, budget = made("model.vocab=8001", half, cluster(10**12))
    assert loss_bytes(plan, budget.rows[0].role) == given + 8064 * (512 + tokens) * 2
    # A chunk of a large vocabulary has fewer tokens than the microbatch.
    plan, budget = made("model.vocab=1000000", "train.global_batch=512", "train.microbatch=64", half, cluster(10**12))
    given = 64 * 32 * (plan.model.hidden * 2 + 8 + 4)
    assert loss_bytes(plan, budget.rows[0].role) == given + 1_000_000 * 256 * 2
    plan, budget = made("model.vocab=8000", "parallel.pipeline=2", half, cluster(10**12))
    assert [loss_bytes(plan, row.role) > 0 for row in budget.rows] == [False, True]


@pytest.mark.parametrize(
    ("keys", "pipeline", "sizes"),
    [
        ((), 0, [8, 4, 4, 2, 2]),
        (("zero.stage=3", "zero.hierarchical=false"), 0, [8, 4, 4, 2, 2, 8]),
        (("parallel.tensor=2", "parallel.sequence=true"), 0, [8, 2, 2, 2, 2, 2, 2]),
        (("parallel.tensor=2", "quantize.gradients=int4"), 0, [8, 2, 2, 2, 2, 2, 8]),
        (("parallel.pipeline=4",), 0, [8, 2, 2, 2, 2]),
        (("parallel.pipeline=4",), 1, [8, 2, 2, 2, 2, 2, 2]),
        (("parallel.pipeline=4", "model.tie_embeddings=true"), 3, [8, 2, 2, 2, 2, 2]),
        (("parallel.pipeline=4", "pipeline.transport=mpi"), 1, [8, 2, 2]),
        (("parallel.pipeline=8", "pipeline.schedule=zero-bubble-v", "model.layers=16"), 7, [8, 2, 2, 2, 2]),
        (("parallel.tensor=8",), 0, [8, 8]),
    ],
)
def test_process_groups(keys: tuple[str, ...], pipeline: int, sizes: list[int]) -> None:
    plan, _ = made(*keys, cluster(None, ranks=4))
    assert group_sizes(plan, pipeline) == sizes


FP32, SEQUENCE = "precision.compute=fp32", "parallel.sequence=true"


@pytest.mark.parametrize(
    ("keys", "lanes", "layers"),
    [
        ((), 3, 0),
        ((FP32,), 0, 0),
        ((FP32, "quantize.gradients=int4"), 3, 0),
        (("parallel.tensor=2",), 1, 0),
        (("parallel.tensor=2", SEQUENCE), 1, 1),
        (("parallel.tensor=2", SEQUENCE, FP32), 0, 0),
        (("parallel.tensor=4", SEQUENCE), 0, 3),
        (("parallel.tensor=8", SEQUENCE), 0, 3),
        (("parallel.pipeline=2",), 3, 0),
    ],
)
def test_connections_of_all_to_alls(keys: tuple[str, ...], lanes: int, layers: int) -> None:
    """To the other ranks of a node, of which there are four."""
    plan, _ = made("precision.compute=bf16", *keys, cluster(None, ranks=4))
    assert connections(plan, 0) == LANE_CTAS * lanes + CTAS * layers


def test_messages_between_stages_take_few_buffers() -> None:
    """A rank in the middle of a line has four channels, and a group of all ranks."""
    _, budget = made(FP32, "parallel.pipeline=4", cluster(None, ranks=4), ranks=4)
    middle = next(row for row in budget.rows if row.role.pipeline == 1)
    assert middle.device["communicators"] == GPU.group + 4 * GPU.message


def test_one_rank_has_no_groups() -> None:
    plan, budget = made(ranks=1)
    assert group_sizes(plan, 0) == []
    assert connections(plan, 0) == 0
    assert budget.rows[0].device["communicators"] == 0


@pytest.mark.parametrize(
    ("imports", "planned"),
    [
        ("llmtrain.training.loop", CPU.context),
        ("llmtrain.training.loop, torch._dynamo", CPU.context + CPU.recomputation),
    ],
)
def test_a_process_s_own_memory(imports: str, planned: int) -> None:
    # Not ru_maxrss, which counts what the process was before it ran this program: a copy of the tests' process.
    program = f"import {imports}; print(open('/proc/self/status').read())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", done.stdout, re.MULTILINE)
    # Another build of torch takes more or less.
    assert 0.6 * planned < 1024 * int(peak) < 1.5 * planned


def test_recomputation_takes_memory_of_a_process_on_a_cpu() -> None:
    budgets = [made("activation_checkpointing=none", ranks=1)[1], made("activation_checkpointing=full", ranks=1)[1]]
    plain, recomputing = (budget.rows[0].device["context"] for budget in budgets)
    assert recomputing - plain == CPU.recomputation


KEYS = {
    "name": str, "parameters": int, "ranks": int, "grid": dict, "device": str, "accelerator": str, "batch": dict,
    "memory": dict, "sent": list, "least_seconds": dict, "step_threads": type(None), "volumes": list, "moved": dict,
    "lanes": list, "wires": list, "simulated": type(None), "save": dict, "unknown_rates": list,
    "problem": type(None), "advice": list, "auto": list,
}  # fmt: skip


def test_json_has_stable_names(capsys: pytest.CaptureFixture[str]) -> None:
    _, found, _ = planned(capsys, cluster(8 * 10**10, name="A100-80GB"), "parallel.pipeline=2", "--ranks", "8")
    assert {key: type(value) for key, value in found.items()} == KEYS
    assert found["grid"] == {"pipeline": 2, "data": 4, "tensor": 1}
    assert found["batch"] == {"sequences": 64, "sequence_length": 32, "microbatch": 2, "microbatches": 8}
    memory = found["memory"]
    assert list(memory) == ["limit", "excess", "host_limit", "host_excess", "fullest", "roles"]
    assert [(row["rank"], row["ranks"], row["pipeline"], row["layers"]) for row in memory["roles"]] == [
        (0, 4, 0, 4), (4, 4, 1, 4),
    ]  # fmt: skip
    for row in memory["roles"]:
        assert list(row) == [
            "rank", "ranks", "pipeline", "layers", "parameters", "device", "total", "host", "files",
            "activations_moved",
        ]  # fmt: skip
        assert row["total"] == sum(row["device"].values())
    assert memory["fullest"] in [row["rank"] for row in memory["roles"]]


SPEEDS = [
    ("{name: nothing}", None, None),
    ("{name: A100-80GB}", 312e12, None),
    ("{name: A100-80GB, peak: {bf16: 100TFLOP/s}}", 100e12, None),
    ("{peak: {fp32: 100TFLOP/s}, bandwidth: 2TB/s}", None, 2e12),
]


@pytest.mark.parametrize(("accelerator", "peak", "bandwidth"), SPEEDS)
def test_stated_speeds_bound_the_time_of_a_step(
    accelerator: str, peak: float | None, bandwidth: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = (f"cluster={{accelerator: {accelerator}, node: {{ranks: 4}}}}", "zero.stage=1", "--ranks", "4")
    _, found, _ = planned(capsys, *keys)
    products, attention = found["parameters"] - 1001 * 512 - 17 * 512, 6 * 8 * 512 * 32
    flops = 64 * 32 * (6 * products + attention) / 4
    least = found["least_seconds"]
    assert least["compute"] == (None if peak is None else pytest.approx(flops / peak))
    elements = found["memory"]["roles"][0]["device"]["optimizer"] / 12
    # fp32 masters and moments are read and written, gradients are read, 16-bit weights are written.
    moved = elements * (2 * 12 + 4 + 2)
    assert least["optimizer"] == (None if bandwidth is None else pytest.approx(moved / bandwidth))


def test_a_plan_of_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "tiny.yaml", "--ranks", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert " parameters on 1 rank, pipeline 1 x data 1 x tensor 1, on CPUs " in said
    assert "no cluster file describes an accelerator, so this is the plan for CPUs; add 'cluster={" in said


def test_tables_and_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    png = tmp_path / "memory.png"
    keys = ("parallel.pipeline=2", "parallel.tensor=2", cluster(8 * 10**10))
    assert main(["plan", "tiny.yaml", *keys, "--ranks", "8", "--png", str(png)]) == 0
    said = capsys.readouterr().out
    assert "on 8 ranks, pipeline 2 x data 2 x tensor 2, on GPUs" in said
    assert "the plan for CPUs" not in said
    assert re.search(r"^gradients \(fp32 sums\) +[\d.]+ MiB +0\.\d%$", said, re.MULTILINE)
    assert re.search(r"^accelerator\.memory +74\.5 GiB +100\.0%$", said, re.MULTILINE)
    assert len(re.findall("fullest", said)) == 1
    assert png.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "tiny.yaml", "--png", str(tmp_path / "memory.pdf")]) == 2
    assert main(["plan", "tiny.yaml", "--png", str(tmp_path / "no" / "memory.png")]) == 2


def test_ranks_come_from_the_cluster_file(capsys: pytest.CaptureFixture[str]) -> None:
    described = "cluster={node: {ranks: 4}, clusters: [{name: a, nodes: 2}]}"
    for arguments, ranks in (([], 1), ([described], 8), ([described, "--ranks", "4"], 4), (["parallel.tensor=2"], 2)):
        assert planned(capsys, *arguments)[1]["ranks"] == ranks


def test_the_figure_has_all_parts() -> None:
    """More of them than there are colors."""
    keys = ["zero.stage=3", "precision.compute=bf16", "offload={optimizer: host, step: device}", cluster(8 * 10**10)]
    view = view_recipe("tiny.yaml", keys, 8)
    (axes,) = drawn_memory(view).axes
    widths = [bars[0].get_width() for bars in axes.containers]
    assert len(widths) > 10
    assert sum(widths) * 2**30 == pytest.approx(view.budget.rows[0].total)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ((), "activations (1 microbatch)"),
        (("activation_checkpointing=full",), "activations (1 microbatch, recomputed)"),
        (("parallel.pipeline=2",), "activations (2 microbatches)"),
        (("parallel.pipeline=2", "pipeline.schedule=message-driven", "pipeline.limit=3"), "(3 microbatches)"),
        (("pipeline.schedule=breadth-first", "activation_checkpointing=full"), "microbatches of a chunk, recomputed)"),
    ],
)
def test_activations_say_of_what(keys: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the first rank, which holds most."""
    assert main(["plan", "tiny.yaml", "train.microbatch=1", "train.global_batch=32", *keys, "--ranks", "8"]) == 0
    assert said in capsys.readouterr().out
