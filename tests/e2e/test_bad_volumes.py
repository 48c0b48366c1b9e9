"""Folders that cannot hold offloaded states, and keys about them: one sentence, exit code 2, before any process starts
and before anything is written."""
# ruff: noqa: E501 (one row of the table per line)

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from llmtrain.cli.main import main

from tools.bench.volumes import volumes

RECIPE = """
model: {preset: gpt2-1m}
data: {path: prepared, sequence_length: 64}
offload: {optimizer: nvme}
"""
# (what is bad, keys, what the sentence must contain)
BAD = [
    ("a path that is not there", "offload.paths=[{here}/nowhere]", "nowhere, which is no folder on this machine; set offload.paths to folders of NVMe volumes"),
    ("a file", "offload.paths=[recipe.yaml]", "recipe.yaml, which is no folder on this machine"),
    ("no path", "offload.paths=[]", "offload.optimizer is nvme, but neither offload.paths nor the cluster file's node.nvme names a folder"),
    ("a path that is empty", "offload.paths=['']", "offload.paths has an empty path; give a folder of each NVMe volume"),
    ("tmpfs", "offload.paths=[/dev/shm]", "offload.paths has /dev/shm, which is on a tmpfs, in memory; set offload.paths to folders of NVMe volumes"),
    ("two folders of one volume", "offload.paths=[{here}/a,{here}/b]", "b, which are on one volume; leave one of them out"),
    ("one folder twice", "offload.paths=[{here}/a,{here}/a]", "a twice; give a folder of each volume"),
    ("a link to the same folder", "offload.paths=[{here}/a,{here}/link]", "link, which are on one volume; leave one of them out"),
    ("a folder of the proc file system", "offload.paths=[/proc]", "offload.paths has /proc, "),
    ("no states leave", "offload.paths=[{here}/a] offload.optimizer=none", "offload.paths is given, but nothing rests in files"),
    ("states on the host", "offload.paths=[{here}/a] offload.optimizer=host", "offload.paths is given, but nothing rests in files"),
    ("a share above 1", "offload.share=1.01", "offload.share is 1.01; expected a number from 0 to 1 or auto"),
    ("a share below 0", "offload.share=-0.1", "offload.share is -0.1; expected a number from 0 to 1 or auto"),
    ("a share that is no number", "offload.share=.nan", "offload.share is nan; expected a finite number"),
    ("a share in words", "offload.share=half", "offload.share is half; expected a number from 0 to 1 or auto"),
    ("a bucket that is too small", "offload.bucket=1023", "offload.bucket is 1023; expected a whole number from 1,024 to 1,073,741,824 or auto"),
    ("a bucket that is too large", "offload.bucket=1073741825", "offload.bucket is 1073741825; expected a whole number from 1,024"),
    ("nothing that is brought to the device", "offload.optimizer=none offload.step=device", "offload.step is device, but optimizer is none, so that nothing is brought to the device; set optimizer to host or nvme"),
    ("an unknown tier", "offload.optimizer=disk", "offload.optimizer is disk; expected one of none, host, nvme"),
]  # fmt: skip


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("prepared.bin", "prepared.idx"):
        Path(name).touch()
    for name in ("a", "b"):
        Path(name).mkdir()
    Path("link").symlink_to("a")
    Path("recipe.yaml").write_text(RECIPE)
    return tmp_path


def expect_one_sentence(keys: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    code = main(["run", "recipe.yaml", "--nproc", "2", *keys.split()])
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.out == ""
    assert captured.err.startswith("llmtrain: ")
    assert captured.err.count("\n") == 1
    assert expected in captured.err
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(("keys", "expected"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad(keys: str, expected: str, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expect_one_sentence(keys.format(here=workplace), expected, capsys)


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB; states of the recipe take 8.3 MiB on each of two ranks."""
    try:
        with volumes([16 << 20], str(tmp_path)) as (path,):
            yield path
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"file systems cannot be mounted here: {error}")


@pytest.mark.root
def test_a_volume_without_room(volume: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = f"offload.paths=[{volume}]"
    expect_one_sentence(keys, "MiB are free, and the offload of 2 ranks takes 16.6 MiB; give a larger volume", capsys)
    # The sentence's advice, followed.
    assert main(["run", "recipe.yaml", "--nproc", "2", "--dry-run", keys, "offload.share=0.25"]) == 0
    assert "are free" not in capsys.readouterr().out


@pytest.mark.root
def test_a_volume_that_is_read_only(volume: Path, workplace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subprocess.run(["mount", "-o", "remount,ro", volume], check=True)
    expect_one_sentence(
        f"offload.paths=[{volume}]", "which may not be written to; set offload.paths to folders", capsys
    )
