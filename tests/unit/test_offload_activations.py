"""Activations that leave between their passes: the same bits, and what the plan says of bytes and order."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from llmtrain.errors import RunFailedError
from llmtrain.offload.activation_copies import CpuCopies, GpuCopies
from llmtrain.offload.activation_store import ActivationStore, FileActivations, HostActivations
from llmtrain.offload.activations import OffloadedActivations, open_activations
from llmtrain.offload.striped_file import StripedFile
from llmtrain.plan.activation_offload import ActivationMoves, ActivationOffload, activation_moves
from llmtrain.plan.facts import Facts
from llmtrain.plan.per_rank.rank_activations import activation_memory, rank_moves
from llmtrain.plan.pipeline.actions import Action, Kind
from llmtrain.plan.pipeline.schedules import make_schedule
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.prepare import check_and_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training import loop as loop
from torch import Tensor

from tests.in_process import train_here
from tests.late_streams import LateCopies, LateStream, late_copies
from tests.tiny import curve, rows, write_corpus

SHAPE, CPU = (2, 9, 32), torch.device("cpu")


def played(activations: OffloadedActivations, actions: Sequence[Action], groups: int, drawn: int) -> Iterator[bool]:
    """Save and use every group input of a step as the executor and autograd do; yield whether each one came back
    whole."""
    random, kept = torch.Generator().manual_seed(drawn), {}
    with activations.step():
        for action in actions:
            with activations.action(action):
                if action.kind is Kind.F:
                    for group in range(groups):
                        values = torch.randn(SHAPE, generator=random)
                        kept[action.microbatch, group] = values.clone(), activations._save(group, values)
                elif action.kind is Kind.B:
                    for group in reversed(range(groups)):
                        values, handle = kept.pop((action.microbatch, group))
                        yield torch.equal(activations._use(handle), values)


def moves_of(ranks: int, rank: int, groups: int) -> tuple[tuple[Action, ...], ActivationMoves]:
    actions = make_schedule("1f1b", ranks, 1, 6).actions[rank]
    return actions, activation_moves(actions, [groups], 2)


@contextmanager
def store_of(tier: str, moves: ActivationMoves, folder: Path) -> Iterator[ActivationStore]:
    store: ActivationStore = HostActivations(moves, SHAPE, torch.float32, pinned=False)
    if tier == "nvme":
        file = StripedFile([str(folder)], [4096] * moves.regions)
        store = FileActivations(moves, SHAPE, torch.float32, file, pinned=False)
    yield store
    store.close()


TIERS = ("host", "nvme")
PLACES = [(1, 0, 6), (3, 0, 4), (3, 2, 7), (4, 1, 1)]


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_borders_come_back(tier: str, place: tuple[int, int, int], tmp_path: Path) -> None:
    actions, moves = moves_of(*place)
    with store_of(tier, moves, tmp_path) as store:
        activations = OffloadedActivations(moves, store, CpuCopies(store))
        for step in range(3):
            assert all(played(activations, actions, place[2], step))
        used = activations.usage()
        moved = {"host": 3 * moves.left * 2 * 9 * 32 * 4} if tier == "host" else {str(tmp_path): 3 * moves.left * 4096}
        assert used.read == used.written == moved
        assert (used.waited > 0) == (tier == "nvme")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateCopies:
    return late_copies(monkeypatch)


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("tier", TIERS)
def test_copies_that_come_late_arrive(tier: str, place: tuple[int, int, int], late: LateCopies, tmp_path: Path) -> None:
    actions, moves = moves_of(*place)
    with store_of(tier, moves, tmp_path) as store, late:
        activations = OffloadedActivations(moves, store, GpuCopies(store, CPU, SHAPE, torch.float32))
        assert all(arrived for step in range(3) for arrived in played(activations, actions, place[2], step))


class ForgetsEarly(GpuCopies):
    """Does not wait until a group input is down."""

    def release(self) -> None:
        self._went = SimpleNamespace(synchronize=lambda: None, record=self._went.record)  # type: ignore[assignment]
        super().release()


class UsesEarly(GpuCopies):
    """Does not wait until a group input is up."""

    def take(self, region: int) -> Tensor:
        self._came = [SimpleNamespace(synchronize=lambda: None, record=one.record) for one in self._came]  # type: ignore[misc]
        return super().take(region)


@pytest.mark.parametrize("broken", [ForgetsEarly, UsesEarly])
def test_a_missing_wait_is_found(broken: type[GpuCopies], late: LateCopies, tmp_path: Path) -> None:
    actions, moves = moves_of(3, 0, 4)
    with store_of("nvme", moves, tmp_path) as store, late:
        activations = OffloadedActivations(moves, store, broken(store, CPU, SHAPE, torch.float32))
        assert not all(arrived for step in range(2) for arrived in played(activations, actions, 4, step))


@pytest.mark.parametrize("direction", ["down", "up"])
def test_copies_wait_for_what_is_computed(direction: str, late: LateCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy down waits for the group input, and a copy up for the computation that used the slot before."""
    actions, moves = moves_of(3, 0, 4)
    waits: list[object] = []
    monkeypatch.setattr(LateStream, "wait_stream", lambda self, other: waits.append((self, other)))
    with late:
        store = HostActivations(moves, SHAPE, torch.float32, pinned=False)
        copies = GpuCopies(store, CPU, SHAPE, torch.float32)
        assert all(played(OffloadedActivations(moves, store, copies), actions, 4, 0))
    stream = copies._down if direction == "down" else copies._up
    assert waits.count((stream, late.main)) == moves.left


def test_another_order_is_refused() -> None:
    actions, moves = moves_of(1, 0, 6)
    store = HostActivations(moves, SHAPE, torch.float32, pinned=False)
    activations = OffloadedActivations(moves, store, CpuCopies(store))
    swapped = (*actions[2:4], *actions[:2], *actions[4:])
    with pytest.raises(RuntimeError, match=r"is saved, but the plan has Save\("):
        list(played(activations, swapped, 6, 0))
    with pytest.raises(RuntimeError, match=r"is used, but the plan has Use\("):
        list(played(activations, actions, 5, 0))
    with pytest.raises(RuntimeError, match=r"the step ended before Save\("):
        list(played(activations, actions[:-2], 6, 0))

    def used_early() -> None:
        with activations.step(), activations.action(actions[0]):
            handles = [activations._save(group, torch.zeros(SHAPE)) for group in range(6)]
            activations._use(handles[0])

    with pytest.raises(RuntimeError, match=r"is used, but the plan has Use\("):
        used_early()


def test_a_volume_that_fails(tmp_path: Path) -> None:
    actions, moves = moves_of(1, 0, 6)
    offload = ActivationOffload(tier="nvme", paths=(str(tmp_path),), stay=(2,))
    activations = open_activations(offload, moves, SHAPE, torch.float32, CPU)
    assert activations is not None
    assert all(played(activations, actions, 6, 0))
    activations.close()
    store = activations._store
    assert isinstance(store, FileActivations)
    with pytest.raises(RunFailedError, match="which failed: Bad file descriptor; the same command resumes"):
        store._file.reading(0, 0, store._slots[0])()


RECIPE = """
model: {{family: llama, layers: 6, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 3, global_batch: 8, microbatch: 2, eval_every: 2}}
optimizer: {{lr: 1.0e-2, warmup: 1}}
logging: {{every: 1, dir: {folder}/runs}}
"""

Train = Callable[..., Plan]


@pytest.fixture
def train(tmp_path: Path) -> Train:
    write_corpus(tmp_path / "set", 200)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(folder=tmp_path))

    def run(name: str, *overrides: str) -> Plan:
        return train_here(tmp_path / "tiny.yaml", f"name={name}", *overrides)

    return run


@pytest.mark.parametrize(
    "keys",
    [
        ("activation_checkpointing=full",),
        ("activation_checkpointing={every: 2}", "model.dropout=0.2", "precision.compute=bf16"),
    ],
    ids=str,
)
def test_a_run_has_the_same_bits(keys: tuple[str, ...], train: Train, tmp_path: Path) -> None:
    train("none", *keys)
    expected = curve(tmp_path / "runs" / "none")
    for tier in (("host",), ("nvme", f"offload.paths=[{tmp_path}]")):
        plan = train(tier[0], *keys, f"offload.activations={tier[0]}", *tier[1:])
        run = tmp_path / "runs" / tier[0]
        assert curve(run) == expected
        memory = activation_memory(plan, 0)
        moved = {"host" if tier[0] == "host" else str(tmp_path): memory.moved}
        assert memory.moved > 0
        steps = [row for row in rows(run) if "event" not in row]
        assert len(steps) == 3
        for row in steps:
            found = row["offload"]["activations"]
            assert (found["read_bytes"], found["written_bytes"]) == (moved, moved)
    assert all("offload" not in row for row in rows(tmp_path / "runs" / "none"))


def test_activations_leave_beside_model_states(train: Train, tmp_path: Path) -> None:
    """All of them in files on the same volume: the same bits, and each counted for itself."""
    keys = ("activation_checkpointing=full", "precision.compute=bf16")
    train("none", *keys)
    elsewhere = [f"offload.{key}=nvme" for key in ("optimizer", "parameters", "gradients")]
    train("states", *keys, *elsewhere, f"offload.paths=[{tmp_path}]")
    plan = train("all", *keys, *elsewhere, "offload.activations=nvme", f"offload.paths=[{tmp_path}]")
    assert curve(tmp_path / "runs" / "all") == curve(tmp_path / "runs" / "none")
    states, both = ([row for row in rows(tmp_path / "runs" / name) if "event" not in row] for name in ("states", "all"))
    for before, row in zip(states, both, strict=True):
        assert row["offload"]["activations"]["read_bytes"] == {str(tmp_path): activation_memory(plan, 0).moved}
        assert row["offload"]["written_bytes"] == before["offload"]["written_bytes"]


@pytest.mark.parametrize("tier", TIERS)
def test_planned_memory_is_what_is_allocated(tier: str, train: Train, tmp_path: Path) -> None:
    paths = (f"offload.paths=[{tmp_path}]",) if tier == "nvme" else ()
    recipe = load_recipe(
        str(tmp_path / "tiny.yaml"), ["activation_checkpointing=full", f"offload.activations={tier}", *paths]
    )
    plan = check_and_plan(recipe, Facts(world=1, device="cpu"))
    activations = open_activations(plan.activation_offload, rank_moves(plan, 0), (2, 16, 32), torch.float32, CPU)
    assert activations is not None
    memory = activation_memory(plan, 0)
    # The pages that hold a buffer begin one page later at most.
    pages = 4096 if tier == "nvme" else 0
    assert activations.nbytes == memory.host + memory.buffers - pages
    if isinstance(activations._store, FileActivations):
        assert sum(activations._store._file.nbytes) == memory.files > 0
    activations.close()
