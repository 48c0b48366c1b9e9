"""Saves killed at any moment, and a disk that is really full: the previous checkpoint or the new one loads."""

import os
import random
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from llmtrain.checkpoint.load import load_latest
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.checkpoint.verify import verify
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.errors import RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units

from tests.tiny import small_disk

CONFIG = GPTConfig(
    family="gpt2", layers=1, hidden=32, heads=4, kv_heads=4, ffn=128, positions=32, vocab=65, tie_embeddings=True,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh", dropout=0.0,
)  # fmt: skip
RANKS = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
ABOUT = {"recipe": {}, "model": asdict(CONFIG)}


def shards(step: int) -> list[StateShard]:
    """Return states whose values identify their step."""
    units = model_units(CONFIG)
    return [
        StateShard(unit, 0, unit.numel, {name: torch.full((unit.numel,), float(step)) for name in ("master", "m", "v")})
        for unit in units
    ]


def save(folder: Path, step: int, keep: int = 1) -> str | None:
    """Save the states of `step`."""
    return Checkpointer(folder, RANKS, keep, asynchronous=False).save(step, shards(step), {}, ABOUT)


def loaded_step(folder: Path) -> int:
    """Return the step of the checkpoint that loads, after checking that all its values are of that step and none is
    damaged."""
    found = shards(0)
    warnings: list[str] = []
    progress = load_latest(folder, found, RANKS, warnings.append)
    assert progress is not None
    assert warnings == []
    step = int(str(progress["step"]))
    for shard in found:
        for state in shard.states.values():
            assert bool((state == step).all())
    return step


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process, and return its pid."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def recover(folder: Path) -> None:
    """Clean the folder as the next run does, and check that nothing of the killed run remains."""
    Checkpointer(folder, RANKS, 1, asynchronous=False)
    for path in folder.iterdir():
        assert verify(path).problems == []


def die_at(count: int) -> None:
    """Kill this process at its `count`th call that would change the disk."""
    left = count

    def deadly(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in ("write", "fsync", "mkdir", "rename", "unlink", "rmdir"):
        setattr(os, name, deadly(getattr(os, name)))


@pytest.mark.parametrize("second", [2, 1], ids=["new step", "same step"])
def test_a_save_that_dies_at_each_of_its_calls(tmp_path: Path, second: int) -> None:
    saved, died, outcomes = tmp_path / "saved", 0, []
    save(saved, 1)
    while True:
        died += 1
        folder = tmp_path / str(died)
        shutil.copytree(saved, folder)

        def work(folder: Path = folder, died: int = died) -> None:
            die_at(died)
            assert save(folder, second) is None

        _, status = os.waitpid(in_child(work), 0)
        recover(folder)
        outcomes.append(loaded_step(folder))
        if os.WIFEXITED(status):
            break
    # The process that was not killed has saved.
    assert os.waitstatus_to_exitcode(status) == 0
    assert died > 40
    assert set(outcomes) == {1, second}
    assert outcomes[-1] == second


def test_sigkill_at_50_random_moments(tmp_path: Path) -> None:
    rng = random.Random(2)
    start = time.perf_counter()
    os.waitpid(in_child(partial(save, tmp_path, 1)), 0)
    duration = time.perf_counter() - start
    step, halves, finished = 1, 0, 0
    for _ in range(50):
        child = in_child(partial(save, tmp_path, step + 1))
        # The kill comes before the first byte, after the last, or between, also where the first save took far longer.
        time.sleep(duration * 3 * 100 ** -rng.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        halves += any(path.suffix for path in tmp_path.iterdir())
        reached = loaded_step(tmp_path)
        assert reached in (step, step + 1)
        finished += reached == step + 1
        step = reached
        recover(tmp_path)
    assert halves > 0
    assert finished > 0


@pytest.mark.parametrize("look", [1, 2], ids=["before it is written", "before it gets its name"])
def test_a_folder_that_another_run_has_taken(tmp_path: Path, look: int) -> None:
    """What that run is writing stays."""
    looks = []

    def confirm() -> None:
        looks.append(1)
        if len(looks) >= look:
            (tmp_path / "step-00000003.partial").mkdir(exist_ok=True)
            raise RunFailedError("another run trains here")

    assert save(tmp_path, 1) is None
    failure = Checkpointer(tmp_path, RANKS, 1, False, confirm).save(2, shards(2), {}, ABOUT)
    assert failure == "the checkpoint of step 2 was not saved: another run trains here; the one of step 1 stays"
    found = set(os.listdir(tmp_path))
    assert found - {"step-00000002.partial"} == {"step-00000001", "step-00000003.partial"}
    recover(tmp_path)
    assert os.listdir(tmp_path) == ["step-00000001"]


def test_two_processes_over_gloo(tmp_path: Path) -> None:
    def rank(number: int) -> None:
        signal.alarm(60)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2, timeout=timedelta(seconds=30))
        ranks = Ranks(
            number, number, Layout({Axis.DATA: 2}), torch.device("cpu"), Links(dist.PrefixStore("run", store))
        )
        mine = shards(5)[number::2]
        checkpointer = Checkpointer(tmp_path / "c", ranks, 1, asynchronous=True)
        assert checkpointer.save(5, mine, {}, ABOUT) is None
        # The main thread may use the store while the background thread does.
        assert ranks.sum_all([1.0]) == [2.0]
        assert checkpointer.close() is None
        found = [replace(shard, states={"m": torch.zeros(shard.end)}) for shard in shards(0)[1 - number :: 2]]
        assert load_latest(tmp_path / "c", found, ranks, print) == {"step": 5}
        assert all(bool((shard.states["m"] == 5).all()) for shard in found)
        (tmp_path / f"ok{number}").touch()

    for child in [in_child(partial(rank, number)) for number in range(2)]:
        os.waitpid(child, 0)
    assert (tmp_path / "ok0").exists()
    assert (tmp_path / "ok1").exists()
    assert loaded_step(tmp_path / "c") == 5


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "600k") as folder:
        yield folder


def test_a_disk_that_is_really_full(disk: Path) -> None:
    folder = disk / "checkpoints"
    # One checkpoint takes about 190 KiB: with the ballast there is room for one and a half.
    (disk / "ballast").write_bytes(b"\0" * 300_000)
    assert save(folder, 1) is None
    failure = save(folder, 2)
    assert failure is not None
    assert "step 2 was not saved" in failure
    assert "No space left on device; the one of step 1 stays" in failure
    assert os.listdir(folder) == ["step-00000001"]
    assert loaded_step(folder) == 1
    (disk / "ballast").unlink()
    assert save(folder, 2) is None
    assert loaded_step(folder) == 2
