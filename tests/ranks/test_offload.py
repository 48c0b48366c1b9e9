"""Offloaded optimizer states: every layout trains with the bits that it has without offload."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest
from _pytest.mark import ParameterSet
from llmtrain.plan.cost.volume_traffic import volume_traffic
from llmtrain.plan.facts import Facts
from llmtrain.plan.program.build import Programs
from llmtrain.plan.program.spec import ProgramSpec
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.telemetry.metrics import read_metrics

from tests.ranks.harness import Case, Trained, assert_same_states, soak_except

# Norms that clipping cuts in some steps and not in others, and buckets of which each unit has several.
CLIP = 0.63
CLIPPED = (f"optimizer.clip={CLIP}",)
BUCKETS = "offload.bucket=2048"
HOST, NVME = ("offload.optimizer=host", BUCKETS), ("offload.optimizer=nvme", "offload.paths=[.]", BUCKETS)
ON_DEVICE = "offload.step=device"
ALL_IN_FILES = ("offload.parameters=nvme", "offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=1024")
OFFLOADS = {
    "host": ("offload.optimizer=host", "offload.bucket=2048"),
    "host 0.3": ("offload.optimizer=host", "offload.bucket=2048", "offload.share=0.3"),
    "nvme": ("offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=1024"),
    "weights host": ("offload.parameters=host",),
    "weights nvme": ("offload.parameters=nvme", "offload.paths=[.]"),
    "gradients host": ("offload.gradients=host", "offload.bucket=1024"),
    "gradients nvme": ("offload.gradients=nvme", "offload.paths=[.]", "offload.bucket=1024"),
    "all nvme 0.3": (
        "offload.parameters=nvme",
        "offload.optimizer=nvme",
        "offload.paths=[.]",
        "offload.bucket=1024",
        "offload.share=0.3",
    ),
    "all host": ("offload.parameters=host", "offload.optimizer=host"),
    "all nvme": ALL_IN_FILES,
    "nvme 0.3": ("offload.optimizer=nvme", "offload.paths=[.]", "offload.bucket=3072", "offload.share=0.3"),
    "host ahead": (*HOST, "offload.spare=1"),
    # So large a share, and so small buckets, that a quarter of what leaves is at least a bucket with every layout.
    "host 0.7, a quarter ahead": (HOST[0], "offload.bucket=1024", "offload.share=0.7", "offload.spare=0.25"),
    "host, on the device": (*HOST, ON_DEVICE, "offload.overlap=1"),
    "host, on the device, a quarter ahead": (*HOST, ON_DEVICE, "offload.spare=0.25"),
    "host 0.3, on the device, ahead": (*HOST, ON_DEVICE, "offload.share=0.3", "offload.spare=1"),
    "nvme ahead": (*NVME, "offload.spare=1"),
    "nvme, a quarter ahead": (*NVME, "offload.spare=0.25", "offload.overlap=1"),
    "nvme, on the device": (*NVME, ON_DEVICE),
    "nvme 0.3, on the device, ahead": (*NVME, ON_DEVICE, "offload.share=0.3", "offload.spare=1"),
    "weights host, ahead": (*HOST, "offload.parameters=host", "offload.gradients=none", "offload.spare=1"),
    "all nvme, on the device": (*ALL_IN_FILES, ON_DEVICE),
}
OVERFLOWS = ("precision.compute=fp16", "precision.loss_scale=1.0e+9")
LAYOUTS = {
    **{f"stage {stage}": Case(2, (f"zero.stage={stage}",), accumulation=4) for stage in range(4)},
    "mics": Case(4, ("zero.preset=mics",), node=2, accumulation=4),
    "topo": Case(4, ("zero.preset=topo",), node=2, accumulation=4),
    "topo, bf16, 2 tensor-parallel": Case(
        8, ("zero.preset=topo", "precision.compute=bf16"), node=4, accumulation=4, tensor=2
    ),
    "2x2x2": Case(8, ("zero.stage=1",), node=4, accumulation=4, tensor=2, pipeline=2),
    "2x2x2, bf16, zero-bubble": Case(
        8,
        ("zero.stage=2", "precision.compute=bf16", "pipeline.schedule=zero-bubble"),
        node=4,
        accumulation=4,
        tensor=2,
        pipeline=2,
    ),
    "fp16 that overflows": Case(2, ("zero.stage=2", *OVERFLOWS), accumulation=4),
}
BESIDE = {name: replace(case, keys=(*case.keys, *CLIPPED)) for name, case in LAYOUTS.items()}
OFFLOADED = {
    (name, offload): replace(case, keys=(*case.keys, *keys))
    for name, case in BESIDE.items()
    for offload, keys in OFFLOADS.items()
    # Refused: tensor-parallel ranks add up quantized gradients after all microbatches.
    if not (offload in ("gradients host", "gradients nvme") and case.tensor > 1 and "zero.preset=topo" in case.keys)
}


# The others are soak tests.
SOON = ("host 0.3", "all nvme")
SHORT = (("2x2x2, bf16, zero-bubble", "host ahead"), ("topo", "nvme 0.3, on the device, ahead"), ("stage 0", "nvme"))
OFTEN = ("stage 0", "stage 3", "fp16 that overflows")
LAYOUTS_SOON = (*OFTEN, *(name for name, _ in SHORT))


def is_short(name: str, offload: str) -> bool:
    return (name, offload) in SHORT or (name in OFTEN and offload in SOON)


def marked(key: tuple[str, str], *values: object) -> ParameterSet:
    return pytest.param(*values, marks=() if is_short(*key) else pytest.mark.soak)


WHOLE = soak_except([BESIDE[name] for name in LAYOUTS_SOON], BESIDE.values())


@pytest.mark.parametrize("case", [*WHOLE, *(marked(key, case) for key, case in OFFLOADED.items())], ids=str)
def test_trains(case: Case, trained: Trained) -> None:
    assert trained(case).curve


@pytest.mark.parametrize(("name", "offload"), [marked(key, *key) for key in OFFLOADED])
def test_results_do_not_depend_on_where_states_rest(name: str, offload: str, trained: Trained) -> None:
    ours, theirs = trained(OFFLOADED[name, offload]), trained(BESIDE[name])
    assert ours.curve == theirs.curve
    assert_same_states(ours, theirs)


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_some_steps_are_clipped(case: Case, trained: Trained) -> None:
    """Otherwise the tests above would show less than they say."""
    norms = [row["grad_norm"] for row in trained(case).rows if row["grad_norm"] is not None]
    assert min(norms) < CLIP < max(norms)


def test_one_overflows(trained: Trained) -> None:
    assert trained(BESIDE["fp16 that overflows"]).rows[-1]["skipped_steps"] > 0


@pytest.mark.parametrize(("name", "offload"), [marked(key, *key) for key in OFFLOADED if "ahead" in key[1]])
def test_buckets_are_stepped_ahead(name: str, offload: str, trained: Trained) -> None:
    """Some of what is stepped ahead counts, and what is left is stepped anew: clipping acts, or a step is skipped."""
    result = trained(OFFLOADED[name, offload])
    ahead, commits, steps = ([counts[-1] for counts in result.notes(kind)] for kind in ("ahead", "commit", "step"))
    assert 0 < sum(commits) < sum(ahead)
    assert sum(steps) > 0


def test_rows_say_what_moved(trained: Trained) -> None:
    """Steps that are applied read as many bytes as they write."""
    rows = trained(OFFLOADED["stage 0", "nvme"]).rows
    moved = [[*row["offload"]["read_bytes"].values(), *row["offload"]["written_bytes"].values()] for row in rows]
    assert all(read > 0 and read % 4096 == 0 for read, _ in moved)
    assert len({read for read, _ in moved[2:]}) == 1
    assert "offload" not in trained(BESIDE["stage 0"]).rows[-1]


@pytest.mark.parametrize("offload", ["host 0.3", "nvme"])
def test_states_leave_the_memory(offload: str, trained: Trained) -> None:
    """What the engine holds beside the weights falls by the moments that left: the masters are the weights."""
    whole = trained(BESIDE["stage 0"]).notes("state_bytes")[0][-1]
    left = trained(OFFLOADED["stage 0", offload]).notes("state_bytes")[0][-1]
    share = 0.3 if "0.3" in offload else 1.0
    # 16 bytes of each element without offload: weights, gradients and two moments.
    assert left / whole == pytest.approx(1 - share * 8 / 16, abs=0.05)


# Two folders of the checkout, as it is where the ranks run.
TWO_PATHS = "offload.paths=[., tests]"
MOVED = {
    "all, gathered again": Case(2, (*ALL_IN_FILES, "zero.stage=3", TWO_PATHS), accumulation=4),
    "all, half of a bucket resident": Case(
        2, (*ALL_IN_FILES, "zero.stage=1", "offload.share=0.3", "precision.compute=bf16"), accumulation=4
    ),
    "gradients and activations": Case(
        2,
        (
            "offload.gradients=nvme",
            "offload.activations=nvme",
            "activation_checkpointing=full",
            TWO_PATHS,
        ),
        accumulation=4,
    ),
    "pipeline": Case(8, (*ALL_IN_FILES, "zero.stage=2"), accumulation=4, tensor=2, pipeline=2),
    "weights sent packed": Case(
        2, ("offload.optimizer=nvme", TWO_PATHS, "zero.stage=1", "quantize.weights=int8"), accumulation=4
    ),
    "weights sent packed to tensor-parallel ranks": Case(
        4, (*ALL_IN_FILES, "zero.stage=2", "quantize.weights=int8"), accumulation=4, tensor=2
    ),
    "half stepped before the norm is known": Case(
        2,
        ("offload.optimizer=nvme", TWO_PATHS, "offload.bucket=2048", "offload.spare=0.5", "optimizer.clip=0"),
        accumulation=4,
    ),
}

# There is room for all units.
WEIGHTS_IN_FILES = ("offload.parameters=nvme", "offload.gradients=none", "offload.paths=[.]", "zero.resident=1GB")
SEVERAL = {count: Case(2, (*WEIGHTS_IN_FILES, "zero.stage=1"), accumulation=count) for count in (1, 4)}
MOVED |= {f"resident weights, {count} microbatches": case for count, case in SEVERAL.items()}


@pytest.mark.parametrize("name", MOVED)
def test_volumes_move_what_is_planned(name: str, trained: Trained) -> None:
    """A step reads from and writes to each volume the planned bytes, counted where they are handed to the kernel. The
    run says both at its end."""
    case = MOVED[name]
    result = trained(case)
    facts = Facts(world=case.world, device="cpu", ranks_per_node=case.node or case.world)
    plan = make_plan(load_recipe(str(result.folder / "recipe.resolved.yaml")), facts)
    for rank, steps in enumerate(result.notes("moved")):
        planned: dict[str, Counter[int]] = defaultdict(Counter)
        for moved in volume_traffic(plan, rank, Programs(ProgramSpec.of(plan, rank))).values():
            for path, read_and_written in moved.items():
                planned[path].update(dict(enumerate(read_and_written)))
        # No transfer besides, such as one that has a queue of its own.
        moved_by_all = Counter[int]()
        for counts in planned.values():
            moved_by_all.update(counts)
        # Beside a save, a step has its reads too.
        least = [
            min(after[way] - before[way] for before, after in pairwise(result.notes("transfers")[rank]))
            for way in (0, 1)
        ]
        assert least == [moved_by_all[0], moved_by_all[1]]
        for before, after in pairwise(steps):
            for path, counts in planned.items():
                assert [now - then for now, then in zip(after[path], before[path], strict=True)] == [
                    counts[0],
                    counts[1],
                ]
    end = read_metrics(result.folder / "metrics.jsonl")[-1]
    assert end["planned"]["moved_bytes"]["read_bytes"] > 0
    assert end["planned"]["moved_bytes"] == end["measured"]["moved_bytes"]


def test_weights_are_read_once_for_all_microbatches(trained: Trained) -> None:
    """Where they stay until the step."""
    ends = [read_metrics(trained(case).folder / "metrics.jsonl")[-1] for case in SEVERAL.values()]
    one, four = (end["measured"]["moved_bytes"]["read_bytes"] for end in ends)
    assert one == four > 0
