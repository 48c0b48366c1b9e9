"""What README and the pages of docs/ show of plans is what their commands print."""

import re
import shlex
from pathlib import Path

import pytest
from llmtrain.cli.main import main
from llmtrain.cluster.load import load_cluster

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A link to a file of the repository.
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")
# An indented block that begins with the command, and goes on with lines that it prints.
SHOWN = re.compile(r"(?m)^    llmtrain (plan .*)\n\n((?:    .*\n|\n(?=    ))+)")


def test_plans_are_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """A page may leave lines out where it has `...`."""
    found = [shown for page in PAGES for shown in SHOWN.findall(page.read_text(encoding="utf-8"))]
    assert len(found) == 2
    for command, block in found:
        assert main(shlex.split(command)) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        shown = re.sub("(?m)^    ", "", block).rstrip().splitlines()
        wrong = [line for line in shown if line not in (*printed, "...")]
        assert not wrong, f"`llmtrain {command}` does not print {wrong[0]!r}; paste what it prints"
        expected = "".join(r"(.*\n)*" if line == "..." else re.escape(f"{line}\n") for line in shown)
        said = "".join(f"{line}\n" for line in printed)
        assert re.fullmatch(expected, said), f"lines of `llmtrain {command}` are left out without '...'"


def test_the_cluster_file_of_its_page_is_valid(tmp_path: Path) -> None:
    (shown,) = re.findall(r"(?ms)^```yaml\n(.*?)^```", (ROOT / "docs/cluster.md").read_text(encoding="utf-8"))
    (tmp_path / "ours.yaml").write_text(shown)
    assert [group.name for group in load_cluster(str(tmp_path / "ours.yaml")).clusters] == ["east", "west"]


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for to in LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / to).is_file(), f"{page.name} has a link to {to}"
