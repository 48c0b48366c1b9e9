"""Text from files reaches the terminal as text: no command prints a character that would control the terminal."""

import ast
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from llmtrain.checkpoint.checksums import sidecar
from llmtrain.checkpoint.save import Checkpointer
from llmtrain.checkpoint.state_shard import StateShard
from llmtrain.cli.main import main
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import Ranks
from llmtrain.launch.slurm.record import log_of, record_job, slurm_folder
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units
from llmtrain.telemetry.console import RunConsole
from llmtrain_data.indexed import IndexedWriter
from llmtrain_data.output import Terminal, json_text, printable, say, say_table, table
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[2]
# Sets the title, clears the screen, overwrites the line, and reverses the direction of text; escaped, it is visible.
POISON = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\x08\rover\u202egnp.\u2066\u200e\x85\u2028\U000e0041 end"
CONFIG = GPTConfig(
    family="llama", layers=1, hidden=32, heads=4, kv_heads=2, ffn=64, positions=32, vocab=65, tie_embeddings=False,
    norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="swiglu", dropout=0.0,
)  # fmt: skip


def steering(text: str) -> set[str]:
    """Return the characters that a terminal or a reader would not show as themselves."""
    kept = "\n\t\u200c\u200d"
    return {each for each in text if each not in kept and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def test_every_character() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not steering(printable(everything))
    assert not steering(json_text([everything]))
    assert json.loads(json_text([everything[:0xD800], "\ud800"])) == [everything[:0xD800], "\ud800"]
    plain = "a\tb\nnaïve 漢字 נִקּוּד\u00a0🙂👩\u200d💻 می\u200cخواهم [/x]"
    assert printable(plain) == plain
    assert printable("\x1b[2J\u202e\r") == "\\x1b[2J\\u202e\\r"


def test_a_long_dry_run_is_printed_without_a_pager() -> None:
    """The command ends by itself, also where its output does not fit on the terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    program = """
from types import SimpleNamespace
from llmtrain.start.dry_run import print_plan
plan, summary = SimpleNamespace(record={"name": "a \x1b"}), SimpleNamespace(comments=lambda: "# fact\\n" * 40)
print_plan(plan, summary, [], False)
"""
    environment = {**os.environ, "PAGER": "false", "MANPAGER": "false", "TERM": "xterm"}
    subprocess.run([sys.executable, "-c", program], stdin=theirs, stdout=theirs, env=environment, check=True)
    shown = os.read(ours, 65536).decode().splitlines()
    assert shown == [*["# fact"] * 40, 'name: "a \\e"']


def test_json_has_no_numbers_that_are_not_finite() -> None:
    assert json_text({"a": [float("nan"), (float("inf"), 1.5)], 1: None}) == '{"a": [null, [null, 1.5]], "1": null}'


def test_whatever_rich_draws() -> None:
    table = Table(POISON, title=POISON, caption=POISON)
    table.add_row(POISON)
    table.add_row(Text(POISON, style="bold"))
    for terminal in (True, False):
        file = StringIO()
        console = Terminal(file=file, force_terminal=terminal, width=300, legacy_windows=False)
        for each in (POISON, Text(POISON), table, Panel(Text(POISON), title=Text(POISON))):
            console.print(each)
        # On a terminal, rich itself sets colours.
        shown = file.getvalue().replace("\x1b[1m", "").replace("\x1b[3m", "").replace("\x1b[2;3m", "")
        assert not steering(shown.replace("\x1b[0m", ""))
        assert shown.count("\\x1b[2J\\x9b31m") >= 7


def test_the_console_of_a_run(capfd: pytest.CaptureFixture[str]) -> None:
    console = RunConsole(10)
    console.start(POISON, [(POISON, POISON)], [POISON])
    console.warn(POISON)
    console.evaluation(1, POISON, 2.0, 7.4)
    console.end([(POISON, POISON)])
    shown = capfd.readouterr().out
    assert not steering(shown)
    assert shown.count("\\x1b[2J") == 8


def run_folder(folder: Path) -> Path:
    """A run's folder with POISON in every text."""
    run = folder / POISON.replace("/", "")
    slurm_folder(run).mkdir(parents=True)
    record_job(run, "7")
    log_of(run, "7").write_text(f"{POISON}\n")
    rows: list[dict[str, object]] = [
        {"step": 1, "loss": 2.0, POISON: POISON, "comm_bytes": {POISON: {POISON: 1}}},
        {"event": "eval", "step": 1, "split": POISON, "loss": 2.0},
        {"event": "end", "step": 1, "outcome": POISON, "reason": POISON},
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "run.json").write_text(json.dumps({"name": POISON, "steps": 5, "device": POISON, "decisions": [POISON]}))
    (run / "lock").write_text(json.dumps({"host": POISON, "pid": 1, "started": 1.0, "user": POISON, "since": POISON}))
    return run


def checkpoint(folder: Path) -> Path:
    """A run's folder with a sound checkpoint whose recipe and progress contain POISON, and a damaged checkpoint."""
    folder = folder / POISON
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    shards = [StateShard(u, 0, u.numel, {"master": torch.randn(u.numel)}) for u in model_units(CONFIG)]
    recipe = {POISON: POISON, "data": {"path": POISON, "sequence_length": 32}}
    about = {"recipe": recipe, "model": asdict(CONFIG)}
    saver = Checkpointer(folder / "checkpoints", ranks, 2, asynchronous=False)
    for step in (1, 2):
        assert saver.save(step, shards, {POISON: POISON}, about) is None
    damaged = folder / "checkpoints" / "step-00000001"
    text = (damaged / "manifest.json").read_text().replace('"embedding', json.dumps(POISON)[:-1]).encode()
    (damaged / "manifest.json").write_bytes(text)
    (damaged / "manifest.json.xxh3").write_bytes(sidecar("manifest.json", text))
    (damaged / POISON).write_text("")
    return folder


def tokenizer(folder: Path) -> Path:
    """A tokenizer in which every word is POISON."""
    folder.mkdir()
    made = Tokenizer(models.WordLevel({f"{number}{POISON}": number for number in range(65)}, unk_token="0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def data_set(folder: Path) -> Path:
    prefix = folder / POISON
    writer = IndexedWriter(prefix, np.dtype(np.uint16))
    for _ in range(10):
        writer.add(np.arange(50), np.array([50]))
    writer.commit()
    return prefix


def file(folder: Path, text: str, name: str = f"{POISON}.yaml") -> Path:
    (folder / name).write_text(text)
    return folder / name


CLUSTER = f"name: {json.dumps(POISON)}\nnode: {{ranks: 2}}\nclusters: [{{name: {json.dumps(POISON)}, nodes: 1}}]\n"
Words = Callable[[Path], list[str | Path]]
COMMANDS: dict[str, Words] = {
    "status": lambda at: ["status", run_folder(at).parent],
    "status --json": lambda at: ["status", run_folder(at), "--json"],
    "logs": lambda at: ["logs", run_folder(at)],
    "logs --job": lambda at: ["logs", run_folder(at), "--job", POISON],
    "report": lambda at: ["report", run_folder(at)],
    "ckpt list": lambda at: ["ckpt", "list", checkpoint(at)],
    "ckpt list --json": lambda at: ["ckpt", "list", checkpoint(at), "--json"],
    "ckpt inspect": lambda at: ["ckpt", "inspect", checkpoint(at)],
    "ckpt inspect --json": lambda at: ["ckpt", "inspect", checkpoint(at), "--json"],
    "ckpt verify": lambda at: ["ckpt", "verify", checkpoint(at)],
    "ckpt verify --json": lambda at: ["ckpt", "verify", checkpoint(at), "--json"],
    "ckpt convert": lambda at: ["ckpt", "convert", checkpoint(at), at / POISON],
    "eval": lambda at: ["eval", checkpoint(at)],
    "eval --split": lambda at: ["eval", checkpoint(at), "--split", POISON],
    "generate": lambda at: ["generate", checkpoint(at), "--tokenizer", tokenizer(at / "t"), "--max-tokens", "3"],
    "cluster show": lambda at: ["cluster", "show", file(at, CLUSTER)],
    "cluster show --json": lambda at: ["cluster", "show", file(at, CLUSTER), "--json"],
    "recipes show": lambda at: ["recipes", "show", file(at, f"{json.dumps(POISON)}: {json.dumps(POISON)}")],
    "recipes show a name": lambda at: ["recipes", "show", file(at, f"name: {json.dumps(POISON)}")],
    "recipes show no YAML": lambda at: ["recipes", "show", file(at, f"name: [{POISON}")],
    "run": lambda at: ["run", "quickstart", f"name={POISON}", "--dry-run"],
    "plan": lambda at: ["plan", "quickstart", "model.vocab=2048", "data.tokenizer=null", f"name={POISON}"],
    "pipeline show": lambda at: ["pipeline", "show", file(at, f"cluster: {json.dumps(POISON)}")],
    "submit": lambda at: ["submit", "quickstart", "--dry-run", "--site", file(at, f"account: {json.dumps(POISON)}")],
    "data inspect": lambda at: ["data", "inspect", data_set(at), "--tokenizer", tokenizer(at / "t")],
    "data inspect --json": lambda at: ["data", "inspect", data_set(at), "--json", "--tokenizer", tokenizer(at / "t")],
    "data blend": lambda at: ["data", "blend", "1", data_set(at)],
    "data prepare": lambda at: [
        "data", "prepare", file(at, f"{POISON}\n", f"{POISON}.txt"), "--tokenizer", tokenizer(at / "t"), "--output",
        at / f"{POISON}out",
    ],
    "data tokenizer": lambda at: [
        "data", "tokenizer", file(at, POISON, f"{POISON}.txt"), "--vocab-size", "300", "--output", at / POISON,
    ],
    "data tokenizer of JSONL": lambda at: [
        "data", "tokenizer", file(at, json.dumps({POISON: 1}), f"{POISON}.jsonl"), "--vocab-size", "300", "--output",
        at / POISON,
    ],
    "no command": lambda at: [POISON],
    "no option": lambda at: ["status", f"--{POISON}"],
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(
    command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main([str(word) for word in COMMANDS[command](tmp_path)])
    out, error = capfd.readouterr()
    assert code in (0, 1, 2)
    assert not steering(out + error)
    # If the output has no POISON, the command has shown no poisoned text, and the test proves nothing.
    assert "x1b]0;owned" in out + error or "u001b]0;owned" in out + error
    if "--json" in command and code == 0:
        json.loads(out)


def calls(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_one_module_prints() -> None:
    prints = {"print", "typer.echo", "typer.secho", "Console", "rich.print", "sys.stdout.write", "sys.stderr.write"}
    found = {
        path.name
        for folder in ("trainer", "data", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        if prints & {*calls(path)}
    }
    assert found == {"output.py"}


def test_one_style_of_tables() -> None:
    """Other tables are grids without a heading, such as the live line of a run."""
    found = {
        path.name for folder in ("trainer", "data") for path in (ROOT / folder).rglob("*.py") if "Table" in calls(path)
    }
    assert found == {"output.py"}


def test_a_table_in_a_file_has_no_trailing_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    say_table(("name", ""), [("a", "x" * 300), ("b", ""), ("\x1b[2J", "")])
    lines = capsys.readouterr().out.split("\n")
    assert lines == ["name", f"a        {'x' * 300}", "b", "\\x1b[2J", ""]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_table_is_never_cut(terminal: bool) -> None:
    file, long = StringIO(), "x" * 300
    options = {"force_terminal": True, "width": 80, "color_system": None} if terminal else {}
    Terminal(file=file, **options).print(table(("name", "size", "what"), [("a", "1.50 GiB", long), ("bc", "-", "")]))
    lines = file.getvalue().splitlines()
    assert sum(line.count("x") for line in lines) == 300
    assert lines[1].startswith("a     1.50 GiB  xxx")
    assert [line.rstrip() for line in lines if line.startswith("bc")] == ["bc           -"]
    assert max(map(len, lines)) <= 80 if terminal else len(lines) == 3


PRINTS = """
import sys
from llmtrain_data.output import Terminal, say, table

console = Terminal()
say(0)
sys.stdin.read()
say(1)
console.print(table(["a"], [["b"]]))
say(2)
print("went on", file=sys.stderr)
"""


@pytest.mark.parametrize("first", ["say(1)", "console.print(1)"])
def test_a_reader_that_ends_does_not_end_the_process(first: str) -> None:
    """As of `llmtrain run recipe.yaml | head`."""
    pipe, script = subprocess.PIPE, PRINTS.replace("say(1)", first)
    with subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"0\n"
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == b"went on\n"
    assert process.returncode == 0


def test_a_line_that_a_full_disk_does_not_take_is_lost_alone(tmp_path: Path) -> None:
    """As of `llmtrain run recipe.yaml > log`: the run goes on, and prints what comes after."""
    with open("/dev/full", "w") as log, open(tmp_path / "log", "w") as room:
        console = Terminal(file=log)
        console.log_line("lost")
        os.dup2(room.fileno(), log.fileno())
        console.log_line("taken")
    assert (tmp_path / "log").read_text() == "taken\n"


def test_a_full_disk_takes_messages_and_refuses_results(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("lost", err=True)
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(OSError, match="No space left"):
            say("a result")
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())
