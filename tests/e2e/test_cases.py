"""Commands with inputs that once hung, took all memory, ended in a traceback, or were described wrongly: each ends with
its exit code and one sentence, within seconds and within 500 MB more than a command that does nothing.

Other tests have these inputs by kind, and a rank that is killed while it saves is in test_kill_in_save.py; here they
are commands, as a user meets them. With `-s`, the test prints a table.
"""
# ruff: noqa: E501 (one row of the table per line)

import getpass
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from llmtrain_data.output import printable

from tests.e2e.stranger_inputs import (
    DEEP,
    SBATCH,
    STOPPED,
    Make,
    command,
    copied,
    done,
    environment,
    fifo,
    file,
    flipped,
    gone,
    hf,
    link,
    lock,
    long_line,
    more,
    row,
    tokens,
    turned,
)
from tests.tiny import write_corpus
from tools.fuzz.pool import BYTES, SECONDS, WALL_SECONDS

RECIPE = """
model: {family: llama, layers: 1, hidden: 16, heads: 2, vocab: 64}
data: {path: set, sequence_length: 16}
train: {steps: 4, global_batch: 4, eval_every: 0}
optimizer: {lr: 1.0e-3, warmup: 1}
checkpoint: {every: 2}
logging: {every: 1}
"""
NEW, MORE, DRY = "run tiny.yaml name=new", "run tiny.yaml train.steps=5", "run tiny.yaml name=new --dry-run"
PREPARE, LEARN = "--tokenizer bpe --output new", "--vocab-size 300 --output new"
SUBMIT = "submit tiny.yaml --site site.yaml --dry-run"
SITE = file("site.yaml", "ranks_per_node: 4")
BAD = copied("runs/tiny", "runs/bad")
STEP = "runs/tiny/checkpoints/step-000000"
OTHER = (turned("set.bin"), done("data checksum set --overwrite"))
ODD = tokens("odd", [1, -5, 3] * 20)
FROM_HF = file("hf.yaml", RECIPE.replace("{family: llama, layers: 1, hidden: 16, heads: 2, vocab: 64}", "{hf: hf}"))
DAMAGED = "set.bin does not match its checksums in bytes 0 to 40000; it was damaged or changed after preparation"
CONTROL, ESCAPED = "\x1b]0;owned\x07\x1b[2J", re.escape("\\x1b]0;owned\\x07\\x1b[2J")
STEERS = json.dumps({"event": "end", "step": 4, "outcome": CONTROL})
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_scaling": {"rope_type": "yarn", "factor": 32.0},
}  # fmt: skip
AGAIN = "told to stop before anything was done; the same command starts again"
FIELD = file("a.jsonl", f'{{"text": "a", "b": {DEEP}}}')
LOST = "damaged: 2 of the last 7 lines of metrics.jsonl are no rows"
# A damaged file of the run `bad`, and what `status` says of it.
CORRUPT = {
    "[ x 100000 as a row": (row("[" * 100_000), "damaged: 1 of the last 5 lines of metrics.jsonl are no rows"),
    "[ x 100000 as run.json": (file("runs/bad/run.json", "[" * 100_000), "damaged: run.json cannot be read, .*"),
    "[ x 100000 as lock": (file("runs/bad/lock", "[" * 100_000), ""),
    "an end without outcome": (row('{"event": "end"}'), LOST),
    "text as step": (row('{"step": "many", "loss": 1}'), LOST),
    "an object as loss": (row('{"step": 3, "loss": {"a": 1}}'), LOST),
    "1e400": (row('{"step": 1e400, "loss": 1e400}'), LOST),
    "400 digits": (row(f'{{"step": {"9" * 400}, "loss": {"9" * 400}}}'), LOST),
}  # fmt: skip
KINDS = {
    1: "another host's lock", 2: "changed data", 4: "pipes and sizes", 5: "control sequences", 6: "a corrupt run",
    7: "nesting and numbers", 8: "wrong words", 9: "off in YAML", 10: "MFU", 11: "a job's recipe", 12: "help and JSON",
    13: "a newcomer's way", 14: "what recipes can",
}  # fmt: skip
LONGEST = 1600


@dataclass(frozen=True)
class Case:
    """A command. kind: of KINDS. inputs: made before. code: its exit code. says: a pattern in its sentence, or in its
    output if it succeeds."""

    kind: int
    name: str
    inputs: Sequence[Make]
    words: str
    code: int
    says: str

    @property
    def trains(self) -> bool:
        """Whether the command trains, which takes time by design."""
        return self.code == 0 and self.words.startswith("run ") and not re.search("--dry-run|-h$", self.words)


CASES = [
    Case(1, "a lock of another host", [lock("elsewhere", "tiny")], MORE, 0, "was last trained in by process 7 of me on elsewhere, since then; waiting up to"),
    Case(2, "tokens reversed, then resumed", [turned("set.bin")], MORE, 2, DAMAGED),
    Case(2, "tokens reversed with new checksums, then resumed", OTHER, MORE, 2, "set holds other data than the run was trained on; bring that data back, or set data.accept_changed=true"),
    Case(2, "other data that is accepted", OTHER, f"{MORE} data.accept_changed=true", 0, "warning: set holds other data .*; data.accept_changed accepts that"),
    Case(2, "a bit flipped, then trained on", [flipped("set.bin")], NEW, 2, DAMAGED),
    Case(2, "a bit flipped, then looked at", [flipped("set.bin")], "data inspect set", 2, DAMAGED),
    Case(2, "a bit flipped, then verified", [flipped("set.bin")], "data inspect set --verify", 1, "damaged +set.bin, bytes 0 to 40000"),
    Case(2, "a sound set verified", [], "data inspect set --verify", 0, "verified +no damage found"),
    Case(2, "no checksums to verify", [gone("set.checksums")], "data inspect set --verify", 2, "set has no checksums to verify it against; `llmtrain data checksum set` writes"),
    Case(2, "ids above the vocabulary", [], f"{NEW} model.vocab=32", 2, "set.bin holds id 33 at token 16 of document 0; expected 0 to 31"),
    Case(2, "ids above the vocabulary, dry", [], f"{DRY} model.vocab=32", 2, "set.bin holds id 33 at token 16 of document 0; expected 0 to 31"),
    Case(2, "ids above the vocabulary, evaluated", [tokens("odd", [1, 70, 3] * 20)], "eval runs/tiny --data odd", 2, "odd.bin holds id 70 at token 1 of document 38; expected 0 to 63"),
    Case(2, "negative ids", [ODD], f"{NEW} data.path=odd", 2, "odd.bin holds id -5 at token 1 of document 0"),
    Case(2, "negative ids, dry", [ODD], f"{DRY} data.path=odd", 2, "odd.bin holds id -5 at token 1 of document 0"),
    Case(2, "negative ids, looked at", [ODD], "data inspect odd", 2, "odd.bin holds id -5 at token 1 of document 0"),
    Case(4, "a FIFO as weights", [hf(), fifo("hf/model.safetensors")], "ckpt convert hf new", 2, "hf/model.safetensors cannot be read as a safetensors file: it is not a regular file"),
    Case(4, "a FIFO as weights of a run", [hf(), FROM_HF, fifo("hf/model.safetensors")], "run hf.yaml", 2, "hf/model.safetensors cannot be read as a safetensors file: it is not a regular file"),
    Case(4, "a FIFO as recipe", [fifo("pipe.yaml")], "run pipe.yaml", 2, "pipe.yaml cannot be read: it is not a regular file"),
    Case(4, "a FIFO as data", [fifo("set.bin")], NEW, 2, "data.path is set, but set.bin is not a regular file"),
    Case(4, "a FIFO as corpus", [fifo("pipe.txt")], f"data prepare pipe.txt {PREPARE}", 2, "pipe.txt is not a regular file"),
    Case(4, "a FIFO as tokenizer", [fifo("bpe/tokenizer.json")], f"data prepare texts {PREPARE}", 2, r"bpe/tokenizer.json has no vocabulary \(it is not a regular file\)"),
    Case(4, "a FIFO as manifest", [fifo(f"{STEP}04/manifest.json")], "ckpt verify runs/tiny", 1, "1 of 2 checkpoints in runs/tiny are damaged"),
    Case(4, "an endless recipe", [], "run /dev/zero", 2, "/dev/zero cannot be read: it is not a regular file"),
    Case(4, "n_layer of 1e9", [hf(n_layer=10**9)], "ckpt convert hf new", 2, "n_layer in hf/config.json is 1000000000; our model computes only with a whole number from 1 to 2,048"),
    Case(4, "n_layer of 1e9 in a run", [hf(n_layer=10**9), FROM_HF], "run hf.yaml --dry-run", 2, "n_layer in hf/config.json is 1000000000; our model computes only"),
    Case(4, "model.layers=100000000", [], f"{DRY} model.layers=100000000", 2, "model.layers is 100000000; expected a whole number from 1 to 2,048"),
    Case(4, "999999999999 nodes", [SITE], f"{SUBMIT} --nodes 999999999999", 2, "the run has 3999999999996 ranks; expected at most 131,072"),
    Case(4, "10**18 ranks of a node", [file("site.yaml", f"ranks_per_node: {10**18}")], f"{SUBMIT} --nodes 1", 2, f"site.yaml: ranks_per_node is {10**18}; expected a number less than or equal to 4096"),
    Case(4, "10**18 ranks of a node in a cluster", [], f"plan tiny.yaml 'cluster={{node: {{ranks: {10**18}}}}}'", 2, f"cluster.node.ranks is {10**18}; expected a whole number from 1 to 4,096"),
    Case(4, "an array of 1e11 jobs", [SITE], f"{SUBMIT} --nodes 1 --array 0-99999999999", 2, "^(?!.*microbatch).*--array"),
    Case(4, "999999999999 ranks planned", [], "plan tiny.yaml --ranks 999999999999", 2, "the run has 999999999999 ranks; expected at most 131,072"),
    Case(4, "999999999999 ranks started", [], f"{DRY} --nproc 999999999999", 2, "the run has 999999999999 ranks; expected at most 131,072"),
    Case(4, "a list of 300,000 items", [more("long.yaml", f"data: {{path: [{'1, ' * 300_000}1]}}")], "run long.yaml", 2, "long.yaml cannot be read: it has 900037 bytes or more, expected at most 524288"),
    Case(4, "a list of 200,000 items", [more("long.yaml", f"data: {{path: [{'1,' * 200_000}1]}}")], "run long.yaml", 2, "long.yaml"),
    Case(4, "a list of 60,000 items in an argument", [], f"{NEW} data.path=[{'1,' * 60_000}1]", 2, "data.path"),
    Case(4, "a line of 1 GiB in a small JSONL", [long_line("a.jsonl.gz", b'{"text":"')], f"data prepare a.jsonl.gz {PREPARE}", 2, "a.jsonl.gz line 1 has more than 128 MiB; split it into shorter documents"),
    Case(4, "a line of 1 GiB in a small JSONL, learnt", [long_line("a.jsonl.gz", b'{"text":"')], f"data tokenizer a.jsonl.gz {LEARN}", 2, "a.jsonl.gz line 1 has more than 128 MiB; split it into shorter documents"),
    Case(4, "a document of 1 GiB in a small text", [long_line("a.txt.gz", b"x")], f"data prepare a.txt.gz --separator '|' {PREPARE}", 2, "a.txt.gz: the document at line 1, .*, has more than 128 MiB"),
    Case(5, "an outcome that steers", [BAD, row(STEERS)], "status", 0, f"bad +{ESCAPED} +4/4"),
    Case(5, "an outcome that steers, as JSON", [BAD, row(STEERS)], "status --json", 0, re.escape(json.dumps(CONTROL))),
    Case(5, "a host that steers", [BAD, lock(CONTROL)], "status", 0, f"process 7 on {ESCAPED}"),
    Case(5, "a log that steers", [BAD, file("runs/bad/slurm/jobs", "7\n"), file("runs/bad/slurm/7.log", CONTROL)], "logs bad", 0, ESCAPED),
    Case(5, "a command that steers", [], f"'{CONTROL}'", 2, f"No such command '{ESCAPED}'"),
    *(Case(6, f"{name}: status", [BAD, make], "status", 0, rf"bad +finished .*{says}\ntiny +finished +4/4") for name, (make, says) in CORRUPT.items()),
    *(Case(6, f"{name}: report", [BAD, make], "report runs/bad", 0, "^runs/bad/report/index.html$") for name, (make, _) in CORRUPT.items()),
    *(Case(6, f"{name}: run", [BAD, make], "run tiny.yaml name=bad train.steps=5", 0, r"(?s)continues after +step 4\n.*step 5/5") for name, (make, _) in CORRUPT.items()),
    Case(7, "a nested record", [file("a.jsonl", DEEP)], f"data prepare a.jsonl {PREPARE}", 2, r"a.jsonl line 1 is not JSON \(it is nested too deeply\)"),
    Case(7, "a nested field that is ignored", [FIELD], f"data prepare a.jsonl {PREPARE}", 2, r"a.jsonl line 1 is not JSON \(it is nested too deeply\)"),
    Case(7, "a nested field that is ignored, learnt", [FIELD], f"data tokenizer a.jsonl {LEARN}", 2, r"a.jsonl line 1 is not JSON \(it is nested too deeply\)"),
    Case(7, "a nested tokenizer_config.json", [file("bpe/tokenizer_config.json", DEEP)], f"data prepare texts {PREPARE}", 2, "bpe/tokenizer_config.json cannot be read: its JSON is nested too deeply"),
    Case(7, "a nested tokenizer.json", [file("bpe/tokenizer.json", DEEP)], f"data prepare texts {PREPARE}", 2, "bpe/tokenizer.json has no vocabulary"),
    Case(7, "a nested tokenizer.json of a run", [file("bpe/tokenizer.json", DEEP)], f"{NEW} data.tokenizer=bpe", 2, "data.tokenizer is bpe: bpe/tokenizer.json has no vocabulary"),
    Case(7, "a nested config.json", [file("hf/config.json", DEEP)], "ckpt convert hf new", 2, "hf/config.json cannot be read: its JSON is nested too deeply"),
    Case(7, "train.steps of 300 hexadecimal digits", [], f"{NEW} train.steps=0x{'f' * 300}", 2, r"train.steps is a number of 1200 bits; expected a number below 2\^63"),
    Case(7, "train.steps of 300 hexadecimal digits in a recipe", [more("a.yaml", f"train: {{steps: 0x{'f' * 300}}}")], "run a.yaml", 2, r"train.steps is a number of 1200 bits; expected a number below 2\^63"),
    Case(7, "train.timeout=1e18", [], f"{NEW} train.timeout=1e18", 2, r"train.timeout is 1e\+18; expected a number from 1 to 1,000,000, in seconds"),
    Case(7, "train.timeout=1e10", [], f"{NEW} train.timeout=1e10", 2, "train.timeout is 10000000000.0; expected a number from 1 to 1,000,000, in seconds"),
    Case(7, "data.path=[1e308,A,1e308,B]", [], f"{NEW} data.path=[1e308,set,1e308,set]", 2, r"data.path\[0\] is 1e\+308; expected text or a number from 0 to 1,000,000,000$"),
    Case(7, "data blend 1e308 A 1e308 B", [], "data blend 1e308 set 1e308 set", 2, "expected a blend .* with positive weights up to 1,000,000,000"),
    Case(7, "model.hidden=10000000", [], f"{NEW} model.hidden=10000000", 2, "model.hidden is 10000000; expected a whole number from 1 to 262,144"),
    Case(7, "model.hidden=9e18", [], f"{NEW} model.hidden=9e18", 2, "model.hidden is 9000000000000000000; expected a whole number from 1 to 262,144"),
    Case(7, "--array ²", [SITE], f"{SUBMIT} --nodes 1 --array ²", 2, "--array is '²'; expected seeds such as 0-3"),
    Case(8, "no checkpoints to verify", [], "ckpt verify texts", 2, "texts holds no checkpoint; give the folder of a run or of a checkpoint"),
    Case(8, "cluster=/etc/passwd", [], f"{DRY} cluster=/etc/passwd", 2, "/etc/passwd does not describe a cluster: [^:]*$"),
    Case(8, "--site /etc/passwd", [], "submit tiny.yaml --nodes 1 --site /etc/passwd --dry-run", 2, "/etc/passwd does not describe a site: [^:]*$"),
    Case(8, "extends through a link", [link("base.yaml", "/etc/passwd"), file("a.yaml", "extends: base.yaml")], "run a.yaml", 2, "base.yaml is not a recipe: [^:]*$"),
    Case(8, "a checkpoint under another step's name", [copied(f"{STEP}04", f"{STEP}40")], "ckpt verify runs/tiny", 1, "1 of 3 checkpoints in runs/tiny are damaged"),
    Case(8, "a checkpoint under another step's name, resumed", [copied(f"{STEP}04", f"{STEP}40")], MORE, 0, "warning: skipped the checkpoint .*: manifest.json is of step 4, but its folder is named step-00000040"),
    Case(8, "layer_norm_epsilon: NaN", [hf(layer_norm_epsilon=float("nan"))], "ckpt convert hf new", 2, "layer_norm_epsilon in hf/config.json is NaN; our model computes only with a number above 0"),
    Case(8, "a tokenizer from a binary", [file("a.bin", bytes(range(256)) * 100)], f"data tokenizer a.bin {LEARN}", 2, "a.bin is not text: byte 0 is zero; expected UTF-8"),
    Case(8, "a folder that ranks leave", [], f"{NEW} --nproc 2", 0, r"(?s)step 4/4 .*\ndone"),
    Case(8, "SIGTERM while it imports", [file("site/sitecustomize.py", STOPPED)], NEW, 75, AGAIN),
    Case(8, "SIGTERM while it imports for ranks", [file("site/sitecustomize.py", STOPPED)], f"{NEW} --nproc 2", 75, AGAIN),
    Case(9, "wandb: off", [more("a.yaml", "logging: {wandb: off}")], "run a.yaml --dry-run", 0, "\n  wandb: [\"']?off"),
    Case(9, "logging.wandb=off", [], f"{DRY} logging.wandb=off", 0, "\n  wandb: [\"']?off"),
    Case(10, "MFU on a CPU", [], NEW, 0, r"(?s)^(?!.*MFU).*step 4/4 .* \d\d?% of measured peak"),
    Case(11, "the recipe of a job", [SITE], f"{SUBMIT} parallel.data=4", 0, r"(?s)cat > .\$recipe. <<.*\n  hidden: 16"),
    Case(11, "a recipe edited after it was submitted", [file("bin/sbatch", SBATCH, 0o755), done("submit tiny.yaml name=new parallel.data=1"), file("tiny.yaml", f"{RECIPE}seed: 7")], "status", 0, "new .*tiny.yaml changed since submission"),
    Case(12, "--help", [], "--help", 0, "--install-completion"),
    Case(12, "-h", [], "-h", 0, "--install-completion"),
    Case(12, "run -h", [], "run -h", 0, r"(?s)^(?!.*--no-dry-run).*--dry-run"),
    Case(12, "data prepare --help", [], "data prepare --help", 0, r"Cores to use\. +\[default: \(all\)\]"),
    Case(12, "ckpt convert --help", [], "ckpt convert --help", 0, r"--dtype +<fp32\|bf16\|fp16>"),
    Case(12, "report --help", [], "report --help", 0, "--open +Show the page in the browser"),
    Case(12, "recipes schema", [], "recipes schema", 0, '"description": "the card\'s name'),
    Case(12, "recipes list --json", [], "recipes list --json", 0, r'^\[\{"recipe": "gpt-neox-20b", "summary": '),
    Case(12, "recipes presets --json", [], "recipes presets --json", 0, r'^\[\{"preset": "gpt2-1m", "parameters": 1088256'),
    Case(12, "run --dry-run --json", [], f"{DRY} --json", 0, r'^\{"recipe": \{"name": "new"'),
    Case(12, "submit --dry-run --json", [SITE], f"{SUBMIT} --nodes 1 --json", 0, '"nodes": 1, "ranks_per_node": 4, "recipe": "model:'),
    Case(12, "ckpt convert --json", [], "ckpt convert runs/tiny new --json", 0, '"kind": "hugging face", "folder": "new"'),
    Case(13, "data.path that is relative to another folder", [file("sub/tiny.yaml", RECIPE.replace("set,", "mine,")), tokens("sub/mine", [1, 2])], "run sub/tiny.yaml", 2, "there is no file mine.bin; there is one in .*/sub: run from there, or give .*/sub/mine"),
    Case(13, "a validation split of few documents", [], f"{NEW} data.split=[95,5,0] train.eval_every=4", 0, r"warning: .* has fewer than 20 documents \(10\)"),
    Case(13, "files that are left out", [file("texts/a.png", b"\x89PNG\0" * 9)], f"data prepare texts {PREPARE}", 0, r"left out +1 file, not UTF-8 text \(.*\): a.png"),
    Case(13, "a dry run's table", [], DRY, 0, r"# parameters +15.4k\n# steps +4\n# tokens +256, 64 per step\n# epochs (?s:.*)# auto +model: "),
    Case(14, "released weights with scaled RoPE", [hf(**LLAMA)], "run llama-1b model.preset=null model.hf=hf data.path=set --dry-run", 2, "only RoPE without scaling"),
    Case(14, "llama-8b as shipped", [], "plan llama-8b data.path=set", 0, r"optimizer states +11.2 GiB"),
    Case(14, "advice of a distribution that is none", [], "doctor", 0, r"(?s)^(?!.*llmtrain\[).*training works here"),
]  # fmt: skip

# Runs a command, and writes its exit code, seconds, seconds of CPU time and peak bytes to a file. A process begins with
# the peak of the one that it comes from, so a small one has to start the command.
MEASURED = """
import json, os, subprocess, sys, threading, time
started = time.monotonic()
process = subprocess.Popen(sys.argv[2:])
timer = threading.Timer(120, process.kill)
timer.daemon = True
timer.start()
_, status, usage = os.wait4(process.pid, 0)
seconds = time.monotonic() - started, usage.ru_utime + usage.ru_stime
json.dump([os.waitstatus_to_exitcode(status), *seconds, usage.ru_maxrss * 1024], open(sys.argv[1], "w"))
"""


@dataclass(frozen=True)
class Ended:
    """How a command has ended. seconds: of wall time. cpu: seconds of all its processes. peak: bytes of the largest."""

    code: int
    seconds: float
    cpu: float
    peak: int
    out: str
    error: str


def ended(words: str, at: Path) -> Ended:
    """Run a command in a folder."""
    measured = [sys.executable, "-c", MEASURED, str(at / "measured"), *command(words)]
    with (at / "out").open("wb") as out, (at / "error").open("wb") as error:
        subprocess.run(measured, cwd=at, env=environment(at), stdout=out, stderr=error, check=True)
    said = [(at / name).read_text() for name in ("out", "error")]
    return Ended(*json.loads((at / "measured").read_text()), *said)


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a set, texts, a tokenizer and a run that has finished."""
    at = tmp_path_factory.mktemp("before") / "work"
    for name in ("texts", "tmp"):
        (at / name).mkdir(parents=True)
    write_corpus(at / "set", 200)
    for number in range(30):
        (at / f"texts/{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 20)
    (at / "tiny.yaml").write_text(RECIPE)
    done("data tokenizer texts --vocab-size 300 --output bpe")(at)
    done("run tiny.yaml")(at)
    return at


@pytest.fixture(scope="module")
def least(before: Path) -> int:
    """The peak bytes of a command that does nothing."""
    return ended("--version", before).peak


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Rows of a table, which is printed in the end."""
    lines = ["| kind | case | exit code | seconds | of CPU time | MB | sentence |", f"|{'---|' * 7}"]
    yield lines
    print("\n", *lines, sep="\n")


def sentence(found: Ended, says: str) -> str:
    """Return a command's error, or the line of its output that says the last of what it had to say."""
    if found.error and found.code:
        return found.error.strip()
    text = found.error + found.out
    place = re.search(says, text)
    return text[text.rfind("\n", 0, place.end()) + 1 :].partition("\n")[0].strip() if place else text


def table_row(case: Case, found: Ended, more: int) -> str:
    """more: bytes above those of a command that does nothing."""
    said = " ".join(sentence(found, case.says).split())[:300].replace("|", "\\|")
    figures = f"{found.code} | {found.seconds:.1f} | {found.cpu:.1f} | {more / 1e6:+.0f}"
    return f"| {case.kind} {KINDS[case.kind]} | {case.name} | {figures} | {said} |"


@pytest.mark.soak
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}: {case.name}")
def test_case(case: Case, before: Path, least: int, table: list[str], tmp_path: Path) -> None:
    at = tmp_path / "work"
    shutil.copytree(before, at)
    for make in case.inputs:
        make(at)
    found = ended(case.words, at)
    table.append(table_row(case, found, found.peak - least).replace(str(at), "HERE"))
    assert found.code == case.code, found
    assert re.search(case.says, found.error + found.out), found
    if case.code == 0:
        assert "--json" not in case.words or json.loads(found.out)
    elif case.code != 1 or found.error:
        assert re.fullmatch(r"llmtrain: .*\n", found.error), found.error
    assert len(found.error) < LONGEST
    everything = found.out + found.error
    # A table has no control characters, and no private file is quoted.
    assert printable(everything) == everything
    assert not re.search("Traceback|root:", everything)
    assert {path.name for path in (at / "tmp").iterdir()} <= {f"torchinductor_{getpass.getuser()}"}
    assert found.peak < least + BYTES
    # Other work on the machine adds to the wall time.
    assert found.seconds < WALL_SECONDS
    assert case.trains or found.cpu < SECONDS
