"""Checkpoints of several ranks: every layout reads what any other wrote, and all damage is found."""

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from llmtrain.checkpoint.checksums import digest
from llmtrain.checkpoint.load import load, load_latest
from llmtrain.checkpoint.manifest import MANIFEST, SIDECAR, read_manifest
from llmtrain.checkpoint.plain_file import DamagedError
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.checkpoint.verify import verify
from llmtrain.cluster.layout import Axis, Layout, even_share
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.errors import BadInputError, RunFailedError
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import TensorSpec, UnitSpec, model_units
from llmtrain.plan.memory.checkpoint_copies import SHARD_FILE_BLOCK

T = TypeVar("T")
STATES = ("master", "m", "v")
CONFIG = GPTConfig(
    family="llama", layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, positions=32, vocab=65, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip
UNITS = model_units(CONFIG)
ABOUT = {"recipe": {"name": "test"}, "model": asdict(CONFIG)}


class ThreadRanks(Ranks):
    """Ranks that are threads of this process; collectives go through the store."""

    def sum_all(self, values: Sequence[float | torch.Tensor]) -> list[float]:
        own = [float(value) for value in values]
        if self.store is None:
            return own
        turn = self.store.add(f"sum/{self.rank}", 1)
        self.store.set(f"sum/{turn}/{self.rank}", json.dumps(own))
        every = [json.loads(self.store.get(f"sum/{turn}/{rank}")) for rank in range(self.layout.world)]
        return [sum(column) for column in zip(*every, strict=True)]


def on_ranks(world: int, work: Callable[[Ranks], T]) -> list[T]:
    """Return the result of `work` on each of `world` ranks; raises its errors."""
    store = dist.HashStore()
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        layout = Layout({Axis.DATA: world})
        try:
            results[rank] = work(
                ThreadRanks(rank, rank, layout, torch.device("cpu"), Links(store if world > 1 else None))
            )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world)]


def values_at(step: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return every state of every unit after `step`."""
    generator = torch.Generator().manual_seed(step)
    return {unit.name: {name: torch.randn(unit.numel, generator=generator) for name in STATES} for unit in UNITS}


def shards_of(values: dict[str, dict[str, torch.Tensor]], ranks: Ranks) -> list[StateShard]:
    """Return this rank's even share of every unit, as views."""
    shares = [(unit, *even_share(unit.numel, ranks.layout.world, ranks.rank)) for unit in UNITS]
    return [
        StateShard(unit, start, end, {name: state[start:end] for name, state in values[unit.name].items()})
        for unit, start, end in shares
    ]


def save(folder: Path, steps: list[int], world: int = 1, keep: int = 9, asynchronous: bool = True) -> list[str | None]:
    """Save the states of each step, and return rank 0's failures and warnings."""

    def work(ranks: Ranks) -> list[str | None]:
        checkpointer = Checkpointer(folder, ranks, keep, asynchronous)
        outcomes = []
        for step in steps:
            shards = shards_of(values_at(step), ranks)
            outcomes.append(checkpointer.save(step, shards, {"seen": step * 7}, ABOUT) or checkpointer.wait())
        checkpointer.close()
        return outcomes

    outcomes = on_ranks(world, work)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


def load_and_check(folder: Path, world: int, step: int | None) -> list[str]:
    """Load on `world` ranks, compare every value with `step`'s, and return rank 0's warnings."""

    def work(ranks: Ranks) -> list[str]:
        found = {unit.name: {name: torch.full((unit.numel,), -1.0) for name in STATES} for unit in UNITS}
        warnings: list[str] = []
        shards = shards_of(found, ranks)
        progress = load_latest(folder, shards, ranks, warnings.append, CONFIG)
        assert progress == (None if step is None else {"seen": step * 7, "step": step})
        if step is not None:
            for shard, expected in zip(shards, shards_of(values_at(step), ranks), strict=True):
                for name in STATES:
                    assert torch.equal(shard.states[name], expected.states[name])
        return warnings

    warnings = on_ranks(world, work)
    assert all(told == warnings[0] for told in warnings)
    return warnings[0]


@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (1, 3), (3, 1), (2, 3), (4, 2)])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_any_layout_reads_any_other(tmp_path: Path, saved: int, loaded: int, asynchronous: bool) -> None:
    assert save(tmp_path / "c", [10], saved, asynchronous=asynchronous) == [None]
    assert load_and_check(tmp_path / "c", loaded, 10) == []
    assert verify(tmp_path / "c" / "step-00000010").problems == []


def test_pieces_longer_than_a_block(tmp_path: Path) -> None:
    small = TensorSpec(name="u.a", parameter="a", shape=(7,), decay=True)
    unit = UnitSpec("u", (small, replace(small, name="u.b", parameter="b", shape=(3, 3_000_000))))
    values = torch.arange(unit.numel, dtype=torch.float32)
    assert values.nbytes > 2 * SHARD_FILE_BLOCK

    def write(ranks: Ranks) -> str | None:
        shard = StateShard(unit, 0, unit.numel, {"master": values})
        return Checkpointer(tmp_path, ranks, 1, asynchronous=False).save(1, [shard], {}, ABOUT)

    def read(ranks: Ranks) -> None:
        start, end = even_share(unit.numel, ranks.layout.world, ranks.rank)
        shard = StateShard(unit, start, end, {"master": torch.zeros(end - start)})
        load(tmp_path / "step-00000001", [shard], ranks)
        assert torch.equal(shard.states["master"], values[start:end])

    assert on_ranks(1, write) == [None]
    on_ranks(3, read)


def test_states_may_change_once_an_asynchronous_save_returns(tmp_path: Path) -> None:
    def work(ranks: Ranks) -> None:
        checkpointer = Checkpointer(tmp_path, ranks, 3, asynchronous=True)
        values = values_at(10)
        assert checkpointer.save(10, shards_of(values, ranks), {"seen": 70}, ABOUT) is None
        for states in values.values():
            for state in states.values():
                state.zero_()
        assert checkpointer.close() is None

    on_ranks(2, work)
    assert load_and_check(tmp_path, 1, 10) == []


def test_keeps_the_newest_and_replaces_one_of_the_same_step(tmp_path: Path) -> None:
    save(tmp_path, [10, 20, 30], 2, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000030"]
    (tmp_path / "step-00000030" / "rank-00001.safetensors").write_bytes(b"")
    # A run that went back to step 20 must keep both its next checkpoint and the one that it resumed from.
    save(tmp_path, [25], 2, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000020", "step-00000025", "step-00000030"]
    save(tmp_path, [30], 1, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["step-00000025", "step-00000030"]
    assert load_and_check(tmp_path, 1, 30) == []


def test_leftovers_of_killed_saves_are_cleaned_up(tmp_path: Path) -> None:
    save(tmp_path, [10, 20])
    (tmp_path / "step-00000020").rename(tmp_path / "step-00000020.replaced")
    for name in ("step-00000030.partial", "step-00000005.pruned", "mine.partial", "step-x.partial"):
        (tmp_path / name).mkdir()
    on_ranks(1, lambda ranks: Checkpointer(tmp_path, ranks, 3, True))
    assert sorted(os.listdir(tmp_path)) == ["mine.partial", "step-00000010", "step-00000020", "step-x.partial"]
    assert load_and_check(tmp_path, 1, 20) == []


def test_files_are_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, [10], 1)
    tensors = load_file(tmp_path / "step-00000010" / "rank-00000.safetensors")
    tokens = UNITS[0].tensors[0]
    assert torch.equal(tensors["embedding.tokens.m"].flatten(), values_at(10)["embedding"]["m"][: tokens.numel])
    assert tensors["embedding.tokens.m"].shape == tokens.shape


def test_200_flipped_bits_are_found_and_named(tmp_path: Path) -> None:
    save(tmp_path, [10, 20], 3)
    rng, newest = random.Random(1), tmp_path / "step-00000020"
    files = sorted(newest.iterdir())
    for turn in range(200):
        path = files[turn % len(files)]
        original = path.read_bytes()
        # Half of the flips are near the front, because headers are short compared with the data.
        position = rng.randrange(len(original) if turn % 2 else min(len(original), 512))
        damaged = bytearray(original)
        damaged[position] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        assert any(path.name in problem for problem in verify(newest).problems), (path, position)
        warnings = load_and_check(tmp_path, 1, 10)
        assert len(warnings) == 1
        assert path.name in warnings[0]
        assert str(newest) in warnings[0]
        path.write_bytes(original)
    assert verify(newest).problems == []


def test_every_file_cut_short_grown_or_missing_is_found(tmp_path: Path) -> None:
    save(tmp_path, [10, 20], 3)
    newest = tmp_path / "step-00000020"
    for path in sorted(newest.iterdir()):
        original = path.read_bytes()
        for content in (original[:-1], original[: len(original) // 2], b"", original + b"\0", None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            assert any(path.name in problem for problem in verify(newest).problems)
            assert path.name in load_and_check(tmp_path, 1, 10)[0]
            path.write_bytes(original)
    (newest / "notes.txt").touch()
    assert verify(newest).problems == ["notes.txt is not part of the checkpoint"]


def test_damage_that_one_rank_sees_makes_all_go_back(tmp_path: Path) -> None:
    save(tmp_path, [10, 20], 2)
    path = tmp_path / "step-00000020" / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert "rank-00001.safetensors" in load_and_check(tmp_path, 3, 10)[0]
    assert "head.norm.weight (v)" in verify(path.parent).problems[0]
    with pytest.raises(RunFailedError, match=r"rank-00001\.safetensors"):
        on_ranks(2, lambda ranks: load(path.parent, shards_of(values_at(0), ranks), ranks))


def test_none_sound_is_an_error_and_none_at_all_is_not(tmp_path: Path) -> None:
    assert load_and_check(tmp_path / "absent", 2, None) == []
    assert load_and_check(tmp_path, 2, None) == []
    save(tmp_path, [10], 2)
    (tmp_path / "step-00000010" / MANIFEST).unlink()
    with pytest.raises(RunFailedError, match=r"no checkpoint in .* is sound"):
        load_and_check(tmp_path, 2, 10)


def test_another_model_is_refused_not_skipped(tmp_path: Path) -> None:
    save(tmp_path, [10], 2)
    other = replace(CONFIG, heads=2, kv_heads=2)
    with pytest.raises(BadInputError, match=r"model\.(kv_)?heads is 2 in the recipe but [24]"):
        on_ranks(2, lambda r: load_latest(tmp_path, shards_of(values_at(0), r), r, print, other))
    wide = model_units(replace(CONFIG, ffn=96))[1]
    shard = StateShard(wide, 0, wide.numel, {"master": torch.zeros(wide.numel)})
    with pytest.raises(BadInputError, match=r"blocks\.0\.mlp\.gate\.weight"):
        on_ranks(2, lambda ranks: load_latest(tmp_path, [shard], ranks, print))


def test_only_a_checkpoint_of_step_0_may_lack_optimizer_states(tmp_path: Path) -> None:
    def save_masters(step: int, ranks: Ranks) -> str | None:
        shards = shards_of(values_at(10), ranks)
        masters = [replace(shard, states={"master": shard.states["master"]}) for shard in shards]
        return Checkpointer(tmp_path / str(step), ranks, 1, False).save(step, masters, {}, ABOUT)

    on_ranks(1, lambda ranks: [save_masters(step, ranks) for step in (0, 10)])
    found = values_at(3)
    on_ranks(1, lambda ranks: load_latest(tmp_path / "0", shards_of(found, ranks), ranks, print))
    assert torch.equal(found["head"]["master"], values_at(10)["head"]["master"])
    assert not found["head"]["m"].any()
    assert not found["head"]["v"].any()
    with pytest.raises(BadInputError, match="lacks the optimizer states"):
        on_ranks(1, lambda ranks: load_latest(tmp_path / "10", shards_of(found, ranks), ranks, print))


def _forge(folder: Path, change: Callable[[dict], object]) -> None:
    """Change a manifest and correct its checksum, as an attacker can."""
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    text = json.dumps(content).encode()
    (folder / MANIFEST).write_bytes(text)
    (folder / SIDECAR).write_text(f"XXH3_{digest(text)}  {MANIFEST}\n")


def _rename_file(content: dict, name: str) -> None:
    content["files"][name] = content["files"].pop("rank-00000.safetensors")
    for tensor in content["tensors"].values():
        for piece in (piece for pieces in tensor["states"].values() for piece in pieces):
            piece["file"] = name


def _first_piece(content: dict) -> dict:
    return content["tensors"]["embedding.tokens"]["states"]["master"][0]


FORGERIES: dict[str, Callable[[dict], object]] = {
    "climbs out": lambda c: _rename_file(c, "../rank-00000.safetensors"),
    "absolute": lambda c: _rename_file(c, "/etc/passwd"),
    "newline": lambda c: _rename_file(c, "rank-00000.safetensors\n"),
    "other file": lambda c: _first_piece(c).update(file="rank-00007.safetensors"),
    "negative offset": lambda c: _first_piece(c).update(offset=-8),
    "offset beyond": lambda c: _first_piece(c).update(offset=2**62),
    "overlap": lambda c: _first_piece(c).update(offset=_first_piece(c)["offset"] + 4),
    "huge block": lambda c: c.update(block=2**50),
    "block of zero": lambda c: c.update(block=0),
    "huge header": lambda c: c["files"]["rank-00000.safetensors"].update(header=2**40, bytes=2**41),
    "huge tensor": lambda c: c["tensors"]["embedding.tokens"].update(shape=[2**60, 2**60]),
    "no tensors": lambda c: c.update(tensors={}),
    "missing state": lambda c: c["tensors"]["embedding.tokens"]["states"].pop("v"),
    "wrong type": lambda c: c.update(step="10"),
    "unknown key": lambda c: c.update(loader="os.system"),
    "too many layers": lambda c: c["model"].update(layers=10**12),
    "other model": lambda c: c["model"].update(vocab=66),
    "no model": lambda c: c.update(model={"family": "llama"}),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_strangers_manifest_is_refused(tmp_path: Path, forgery: str) -> None:
    save(tmp_path, [10], 1)
    _forge(tmp_path / "step-00000010", FORGERIES[forgery])
    with pytest.raises(RunFailedError, match="is sound"):
        load_and_check(tmp_path, 1, 10)


def test_only_plain_files_are_read(tmp_path: Path) -> None:
    save(tmp_path, [10], 1)
    folder = tmp_path / "step-00000010"
    content = (folder / "rank-00000.safetensors").read_bytes()
    (tmp_path / "elsewhere").write_bytes(content)
    for name in ("rank-00000.safetensors", MANIFEST):
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "elsewhere")
        assert name in verify(folder).problems[0]
        (folder / name).unlink()
        os.mkfifo(folder / name)
        assert name in verify(folder).problems[0]
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(DamagedError):
        read_manifest(folder)


@pytest.mark.parametrize("world", [1, 3])
def test_a_full_disk_is_one_sentence_and_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    save(tmp_path, [10], world)
    write = os.write

    def full(fd: int, data: memoryview) -> int:
        if os.fstat(fd).st_size > 40_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        (failure,) = save(tmp_path, [20], world)
    assert failure is not None
    assert failure.startswith("the checkpoint of step 20 was not saved: ")
    assert "No space left on device; the one of step 10 stays" in failure
    assert "\n" not in failure
    assert os.listdir(tmp_path) == ["step-00000010"]
    assert load_and_check(tmp_path, 2, 10) == []
    assert save(tmp_path, [20], world) == [None]
    assert load_and_check(tmp_path, 2, 20) == []


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (failure,) = save(tmp_path / "file" / "c", [10], 2)
    assert failure is not None
    assert "Not a directory; there is no earlier one" in failure


def test_parts_that_leave_something_out_are_not_a_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, [10], 1)

    def work(ranks: Ranks) -> str | None:
        shards = shards_of(values_at(20), ranks)[ranks.rank :]
        return Checkpointer(tmp_path, ranks, 1, asynchronous=False).save(20, shards, {}, ABOUT)

    failures = on_ranks(2, work)
    assert failures[0] == failures[1]
    assert failures[0] is not None
    assert "leaves gaps or overlaps in embedding.tokens" in failures[0]
    assert os.listdir(tmp_path) == ["step-00000010"]
