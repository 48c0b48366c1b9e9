"""typer's errors about a command line, as sentences that name what was meant."""

import re
from collections.abc import Sequence

import typer

# typer's words for a type of number, and the usual ones.
_NUMBERS = {
    "float": "a number",
    "float range": "a number",
    "int": "a whole number",
    "int range": "a whole number",
}
# Commands that take a recipe and its keys.
_WITH_RECIPE = ("run", "plan", "submit", "pipeline", "cluster")
_NO_COMMAND = re.compile(r"No such command '(?P<command>.+?)'\.(?: Did you mean .*)?", re.DOTALL)
_NO_OPTION = re.compile(r"No such option: (?P<option>\S+).*", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid value for '(?P<option>--\S+)'.*: '(?P<value>.*)' is not one of .*", re.DOTALL)


def usage_sentence(error: typer.TyperException, arguments: Sequence[str]) -> str:
    """Return a sentence about a command line that typer refuses; empty if it has shown help instead."""
    from llmtrain.cli.other_words import COMMANDS, OPTIONS, WITHOUT_OPTION
    from llmtrain.recipe.explain import advice_on_option
    from llmtrain.recipe.other_words import VALUES

    message = error.format_message()
    for words, plain in _NUMBERS.items():
        message = message.replace(f"is not a valid {words}.", f"is not {plain}")
    about = getattr(getattr(error, "param", None), "help", None) if message.startswith("Missing") else None
    if about:
        return f"{message} {about}"
    if found := _NO_COMMAND.fullmatch(message):
        command = found["command"]
        if command.endswith((".yaml", ".yml")):
            return f"No such command '{command}'; a recipe is run with `llmtrain run {command}`"
        usual = f"`llmtrain {COMMANDS[command]}`" if command in COMMANDS and arguments[0] == command else None
        return f"No such command '{command}'; did you mean {usual}?" if usual else message
    if found := _NO_OPTION.fullmatch(message):
        option = found["option"]
        usual = OPTIONS.get((arguments[0], option))
        if usual:
            return f"No such option: {option}; did you mean {usual}?"
        takes_recipe = arguments[0] in _WITH_RECIPE or list(arguments[:2]) == ["recipes", "show"]
        advice = WITHOUT_OPTION.get(option) or advice_on_option(option) if takes_recipe else None
        return f"No such option: {option}; {advice}" if advice else message
    if found := _NO_CHOICE.fullmatch(message):
        usual = VALUES.get((found["option"], found["value"]))
        return f"{message.rstrip('.')}; did you mean {usual}?" if usual else message
    return message
