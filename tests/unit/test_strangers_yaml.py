"""Untrusted YAML that readers would misread, or that takes too long to read."""

from pathlib import Path

import pytest
from llmtrain.cluster.load import load_cluster
from llmtrain.errors import BadInputError
from llmtrain.recipe.load import load_recipe


def test_a_file_of_blank_lines(tmp_path: Path) -> None:
    """The file is read once line by line, and not again from each line on."""
    (tmp_path / "evil.yaml").write_text("\n" * 200_000)
    with pytest.raises(BadInputError, match="node is missing"):
        load_cluster(tmp_path / "evil.yaml")


@pytest.mark.parametrize("text", ["!!set {a, b}", "!other {a: 1}"])
def test_a_file_of_another_kind_of_mapping(text: str, tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(text)
    for read in (load_recipe, load_cluster):
        with pytest.raises(BadInputError, match="holds a set or the like, expected sections with keys"):
            read(str(tmp_path / "evil.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        f"name: '${{{' ' * 20_000}'",
        f"name: '{'${' * 10_000}'",
        f"a: &a '${{a:[{'1,' * 2000}1]}}'\nb: [{'*a, ' * 9}]",
    ],
    ids=["spaces", "opened", "repeated"],
)
def test_references_that_take_long_to_read(text: str, tmp_path: Path) -> None:
    """Such files are refused before they are parsed."""
    (tmp_path / "evil.yaml").write_text(text)
    for read in (load_recipe, load_cluster):
        with pytest.raises(BadInputError, match="characters of texts with references"):
            read(str(tmp_path / "evil.yaml"))


def test_a_file_of_another_kind_is_not_quoted(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:$6$secret:20228:0:99999:7:::\n")
    with pytest.raises(BadInputError, match="a line of it is no key of a cluster") as raised:
        load_cluster(tmp_path / "shadow")
    assert "secret" not in str(raised.value)


def test_a_recipe_that_extends_a_link_to_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "shadow").write_text("root:$6$secret:20228:0:99999:7: \n")
    (tmp_path / "base.yaml").symlink_to(tmp_path / "shadow")
    (tmp_path / "evil.yaml").write_text("extends: base.yaml\n")
    with pytest.raises(BadInputError, match=r"a line of .*evil\.yaml or .*base\.yaml is not a recipe key") as raised:
        load_recipe(str(tmp_path / "evil.yaml"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("user", ["root", "data"])
def test_a_private_file_whose_first_word_may_be_a_key(user: str, tmp_path: Path) -> None:
    (tmp_path / "shadow.yaml").write_text(f"{user}:$6$secret:20228:0:99999:7: \n")
    with pytest.raises(BadInputError, match=r"a line of .*shadow\.yaml|has no space after 'data:'") as raised:
        load_recipe(str(tmp_path / "shadow.yaml"))
    assert "secret" not in str(raised.value)


def test_a_number_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "evil.yaml").write_text(f"train: {{steps: {'9' * 5000}}}\n")
    for read in (load_recipe, load_cluster):
        with pytest.raises(BadInputError, match="it has a number of thousands of digits"):
            read(str(tmp_path / "evil.yaml"))
    with pytest.raises(BadInputError, match="it has a number of thousands of digits"):
        load_recipe("quickstart", [f"train.steps={'9' * 5000}"])
