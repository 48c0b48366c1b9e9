"""Which activations leave, in which order they move, and what that takes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import pytest
from llmtrain.errors import BadInputError
from llmtrain.plan.activation_offload import (
    INPUTS_AHEAD,
    ActivationMoves,
    GroupInput,
    activation_counts,
    activation_moves,
)
from llmtrain.plan.facts import Facts
from llmtrain.plan.memory.memory_budget import Budget, memory_budget
from llmtrain.plan.per_rank.rank_activations import activation_memory, boundary_bytes, rank_moves
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.plan.resolve.offload_check import offload_problem
from llmtrain.plan.resolve.prepare import named_facts
from llmtrain.plan.views.view import PlanView, view_recipe
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.pipeline import ScheduleName

SCHEDULES: dict[ScheduleName, int] = {
    "1f1b": 1, "gpipe": 1, "interleaved": 2, "breadth-first": 3, "zero-bubble": 1, "zero-bubble-v": 2
}  # fmt: skip


def small_schedules() -> Iterator[tuple[tuple[Action, ...], list[int]]]:
    """Every rank's actions, with groups of its chunks; at most 8 group inputs."""
    for (name, chunks), ranks, microbatches in product(SCHEDULES.items(), (1, 2, 3), (1, 2, 3, 4)):
        if ranks == 1 and name not in ("1f1b", "breadth-first"):
            continue
        schedule = make_schedule(name, ranks, chunks, microbatches)
        for rank, groups in product(range(ranks), product((1, 2, 3), repeat=chunks)):
            if sum(groups) * microbatches <= 8:
                yield schedule.actions[rank], list(groups)


def events(actions: Sequence[Action], groups: Sequence[int]) -> list[tuple[Kind, GroupInput]]:
    found = []
    for action in actions:
        numbers = {Kind.F: range(groups[action.chunk]), Kind.B: range(groups[action.chunk])[::-1], Kind.W: range(0)}
        found += [(action.kind, GroupInput(action.microbatch, action.chunk, one)) for one in numbers[action.kind]]
    return found


def most_alive(order: Sequence[tuple[Kind, GroupInput]], among: set[GroupInput]) -> int:
    alive = most = 0
    for kind, group_input in order:
        alive += ((kind is Kind.F) - (kind is Kind.B)) * (group_input in among)
        most = max(most, alive)
    return most


def least_leaving(order: Sequence[tuple[Kind, GroupInput]], stay: int) -> int:
    """The least number of group inputs that have to leave, by trying all."""
    every = {group_input for _, group_input in order}
    return next(
        count
        for count in range(len(every) + 1)
        if any(most_alive(order, every - set(left)) <= stay for left in combinations(sorted(every), count))
    )


@pytest.mark.parametrize("stay", [2, 3, 5])
def test_no_other_choice_moves_less(stay: int) -> None:
    cases = 0
    for actions, groups in small_schedules():
        order, moves = events(actions, groups), activation_moves(actions, groups, stay)
        left = {save.group_input for save in moves.saves if save.region is not None}
        assert most_alive(order, {group_input for _, group_input in order} - left) <= stay
        assert moves.left == len(left) == least_leaving(order, stay)
        assert moves.regions == most_alive(order, left)
        counts = activation_counts(actions, groups, stay)
        assert counts.passes == Counter((group_input.microbatch, group_input.chunk) for group_input in left)
        assert (counts.regions, counts.left) == (moves.regions, moves.left)
        assert (counts.read_slots, counts.write_slots) == (moves.read_slots, moves.write_slots)
        cases += moves.left > 0
    assert cases > 20


def test_a_border_that_is_used_at_once_stays() -> None:
    for actions, groups in small_schedules():
        order, moves = events(actions, groups), activation_moves(actions, groups, INPUTS_AHEAD)
        uses = [group_input for kind, group_input in order if kind is Kind.B]
        for save in moves.saves:
            saved, used = order.index((Kind.F, save.group_input)), order.index((Kind.B, save.group_input))
            between = sum(kind is Kind.B for kind, _ in order[saved:used])
            assert between >= INPUTS_AHEAD or save.region is None
        assert [use.group_input for use in moves.uses] == uses


def replayed(moves: ActivationMoves, order: Sequence[tuple[Kind, GroupInput]]) -> None:
    """Check that regions and slots hold what is read from them."""
    regions: dict[int, GroupInput] = {}
    saves, uses, coming = iter(moves.saves), iter(moves.uses), list[GroupInput]()
    for kind, group_input in order:
        if kind is Kind.F:
            save = next(saves)
            assert save.group_input == group_input
            if save.region is not None:
                assert save.region not in regions
                regions[save.region] = group_input
            continue
        use = next(uses)
        assert use.group_input == group_input
        if use.region is not None:
            assert coming.pop(0) == group_input
            assert regions.pop(use.region) == group_input
        coming += [regions[region] for region in use.reads]
        # One slot more holds the group input that is used.
        assert len(coming) <= INPUTS_AHEAD
    assert not regions
    assert not coming
    assert next(saves, next(uses, None)) is None


@pytest.mark.parametrize("stay", [2, 4])
def test_what_leaves_comes_back_in_time(stay: int) -> None:
    for actions, groups in small_schedules():
        replayed(activation_moves(actions, groups, stay), events(actions, groups))
    for name, chunks in SCHEDULES.items():
        for actions in make_schedule(name, 4, chunks, 9).actions:
            replayed(activation_moves(actions, [5] * chunks, stay), events(actions, [5] * chunks))


def test_the_next_ones_come_back_while_one_is_used() -> None:
    """One rank, six groups: the last two stay; while the fifth one is used, the next two are on their way."""
    moves = activation_moves(make_schedule("1f1b", 1, 1, 1).actions[0], [6], 2)
    assert [save.region for save in moves.saves] == [0, 1, 2, 3, None, None]
    assert [use.reads for use in moves.uses] == [(3, 2), (), (1,), (0,), (), ()]


RECIPE = """
model: {family: gpt2, layers: 6, hidden: 64, heads: 2, vocab: 512}
data: {path: set, sequence_length: 32}
train: {global_batch: 16, microbatch: 2}
activation_checkpointing: full
"""


def planned(tmp_path: Path, *overrides: str, world: int = 1) -> Plan:
    (tmp_path / "r.yaml").write_text(RECIPE)
    recipe = load_recipe(str(tmp_path / "r.yaml"), overrides)
    return make_plan(recipe, named_facts(recipe, Facts(world=world, device="cpu")))


def budget_of(plan: Plan) -> Budget:
    """Return the budget of the same plan on GPUs."""
    return memory_budget(replace(plan, device="cuda"))


@pytest.mark.parametrize("pipeline", [1, 2])
def test_the_line_falls_by_what_leaves(pipeline: int, tmp_path: Path) -> None:
    keys = (f"parallel.pipeline={pipeline}",)
    beside = budget_of(planned(tmp_path, *keys, world=pipeline))
    for tier in (("host",), ("nvme", f"offload.paths=[{tmp_path}]")):
        plan = planned(tmp_path, *keys, f"offload.activations={tier[0]}", *tier[1:], world=pipeline)
        group_input = boundary_bytes(plan)
        for row, before in zip(budget_of(plan).rows, beside.rows, strict=True):
            moves, memory = rank_moves(plan, row.role.rank), activation_memory(plan, row.role.rank)
            assert moves.regions > 0
            assert before.device["activations"] - row.device["activations"] == moves.regions * group_input
            assert row.device["activation_slots"] == 2 * group_input
            assert memory.moved == moves.left * group_input
            outside = {"host_activations": moves.regions * group_input, "activation_buffers": 0}
            if tier[0] == "nvme":
                assert memory.files == moves.regions * group_input
                slots = moves.read_slots + moves.write_slots
                outside = {"host_activations": 0, "activation_buffers": slots * group_input + 4096}
            assert outside.items() <= row.host.items()


def test_borders_in_files_are_whole_pages(tmp_path: Path) -> None:
    plan = planned(tmp_path, "offload.activations=nvme", f"offload.paths=[{tmp_path}]", "data.sequence_length=9")
    assert boundary_bytes(plan) == 2 * 9 * 64 * 4
    moves, memory = rank_moves(plan, 0), activation_memory(plan, 0)
    assert (memory.files, memory.moved) == (moves.regions * 8192, moves.left * 8192)


def test_as_many_stay_as_the_memory_holds(tmp_path: Path) -> None:
    """On each rank of a pipeline, to the byte; without a stated memory, as many as are read ahead."""

    def made(memory: int | None) -> tuple[Plan, Budget]:
        stated = "" if memory is None else f", memory: {memory}B"
        cluster = f"cluster={{accelerator: {{name: A100-80GB{stated}}}, node: {{ranks: 2}}}}"
        keys = (cluster, "parallel.pipeline=2", "precision.compute=fp32", "model.layers=16", "model.vocab=2000")
        (tmp_path / "r.yaml").write_text(RECIPE)
        view = view_recipe(str(tmp_path / "r.yaml"), (*keys, "offload.activations=host"), 2)
        return view.plan, view.budget

    plan, least = made(None)
    assert plan.activation_offload.stay == (INPUTS_AHEAD, INPUTS_AHEAD)
    group_input, needs = boundary_bytes(plan), [row.total for row in least.rows]
    need, fullest = max(needs), needs.index(max(needs))

    def staying(memory: int) -> int:
        plan, budget = made(memory)
        assert all(row.total <= memory for row in budget.rows)
        assert plan.activation_offload.stay[1 - fullest] > INPUTS_AHEAD
        return plan.activation_offload.stay[fullest]

    # The fragmentation of activations is planned too.
    more = int(1.15 * 2 * group_input) + 1
    assert staying(need + more) == INPUTS_AHEAD + 2
    assert staying(need + more - 2) == INPUTS_AHEAD + 1
    assert staying(need) == INPUTS_AHEAD
    assert made(min(needs) - 1)[0].activation_offload.stay == (INPUTS_AHEAD, INPUTS_AHEAD)
    plan, budget = made(10**12)
    assert all(rank_moves(plan, rank).left == 0 for rank in (0, 1))
    assert all(row.host["host_activations"] == row.device["activation_slots"] == 0 for row in budget.rows)


def test_a_record_makes_the_same_plan(tmp_path: Path) -> None:
    plan = planned(tmp_path, "offload.activations=nvme", f"offload.paths=[{tmp_path}]")
    assert plan.record["offload"]["activations"] == "nvme"
    assert plan.record["offload"]["paths"] == [str(tmp_path)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ("offload.activations=host", "activation_checkpointing=none"),
            "offload.activations is host, but activation_checkpointing is none",
        ),
        (
            ("offload.activations=host", "parallel.pipeline=2", "pipeline.schedule=message-driven"),
            "offload.activations is host, but with pipeline.schedule message-driven",
        ),
        (("offload.activations=nvme",), "neither offload.paths nor the cluster file's node.nvme names a folder"),
        (("offload.activations=disk",), "offload.activations is disk; expected one of none, host, nvme"),
        (
            ("offload.activations=host", "offload.paths=[/scratch]"),
            "paths is given, but nothing rests in files",
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_bad_keys(keys: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        planned(tmp_path, *keys, world=2)


def test_folders_are_checked(tmp_path: Path) -> None:
    keys = ("offload.activations=nvme", "offload.paths=[/dev/shm]")
    problem = offload_problem(planned(tmp_path, *keys), 1)
    assert problem is not None
    assert "/dev/shm, which is on a tmpfs" in problem


def test_the_host_s_memory_is_a_budget(tmp_path: Path) -> None:
    """A rank's share holds what is offloaded, or files are advised, which then fit."""
    (tmp_path / "r.yaml").write_text(RECIPE)

    def view(memory: int, *keys: str) -> PlanView:
        host = f"host: {{memory: {memory}B}}, nvme: [{{path: /scratch}}]"
        cluster = f"cluster={{accelerator: {{name: A100-80GB}}, node: {{ranks: 1, {host}}}}}"
        fixed = (cluster, "checkpoint.async=false", "data.sequence_length=4096", "model.positions=4096")
        return view_recipe(str(tmp_path / "r.yaml"), [*fixed, "model.layers=48", *keys], 1)

    needed = view(10**12, "offload.activations=host").budget.host
    assert view(needed, "offload.activations=host").problem is None
    refused = view(needed - 1, "offload.activations=host").problem
    assert refused is not None
    assert "set offload.activations=nvme, which needs" in refused
    assert view(needed - 1, "offload.activations=nvme").problem is None


def test_offload_is_advised(tmp_path: Path) -> None:
    """Where activations are most of the memory, and nothing else is left to change."""
    (tmp_path / "r.yaml").write_text(RECIPE)
    sizes = ("model.layers=48", "model.positions=4096", "data.sequence_length=4096", "train.microbatch=1")

    def problem(memory: int, *keys: str) -> str | None:
        cluster = f"cluster={{accelerator: {{name: H100-80GB, memory: {memory}B}}, node: {{ranks: 1}}}}"
        return view_recipe(str(tmp_path / "r.yaml"), [cluster, *sizes, *keys], 1).problem

    cluster = "cluster={accelerator: {name: H100-80GB, memory: 1TB}, node: {ranks: 1}}"
    whole = view_recipe(str(tmp_path / "r.yaml"), [cluster, *sizes], 1).budget.fullest.total
    assert problem(whole) is None
    refused = problem(whole - 1)
    assert refused is not None
    assert "set offload.activations=host, which needs" in refused
    assert problem(whole - 1, "offload.activations=host") is None
