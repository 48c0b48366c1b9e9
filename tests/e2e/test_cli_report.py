"""`llmtrain report` from the command line."""

import json
from pathlib import Path

import pytest
from llmtrain.cli.main import main


def test_report_writes_pictures_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "loss": 5 / s}) + "\n" for s in (1, 2, 3)))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "index.html",
        "loss.png",
        "memory.png",
        "rate.png",
    ]
    assert capsys.readouterr().out == f"{tmp_path / 'out' / 'index.html'}\n"
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report" / "index.html").exists()


@pytest.mark.parametrize(
    "arguments",
    [["absent"], ["."], [".", "--open", "perhaps"], [], ["file"]],
    ids=["absent", "empty", "open", "none", "file"],
)
def test_bad_input_gets_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    assert main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
