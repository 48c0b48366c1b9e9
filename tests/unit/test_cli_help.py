"""The command line's help: every command, choices, completion."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from llmtrain.checkpoint.convert.export import HF_NAMES
from llmtrain.cli import main as module
from llmtrain.cli.main import COMMANDS, GROUPS, main
from llmtrain_data.corpus_options import INPUT_FORMATS
from llmtrain_data.dataset import Split
from llmtrain_data.encode import ENCODERS
from typer.main import get_command


def commands() -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command and its words."""
    for name in (*COMMANDS, *GROUPS):
        command: Any = get_command(module._app([name])).commands[name]  # type: ignore[attr-defined]
        yield (name,), command
        for inner, own in getattr(command, "commands", {}).items():
            yield (name, inner), own


ALL = list(commands())


def words(text: str | None) -> list[str]:
    return re.sub(r"[\s│╭╮╰╯─*]+", " ", text or "").split()


def test_these_are_all() -> None:
    assert {"run", "data prepare", "ckpt convert", "bench comm", "recipes schema"} <= {" ".join(at) for at, _ in ALL}


@pytest.mark.parametrize(("at", "command"), ALL, ids=lambda value: " ".join(value) if isinstance(value, tuple) else "")
def test_help_says_all_there_is(
    at: tuple[str, ...], command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    said = []
    for option in ("--help", "-h"):
        assert main([*at, option]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    shown = f" {' '.join(words(said[0]))} "
    # Nothing in the text is parsed as markup.
    assert f" {' '.join(words(command.help))} " in shown
    for parameter in command.params:
        assert words(parameter.help), f"{parameter.name} has no help"
        assert "default" not in parameter.help, f"{parameter.name}: the default belongs into show_default"
        assert f" {' '.join(words(parameter.help))} " in shown
        if isinstance(parameter.show_default, str):
            assert f"[default: ({parameter.show_default})]" in shown
        # A plain flag has a negation only if it is on by default.
        assert not parameter.secondary_opts or parameter.default is True


CHOICES = {
    ("data", "prepare", "--encoder"): ENCODERS,
    ("data", "prepare", "--input-format"): INPUT_FORMATS,
    ("data", "tokenizer", "--input-format"): INPUT_FORMATS,
    ("ckpt", "convert", "--dtype"): tuple(HF_NAMES),
    ("eval", "--split"): get_args(Split),
}


@pytest.mark.parametrize("option", CHOICES, ids=" ".join)
def test_choices_are_listed_and_others_refused(option: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    *at, name = option
    command = dict(ALL)[tuple(at)]
    (parameter,) = [each for each in command.params if name in each.opts]
    assert tuple(parameter.type.choices) == CHOICES[option]
    given = ["a", "b"][: sum(each.param_type_name == "argument" for each in command.params)]
    assert main([*at, *given, name, "neither"]) == 2
    error = capsys.readouterr().err
    assert re.fullmatch(rf"llmtrain: .*'{name}'.*'neither' is not one of .*\n", error)
    assert all(choice in error for choice in CHOICES[option])


def test_every_option_of_a_few_words_is_a_choice() -> None:
    """If a help text listed an option's choices, nothing would check that list."""
    for at, command in ALL:
        for parameter in command.params:
            assert not re.match(r"\w+, \w+(, \w+)* or \w+[.,]", parameter.help), (at, parameter.name)


def completed(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    monkeypatch.setenv("_LLMTRAIN_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    return set(capsys.readouterr().out.split())


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed("llmtrain ", capsys, monkeypatch) == {*COMMANDS, *GROUPS}
    assert completed("llmtrain re", capsys, monkeypatch) == {"report", "recipes"}
    assert completed("llmtrain ckpt ", capsys, monkeypatch) == {"list", "inspect", "verify", "convert"}
    for at, command in ALL:
        if not hasattr(command, "commands"):
            options = {each for one in command.params for each in one.opts if each.startswith("--")}
            assert options <= completed(f"llmtrain {' '.join(at)} --", capsys, monkeypatch)
    for option, choices in CHOICES.items():
        assert completed(f"llmtrain {' '.join(option)} ", capsys, monkeypatch) == {*choices}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_for_a_shell(
    shell: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda: (shell, f"/bin/{shell}"))
    with pytest.raises(SystemExit) as ended:
        main(["--show-completion"])
    assert not ended.value.code
    assert "_LLMTRAIN_COMPLETE" in capsys.readouterr().out
