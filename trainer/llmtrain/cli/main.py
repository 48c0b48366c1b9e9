"""The entry point: it finds the command, runs it, and turns errors into one sentence and an exit code."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Annotated

import typer
from llmtrain_data.errors import DataError, PreparationStoppedError
from llmtrain_data.output import say

from llmtrain.cli.usage import usage_sentence
from llmtrain.comm.environment import LAUNCHER_PID
from llmtrain.errors import EXIT_FAILED, EXIT_INTERRUPTED, CommandError, ran_out_of_memory
from llmtrain.launch.stop import end_early

# Longest error, in characters.
_LONGEST = 1500

# What to do where a command ran out of memory.
_LESS_MEMORY = {
    "run": (
        "; a smaller train.microbatch or model needs less, or state the card's memory in "
        "cluster.accelerator.memory, which auto fills"
    ),
    "eval": "; a smaller --microbatch or --sequence-length needs less",
    "generate": "; a shorter --prompt or a smaller --max-tokens needs less",
}

COMMANDS = {
    "run": "Train: start the run that a recipe describes, or resume it from its last checkpoint.",
    "plan": "Show the memory that a run will take on each rank, before it starts.",
    "submit": "Submit a run to Slurm: render its batch script, submit it, and print the job number and the log file.",
    "status": "Show the progress of runs and the state of their jobs.",
    "logs": "Print the log of a run's newest Slurm job.",
    "eval": "Print a model's loss and perplexity on a split of its data, or of another prepared set.",
    "generate": "Generate text with a trained model.",
    "report": "Draw a run's loss, rate and memory as PNG files and one HTML page.",
    "doctor": "Check this machine: show what it has, what is missing and how to install it.",
}
GROUPS = {
    "recipes": "List and show recipes, their schema and the model presets.",
    "data": "Prepare corpora, train tokenizers, inspect prepared data.",
    "cluster": "Show a cluster, and where a run's groups of ranks are on it.",
    "bench": "Measure the links, memory and volumes of a cluster.",
    "pipeline": "Show the pipeline schedule of a recipe.",
    "ckpt": "List, inspect, verify and convert checkpoints.",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 (failed), 2 (bad input), 75 (preempted, saved) or 130."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    # At exit, Python collects garbage among all imported objects: with torch, that takes two seconds.
    atexit.register(gc.freeze)
    if argv is None and arguments[0] == "run":
        end_early()
    if isinstance(sys.stdout, TextIOWrapper):
        # File names and generated text may have characters that the terminal cannot encode; escape them.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = _app(arguments)(arguments, prog_name="llmtrain", standalone_mode=False)
        # typer turns a KeyboardInterrupt into this code.
        if code == EXIT_INTERRUPTED:
            # Our launcher was interrupted too, and reports it for all ranks.
            return code if os.environ.get(LAUNCHER_PID) == str(os.getppid()) else _say("interrupted", code)
        return code if isinstance(code, int) else 0
    except (CommandError, DataError, PreparationStoppedError) as error:
        return _say(error, error.exit_code)
    except typer.TyperException as error:
        message = usage_sentence(error, arguments)
        return _say(message, error.exit_code) if message else 0
    except KeyboardInterrupt:
        return _say("interrupted", EXIT_INTERRUPTED)
    except OSError as error:
        return _say(f"{error.filename or 'a file'}: {error.strerror or error}", EXIT_FAILED)
    except (MemoryError, RuntimeError) as error:
        if not ran_out_of_memory(error):
            raise
        return _say(f"{arguments[0]} ran out of memory{_LESS_MEMORY.get(arguments[0], '')}", EXIT_FAILED)


def _app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app. Only the module of the called command is imported, because some modules need torch."""
    app = typer.Typer(
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Train GPT-style models: one recipe, one run, on whatever there is.",
    )
    app.callback()(_options)
    called = next((argument for argument in arguments if not argument.startswith("-")), None)
    called = called or _completed()
    for name, summary in COMMANDS.items():
        command = getattr(import_module(f"llmtrain.cli.{name}"), name) if name == called else _not_called
        app.command(name, help=None if name == called else summary)(command)
    for name, summary in GROUPS.items():
        group = import_module(f"llmtrain.cli.{name}").app if name == called else typer.Typer(callback=_not_called)
        app.add_typer(group, name=name, help=summary)
    return app


def _completed() -> str | None:
    """Return the command of the line that a shell completes; None if this is no completion."""
    if "_LLMTRAIN_COMPLETE" not in os.environ:
        return None
    # Bash and the other shells pass the line in these variables; the first word is the program.
    words = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or ""
    return next((word for word in words.split()[1:] if not word.startswith("-")), None)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata  # importing it takes 0.03 s, and no command needs it

        say(f"llmtrain {metadata.version('llmtrain')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


def _not_called() -> None:
    """Stand in for a command that --help lists, but that is not called."""


def _say(sentence: object, code: int) -> int:
    line = " ".join(str(sentence).split())
    if len(line) > _LONGEST:
        # A value in it is long; the advice is at the end.
        line = f"{line[: _LONGEST // 2]} ... {line[-_LONGEST // 2 :]}"
    say(f"llmtrain: {line}", err=True)
    return code
