"""How long a checkpoint of offloaded states holds up the run: planned from the described rates, and measured."""

import ctypes
import errno
import json
import threading
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from llmtrain.checkpoint import safetensors_file
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.main import main
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Links, Ranks
from llmtrain.model.tensors import TensorSpec, UnitSpec
from llmtrain.offload import striped_file
from llmtrain.offload.states import FileStates
from llmtrain.plan.memory.checkpoint_copies import buffer_bytes
from llmtrain.plan.offload import PARTS
from llmtrain.plan.per_rank.rank_buckets import rank_buckets
from llmtrain.plan.per_rank.roles import roles
from llmtrain.plan.resolve.described import described_run
from llmtrain.plan.resolve.make import make_plan
from llmtrain.telemetry.planned import measured_figures, planned_and_measured, planned_figures

RECIPE = """
model: {family: llama, layers: 2, hidden: 64, heads: 2, ffn: 128, vocab: 512}
data: {path: set, sequence_length: 32}
train: {global_batch: 2, microbatch: 1}
precision: {compute: bf16}
zero: {stage: 0}
activation_checkpointing: none
offload: {optimizer: nvme, share: 1}
"""
# The volumes are so slow that a save takes longer than the passes of a step.
NVME = [{"path": "/fast", "bandwidth": "600kB/s"}, {"path": "/slow", "bandwidth": "200kB/s"}]


def cluster(ranks: int = 1, peak: str = "1GFLOP/s", **host: str) -> dict[str, Any]:
    accelerator = {"peak": {"bf16": peak}, "host_link": "2MB/s"} if peak else {"host_link": "2MB/s"}
    return {"accelerator": accelerator, "node": {"ranks": ranks, "host": host or {"bandwidth": "10MB/s"}, "nvme": NVME}}


@pytest.fixture(autouse=True)
def _in_folder_with_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def shown(capsys: pytest.CaptureFixture[str], described: dict[str, Any], *keys: str, ranks: int = 1) -> tuple[Any, str]:
    words = ["plan", "tiny.yaml", *keys, f"cluster={json.dumps(described)}", "--ranks", str(ranks)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert main(words) == 0
    return found, capsys.readouterr().out


def test_a_save_reads_all_states_before_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = shown(capsys, cluster())
    total, save = found["parameters"], found["save"]
    # Three quarters lie on the volume that is three times as fast. Then the system gets a copy.
    seconds = 12 * total * 0.75 / 6e5 + 2 * 12 * total / 1e7
    assert (save["ranks"], save["taken"], save["waits"]) == (1, 12 * total, True)
    assert save["seconds"] == pytest.approx(seconds, rel=1e-3)
    passes = found["least_seconds"]["compute"]
    assert save["passes"] == pytest.approx(passes)
    assert save["held"] == pytest.approx(seconds - passes, rel=1e-3)
    assert save["held"] > 0
    assert "the next optimizer step waits until 1." in said
    assert "held up for " in said
    faster, _ = shown(capsys, cluster(peak="1MFLOP/s"))
    assert faster["save"]["held"] == 0.0


def test_replicas_read_a_part_each(capsys: pytest.CaptureFixture[str]) -> None:
    one, _ = shown(capsys, cluster())
    two, _ = shown(capsys, cluster(ranks=2), ranks=2)
    assert two["save"]["ranks"] == 2
    assert two["save"]["taken"] == one["save"]["taken"]
    assert two["save"]["seconds"] == pytest.approx(one["save"]["seconds"], rel=1e-3)
    # Of half of the states, which leave, one of the two reads all.
    half, _ = shown(capsys, cluster(ranks=2), "offload.share=0.5", ranks=2)
    files = (one["save"]["seconds"] - 2 * one["save"]["taken"] / 1e7) / 2
    assert half["save"]["seconds"] == pytest.approx(files + 2 * half["save"]["taken"] / 1e7, rel=0.05)


def test_states_on_the_host_are_copied_to_the_system(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = shown(capsys, cluster(), "offload.optimizer=host")
    assert found["save"]["seconds"] == pytest.approx(2 * 12 * found["parameters"] / 1e7)


def test_a_save_in_the_foreground_computes_nothing_beside(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = shown(capsys, cluster(), "checkpoint.async=false")
    assert (found["save"]["passes"], found["save"]["held"]) == (0.0, found["save"]["seconds"])


def test_unknown_rates_give_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = shown(capsys, cluster(memory="1TB"))
    assert (found["save"]["seconds"], found["save"]["held"]) == (None, None)
    assert "are read; how long is not known without all rates" in said
    command = "`llmtrain bench memory --paths /fast --paths /slow --output FILE`, with --cluster and your cluster file,"
    assert f"{command} measures" in " ".join(said.split())
    found, said = shown(capsys, cluster(peak=""))
    assert found["save"]["seconds"] > 0
    assert (found["save"]["passes"], found["save"]["held"]) == (None, None)
    assert ", beside its passes" in said


def test_copies_of_states_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    found, said = shown(capsys, cluster(), "offload.optimizer=none", "offload.share=0")
    assert found["save"]["seconds"] == 12 * found["parameters"] / 2e6
    assert found["save"]["waits"] is False
    assert "of states of 1 rank are copied, which holds up the run for at least" in said
    # In the foreground the states themselves are written, block by block.
    written, _ = shown(capsys, cluster(), "offload.optimizer=none", "offload.share=0", "checkpoint.async=false")
    assert written["save"] is None


def test_buffers_hold_what_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    keys = (f"offload.paths=[{volume}]", "offload.bucket=8192")
    plan = make_plan(*described_run("tiny.yaml", keys, 1))
    buckets, taken = rank_buckets(plan, 0), list[int]()
    states = FileStates(buckets, plan.sharding.offload.paths, plan.sharding.offload.bandwidths)
    allocate = striped_file.aligned_bytes

    def counted(count: int) -> torch.Tensor:
        taken.append(count + striped_file.FILE_ALIGNMENT)
        return allocate(count)

    monkeypatch.setattr(striped_file, "aligned_bytes", counted)
    for number, bucket in enumerate(buckets):
        states.start_read(number, 0, 0, bucket.numel)()
        states.start_read(number, 1, 1, bucket.numel)()
    states.close()
    (role,) = roles(plan)
    block = 4 * max(tensor.numel for unit in role.units for tensor in unit.tensors)
    assert block < 16 * 2**20
    together = PARTS * max(taken)
    assert together <= buffer_bytes(plan, role) - block <= together + PARTS * 2 * striped_file.FILE_ALIGNMENT
    without = make_plan(*described_run("tiny.yaml", ("offload.optimizer=none", "offload.share=0"), 1))
    assert buffer_bytes(without, role) == 0


@dataclass(frozen=True)
class Late(StateShard):
    """States that are read while the checkpoint is written."""

    read_late: bool = True


def test_states_may_change_once_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not only once they are durable; the seconds until then are measured."""
    begins, durable, fsync = threading.Event(), threading.Event(), safetensors_file.os.fsync

    class Slow(Late):
        def read(self, name: str, first: int, last: int) -> torch.Tensor:
            assert begins.wait(30)
            return super().read(name, first, last)

    def waiting(file: int) -> None:
        assert durable.wait(30)
        fsync(file)

    monkeypatch.setattr(safetensors_file.os, "fsync", waiting)
    unit = UnitSpec("embedding", (TensorSpec(name="embedding.weight", parameter="weight", shape=(4, 2), decay=True),))
    shard = Slow(unit, 0, 8, {name: torch.arange(8.0) for name in ("master", "m", "v")})
    # Making it would wait too.
    (tmp_path / "checkpoints").mkdir()
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"), Links(None))
    saves = Checkpointer(tmp_path / "checkpoints", ranks, keep=1, asynchronous=True)
    assert saves.wait_until_taken() < 0.1
    saves.save(1, [shard], {}, {"recipe": {}, "model": {}})
    threading.Timer(0.3, begins.set).start()
    assert 0.2 < saves.wait_until_taken() < 20
    assert not durable.is_set()
    durable.set()
    saves.close()


def test_the_end_has_both() -> None:
    plan = make_plan(*described_run("tiny.yaml", [f"cluster={json.dumps(cluster())}"], 1))
    planned = planned_figures(plan)
    assert planned["save_held_s"] > 0
    measured = measured_figures({}, {}, 0.25)
    assert ("held up by a checkpoint", f"{planned['save_held_s']:.2f} s", "250 ms") in [
        *planned_and_measured(planned, measured)
    ]
    unknown = {**planned, "save_held_s": None}
    assert ("held up by a checkpoint", "-", "250 ms") in [*planned_and_measured(unknown, measured)]
    without = make_plan(*described_run("tiny.yaml", ["offload.optimizer=none", "offload.share=0"], 1))
    assert "save_held_s" not in planned_figures(without)


def test_a_save_shows_signs_of_life_until_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a long range, and while a slow disk makes the file durable: the watchdog would take them for a hang."""
    monkeypatch.setattr(safetensors_file, "_WRITE_BLOCK", 16)
    monkeypatch.setattr(safetensors_file, "_DURABLE_BLOCK", 256)
    sync, life, synced = safetensors_file._sync_range, list[str](), list[int]()

    def sync_range(file: int, start: int, nbytes: int) -> None:
        sync(file, start, nbytes)
        synced.append(start)
        life.append("durable")

    monkeypatch.setattr(safetensors_file, "_sync_range", sync_range)
    path = tmp_path / "file"
    with safetensors_file.DurableFile(path, lambda: life.append("moved")) as file:
        file.write(bytes(600))
    assert life == ["moved"] * 38 + ["durable", "moved"] * 3
    assert synced == [0, 256, 512]

    unit = UnitSpec("embedding", (TensorSpec(name="embedding.weight", parameter="weight", shape=(4, 2), decay=True),))
    ranks, moved = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"), Links(None)), list[int]()
    monkeypatch.setattr(ranks.activity, "moving", lambda: moved.append(1))
    saves = Checkpointer(tmp_path / "checkpoints", ranks, keep=1, asynchronous=False)
    saves.save(
        1,
        [StateShard(unit, 0, 8, {name: torch.arange(8.0) for name in ("master", "m", "v")})],
        {},
        {"recipe": {}, "model": {}},
    )
    # 96 bytes, after a header.
    assert len(moved) > 96 // 16


def test_an_error_of_the_disk_in_a_part_fails_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fsync of the end would not repeat it."""

    def broken(*given: Any) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(
        safetensors_file.ctypes, "CDLL", lambda *given, **options: SimpleNamespace(sync_file_range=broken)
    )
    with pytest.raises(OSError, match="file") as error, safetensors_file.DurableFile(tmp_path / "file") as file:
        file.write(b"data")
    assert error.value.errno == errno.EIO
