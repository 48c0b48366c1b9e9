"""The loop in one process: what must not change the curve, what ends a run, and where a run may start from."""

import re
import time
from collections.abc import Callable
from math import nan
from pathlib import Path

import pytest
import torch
import transformers
from llmtrain.checkpoint import save
from llmtrain.errors import BadInputError, PreemptedError, RunFailedError
from llmtrain.launch import run_lock as lock
from llmtrain.sharding.engine import Engine
from llmtrain.training import loop as loop
from llmtrain.training import run as parts
from llmtrain.training.passes import Passes
from llmtrain.training.run import Run
from llmtrain_data.config import DataConfig
from llmtrain_data.dataset import open_split
from llmtrain_data.errors import DataError
from llmtrain_kernels import matmul
from llmtrain_kernels.operators import constant

from tests.in_process import train_here
from tests.tiny import rows, write_run

RECIPE = """
model: {{family: gpt2, layers: 4, hidden: 32, heads: 4, vocab: 64}}
data: {{path: {folder}/set, sequence_length: 16}}
train: {{steps: 20, global_batch: 8, microbatch: 2, eval_every: 10}}
optimizer: {{lr: 1.0e-2, warmup: 5}}
checkpoint: {{every: 6}}
logging: {{every: 1, dir: {folder}/runs}}
"""

Train = Callable[..., list[float]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path, RECIPE)


@pytest.fixture
def train(folder: Path) -> Train:
    """Train by the tiny recipe with overrides, and return the run's training losses."""

    def run(*overrides: str) -> list[float]:
        return losses(folder / "runs" / train_here(folder / "tiny.yaml", *overrides).name)

    return run


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if "event" not in row]


def test_accumulation_and_recomputation_keep_the_curve(train: Train) -> None:
    plain = train()
    assert len(plain) == 20
    assert plain[-1] < plain[0] - 0.5
    for number, key in enumerate(
        [
            "train.microbatch=8",
            "train.microbatch=1",
            "activation_checkpointing=full",
            "activation_checkpointing.every=3",
        ]
    ):
        assert train(f"name=other{number}", key) == pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backends_keep_the_curve(train: Train, backend: str) -> None:
    assert train(f"name={backend}", f"optimizer.backend={backend}") == pytest.approx(train(), rel=1e-5)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_16_bit_stays_near_fp32(train: Train, compute: str) -> None:
    assert train("name=half", f"precision.compute={compute}") == pytest.approx(train(), rel=2e-2)


def test_fp16_overflow_halves_the_scale_and_is_skipped(train: Train, folder: Path) -> None:
    # Scaled by 2**40, every 16-bit gradient overflows at first.
    curve = train("precision.compute=fp16", f"precision.loss_scale={2.0**40}", "train.max_skipped=1", "train.steps=60")
    scales = [row["loss_scale"] for row in rows(folder / "runs" / "tiny") if "event" not in row]
    skipped = rows(folder / "runs" / "tiny")[-1]["skipped_steps"]
    assert scales[0] == 2.0**39
    assert 5 < skipped < 30
    assert scales[-1] == 2.0 ** (40 - skipped)
    assert curve[-1] < curve[0] - 0.5


def test_fp16_takes_its_own_scale_where_there_was_none(train: Train, folder: Path) -> None:
    train("train.steps=6")
    train("name=half", f"checkpoint.resume={folder}/runs/tiny", "precision.compute=fp16", "train.steps=8")
    train("name=back", f"checkpoint.resume={folder}/runs/half", "train.steps=9")
    assert [row["loss_scale"] for row in rows(folder / "runs" / "half") if "event" not in row] == [65536.0] * 2


def test_a_run_that_is_refused_leaves_the_folder_free(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder stays free also after an error before the first step."""
    monkeypatch.setattr(parts, "build", lambda *parts: pytest.fail("no memory"))
    with pytest.raises(pytest.fail.Exception):
        train()
    assert lock.holder_of(folder / "runs" / "tiny") is None
    assert (folder / "runs" / "tiny" / lock.LOCK).read_text() == ""


def test_any_seed_will_do(train: Train) -> None:
    assert len(train("seed=9000000000000000000", "model.dropout=0.1", "train.steps=5")) == 5


def stop_in(monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    original = loop.forward_backward

    def stopped(run: Run, step: int) -> Passes:
        passes = original(run, step)
        passes.sums[1] += step == last
        return passes

    monkeypatch.setattr(loop, "forward_backward", stopped)


def break_step(monkeypatch: pytest.MonkeyPatch, broken: Callable[[int], bool]) -> None:
    original = loop.forward_backward

    def spoilt(run: Run, step: int) -> Passes:
        passes = original(run, step)
        passes.sums[2] *= nan if broken(step) else 1
        return passes

    monkeypatch.setattr(loop, "forward_backward", spoilt)


def test_a_run_whose_folder_was_taken_ends(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "RENEWAL", 0.01)

    original = loop.forward_backward

    def take(run: Run, step: int) -> Passes:
        if step == 7:
            (folder / "runs" / "tiny" / lock.LOCK).write_text("{}")
            # Wait until the thread that renews the lock has seen the change.
            end = time.monotonic() + 60
            while time.monotonic() < end and not run.lock._lost:
                time.sleep(0.01)
        return original(run, step)

    monkeypatch.setattr(loop, "forward_backward", take)
    with pytest.raises(RunFailedError, match="is now being trained in by another process, which took it while this"):
        # A checkpoint that is still being written when the folder is lost does not become one.
        train("checkpoint.async=false")
    assert len(losses(folder / "runs" / "tiny")) == 7
    assert [path.name for path in (folder / "runs" / "tiny" / "checkpoints").iterdir()] == ["step-00000006"]


def test_non_finite_step_is_skipped_whole(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = train("train.steps=8", "optimizer.schedule=constant")
    break_step(monkeypatch, lambda step: step == 7)
    after = train("name=broken", "train.steps=8", "optimizer.schedule=constant")
    assert after == before  # The loss of a step is computed before its update.
    end = rows(folder / "runs" / "broken")[-1]
    assert end["skipped_steps"] == 1
    # The skipped step has not changed the weights: its validation loss is that of the step before.
    shorter = [row for row in rows(folder / "runs" / "broken") if row.get("event") == "eval"][-1]["loss"]
    monkeypatch.undo()
    train("name=short", "train.steps=7", "optimizer.schedule=constant")
    assert shorter == [row for row in rows(folder / "runs" / "short") if row.get("event") == "eval"][-1]["loss"]


def test_too_many_non_finite_steps_stop_the_run(train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_step(monkeypatch, lambda step: step >= 8)
    with pytest.raises(RunFailedError, match=r"3 steps in a row .*, up to step 11; the checkpoints in .* are sound"):
        train("train.max_skipped=3")
    with pytest.raises(RunFailedError, match=r"for 1 step in a row .*, up to step 9; there is no checkpoint yet"):
        train("name=none", "train.max_skipped=1", "checkpoint.every=0")
    assert [path.name for path in (folder / "runs" / "tiny" / "checkpoints").iterdir()] == ["step-00000006"]
    assert rows(folder / "runs" / "tiny")[-1]["outcome"] == "failed"


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_stopped_run_goes_on_bit_exactly(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    keys = [f"precision.compute={precision}", "model.dropout=0.1", "train.eval_every=3"]
    calm = train("name=calm", *keys)
    stop_in(monkeypatch, 8)
    with pytest.raises(PreemptedError, match="step 9"):
        train(*keys)
    monkeypatch.undo()
    assert train(*keys) == calm
    evaluations = [
        [(row["step"], row["loss"]) for row in rows(folder / "runs" / name) if row.get("event") == "eval"]
        for name in ("tiny", "calm")
    ]
    assert evaluations[0] == evaluations[1]
    assert [step for step, _ in evaluations[0]] == [0, 3, 6, 9, 12, 15, 18, 20]


def test_finished_run_is_left_as_it_is(train: Train, folder: Path) -> None:
    first = train()
    assert train() == first
    assert sum(row.get("event") == "end" for row in rows(folder / "runs" / "tiny")) == 1


def test_run_starts_from_another_one(train: Train, folder: Path) -> None:
    whole = train("optimizer.schedule=constant")
    train("name=half", "optimizer.schedule=constant", "train.steps=12")
    rest = train("name=rest", "optimizer.schedule=constant", f"checkpoint.resume={folder}/runs/half")
    assert rest == whole[12:]


def test_never_resuming_refuses_a_used_folder(train: Train) -> None:
    train("train.steps=6", "checkpoint.resume=never")
    with pytest.raises(BadInputError, match="never"):
        train("train.steps=6", "checkpoint.resume=never")


def test_recipe_that_does_not_fit_leaves_the_folder_as_it_was(train: Train, folder: Path) -> None:
    train("train.steps=6")
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    with pytest.raises(BadInputError, match=r"model.hidden is 64 in the recipe but 32"):
        train("train.steps=12", "model.hidden=64")
    assert {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()} == before


def test_what_changed_since_the_last_start_is_said(
    train: Train, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train("train.steps=6")
    assert "changed since" not in "".join(capsys.readouterr())
    record = (folder / "runs/tiny/recipe.resolved.yaml").read_text()
    train("train.steps=6", "checkpoint.resume=elsewhere")
    shown = "".join(capsys.readouterr())
    assert "checkpoint.resume: auto -> elsewhere, changed since the last start; it has no effect" in shown
    assert re.search("continues after +step 6, and train.steps is 6: nothing is left to train", shown)
    # Nothing was trained with that recipe.
    assert (folder / "runs/tiny/recipe.resolved.yaml").read_text() == record
    train("train.steps=8", "data.sequence_length=8", "model.positions=16", "optimizer.clip=0.5")
    shown = "".join(capsys.readouterr())
    assert re.findall(r"(\S+: \S+ -> \S+), changed since the last start", shown) == [
        "data.sequence_length: 16 -> 8",
        "train.steps: 6 -> 8",
        "optimizer.clip: 1.0 -> 0.5",
    ]


def test_a_changed_first_loss_scale_has_no_effect_on_a_resumed_run(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = r"precision.loss_scale: 65536.0 -> 2.0, changed since the last start(; it has no effect)?"
    for compute, without_effect in (("fp16", "; it has no effect"), ("bf16", "")):
        train(f"name={compute}", f"precision.compute={compute}", "train.steps=6")
        train(f"name={compute}", "precision.compute=fp16", "precision.loss_scale=2", "train.steps=8")
        assert re.findall(sentence, "".join(capsys.readouterr())) == [without_effect]


@pytest.mark.parametrize("record", ["train: {steps: 6", "no recipe", "[a, b]", "train: 5", b"\xff"])
def test_a_record_that_is_damaged_stops_no_run(record: str | bytes, train: Train, folder: Path) -> None:
    train("train.steps=6")
    place = folder / "runs" / "tiny" / "recipe.resolved.yaml"
    place.write_bytes(record if isinstance(record, bytes) else record.encode())
    train("train.steps=8")
    assert "steps: 8" in place.read_text()


def test_damaged_checkpoint_is_skipped(train: Train, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = train("name=calm")
    assert train("checkpoint.keep=9") == whole
    newest = folder / "runs" / "tiny" / "checkpoints" / "step-00000020" / "rank-00000.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    capsys.readouterr()
    assert train() == whole
    shown = "".join(capsys.readouterr())
    assert "skipped the checkpoint" in shown
    assert "step-00000020" in shown
    assert re.search(r"continues after +step 18", shown)


def test_run_starts_from_hugging_face_weights(train: Train, folder: Path) -> None:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=64, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        theirs.transformer.wte.weight.mul_(30)
    theirs.save_pretrained(folder / "hf")
    sizes = "family: gpt2, layers: 4, hidden: 32, heads: 4, vocab: 64"
    (folder / "tiny.yaml").write_text(RECIPE.format(folder=folder).replace(sizes, f"hf: {folder}/hf"))
    first = train("train.steps=5")[0]
    samples = open_split(DataConfig(path=f"{folder}/set", sequence_length=16), "train")
    batch = torch.from_numpy(samples.batch(1234, 0, 8))
    with torch.no_grad():
        logits = theirs(batch[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    assert first == pytest.approx(float(expected), rel=1e-5)
    # It resumes from its own checkpoints, also without that folder.
    (folder / "hf").rename(folder / "gone")
    assert len(train("train.steps=7")) == 7
    with pytest.raises(BadInputError, match=r"model\.hf is .*/hf, which is not a folder"):
        train("name=new")
    # Nor does a run that began with another model.
    record = folder / "runs" / "tiny" / "recipe.resolved.yaml"
    record.write_text(re.sub(r"(?m)^  hf: .*$", "  hf: null", record.read_text()))
    with pytest.raises(BadInputError, match=r"hf/config\.json is missing; expected a folder of a Hugging Face model"):
        train("train.steps=8")


def test_tokens_beyond_the_vocabulary_are_refused(train: Train) -> None:
    with pytest.raises(DataError, match=r"set\.bin holds id 62 at token 29 of document 0; expected 0 to 59"):
        train("model.vocab=60")


def test_compiled_blocks_keep_the_curve(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run takes the graphs of both passes from torch's cache on disk, and adds none."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(matmul, "onednn_is_wider", constant(lambda: True))
    plain, graphs = train("train.steps=6", "train.eval_every=0"), list[set[Path]]()
    for name in ("compiled", "again"):
        torch.compiler.reset()
        compiled = train(f"name={name}", "train.steps=6", "train.eval_every=0", "train.compile=true")
        assert compiled == pytest.approx(plain, rel=1e-5)
        graphs.append({path for path in (tmp_path / "cache" / "fxgraph").rglob("*") if path.is_file()})
    assert len(graphs[0]) >= 2
    assert graphs[0] == graphs[1]


def test_another_batch_goes_on_where_the_data_stopped(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    original = loop.forward_backward

    def noted(run: Run, step: int) -> Passes:
        taken.append(run.progress.samples)
        return original(run, step)

    monkeypatch.setattr(loop, "forward_backward", noted)
    train("train.steps=6")
    train("train.steps=8", "train.global_batch=16")
    train("train.steps=10", "train.global_batch=4")
    assert taken == [0, 8, 16, 24, 32, 40, 48, 64, 80, 84]
    assert [row["tokens"] for row in rows(folder / "runs" / "tiny") if "event" not in row][-1] == 88 * 16


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_last_checkpoint_that_is_not_there(train: Train, monkeypatch: pytest.MonkeyPatch, asynchronous: str) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(save, "commit", full)
    with pytest.raises(RunFailedError, match="the checkpoint of step 6 was not saved: No space left"):
        train("train.steps=6", f"checkpoint.async={asynchronous}")


def test_an_old_checkpoint_that_stays_is_no_failure(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def busy(*arguments: object) -> None:
        raise OSError(39, "Directory not empty")

    monkeypatch.setattr(save, "prune", busy)
    train("train.steps=6")
    assert rows(folder / "runs" / "tiny")[-1]["event"] == "end"
    said = "".join(capsys.readouterr())
    assert "the checkpoint of step 6 is saved, but an older one stays: Directory not empty" in said


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_the_library_of_products_keeps_the_curve(train: Train, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    product = matmul._onednn
    made: list[None] = []
    monkeypatch.setattr(matmul, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(matmul, "_onednn", lambda *tensors: (made.append(None), product(*tensors))[1])
    curves = {}
    for wider in (False, True):
        monkeypatch.setattr(matmul, "onednn_is_wider", lambda wider=wider: wider)
        curves[wider] = train(f"name=wider-{wider}", f"model.family={family}")
        assert bool(made) is wider
    assert curves[True] == pytest.approx(curves[False], rel=1e-5)


def test_a_row_has_the_time_that_a_step_waits_for_offloaded_states(
    train: Train, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = Engine.finish_steps
    monkeypatch.setattr(Engine, "finish_steps", lambda engine: time.sleep(0.2) or finish(engine))
    train("train.steps=2", "train.eval_every=0", "optimizer.warmup=0", "offload.optimizer=host")
    assert min(row["step_time_s"] for row in rows(folder / "runs" / "tiny") if "event" not in row) >= 0.2
