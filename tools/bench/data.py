"""Rate and memory of `llmtrain data prepare`, compared to its encoder alone and to Megatron-style workers.

    python tools/bench/data.py [--write docs/benchmarks.md]

Every measurement is a separate process on all cores; rounds interleave them, and results are medians. The corpus is
many copies of Python's standard library, with one letter in a hundred replaced at random in each copy, so that an
encoder with a word cache keeps seeing new words. The encoder alone has all texts in memory. `prepare` is the whole
command, from the start of Python to the last fsync; its output is removed outside the timed part. The report has CPU
time as well as wall time, because CPU time hardly depends on other work of the machine.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np
from table import machine, table, write_section

VOCAB = 32768
PREPARE = "import sys; from llmtrain.cli.main import main; sys.exit(main(['data', *sys.argv[1:]]))"
WORK = [
    "encoder large.jsonl",
    "reader large.jsonl",
    "prepare large.jsonl",
    "prepare large.txt",
    "prepare small.jsonl",
    "megatron slice.jsonl",
]


def main() -> None:
    """Measure, print the table, and write it to the document if --write is given."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--megabytes", type=int, default=800, help="size of the large corpus")
    parser.add_argument("--rounds", type=int, default=7, help="an odd number; the encoder's rate varies twofold")
    parser.add_argument("--folder", type=Path, help="folder for the corpora (default: a temporary one)")
    parser.add_argument("--write", type=Path, help="document to update with the table")
    parser.add_argument("--peer", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peers = {"encoder": encoder_alone, "reader": encoder_reads, "megatron": megatron_style}
        print(json.dumps(peers[arguments.peer[0]](Path(arguments.peer[1]), arguments.tokenizer)))
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text = measure(Path(folder), arguments.megabytes, arguments.rounds)
    print(text)
    if arguments.write:
        write_section(arguments.write, "data", text)


def measure(folder: Path, megabytes: int, rounds: int) -> str:
    """Return the markdown report."""
    tokenizer = folder / "tokenizer"
    run(["-c", PREPARE, "tokenizer", "stdlib", "--vocab-size", str(VOCAB), "--output", str(tokenizer)])
    sizes = {"large": megabytes, "small": megabytes // 8, "slice": max(megabytes // 40, 1)}
    texts = {name: make_corpus(folder / name, size, seed) for seed, (name, size) in enumerate(sizes.items())}
    rates: dict[str, list[float]] = {}
    loads: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    for number in range(rounds):
        for name in WORK if number % 2 == 0 else WORK[::-1]:
            what, corpus = name.split()
            seconds, processor, peak = timed(what, folder / corpus, tokenizer)
            size = texts[Path(corpus).stem]
            rates.setdefault(name, []).append(size / seconds / 1e6)
            loads.setdefault(name, []).append(processor / size * 1e9)
            peaks.setdefault(name, []).append(peak)
            print(f"{name}: {rates[name][-1]:.1f} MB/s, {loads[name][-1]:.1f} s/GB", file=sys.stderr)
    return report(medians(rates), medians(loads), medians(peaks), texts, rounds)


def medians(values: dict[str, list[float]]) -> dict[str, float]:
    """Return the median of each list."""
    return {name: statistics.median(measured) for name, measured in values.items()}


def report(
    rate: dict[str, float], load: dict[str, float], peak: dict[str, float], texts: dict[str, int], rounds: int
) -> str:
    """Return the medians as markdown."""
    encoder, megatron = rate["encoder large.jsonl"], rate["megatron slice.jsonl"]
    names = {
        "encoder large.jsonl": "gigatoken alone, texts in memory",
        "reader large.jsonl": "gigatoken alone, reading JSONL itself",
        "prepare large.txt": "`data prepare`, text file",
        "prepare large.jsonl": "`data prepare`, JSONL",
        "prepare small.jsonl": "`data prepare`, JSONL, an eighth of it",
        "megatron slice.jsonl": "Megatron-style `tokenizers` workers, JSONL",
    }
    rows = [
        [
            label,
            f"{texts[Path(name.split()[1]).stem] / 1e6:.0f} MB",
            f"{rate[name]:.1f}",
            f"{rate[name] / encoder:.2f}",
            f"{rate[name] / megatron:.0f}",
            f"{load[name]:.1f}",
            f"{load['encoder large.jsonl'] / load[name]:.2f}",
            f"{peak[name]:.0f} MB" if peak[name] else "",
        ]
        for name, label in names.items()
    ]
    header = ["work", "text", "MB/s", "of the encoder", "of Megatron-style", "CPU s/GB", "encoder / it", "peak memory"]
    # The rate without the command's start: additional text of the large corpus over the additional time.
    sizes = [texts[name] for name in ("large", "small")]
    times = [size / rate[f"prepare {name}.jsonl"] for size, name in zip(sizes, ("large", "small"), strict=True)]
    loads = [size * load[f"prepare {name}.jsonl"] for size, name in zip(sizes, ("large", "small"), strict=True)]
    going = (sizes[0] - sizes[1]) / (times[0] - times[1])
    going_load = (loads[0] - loads[1]) / (sizes[0] - sizes[1])
    growth = peak["prepare large.jsonl"] / peak["prepare small.jsonl"]
    return "\n".join(
        [
            "## Data preparation",
            "",
            f"{machine(('gigatoken', 'tokenizers', 'pyarrow'))}.",
            f"Byte-level BPE of {VOCAB} ids; {rounds} rounds, interleaved, medians; `python tools/bench/data.py`.",
            "",
            table(header, rows),
            "",
            f"Without its start, `data prepare` of JSONL runs at {going:.0f} MB/s ({going / encoder:.2f} of the "
            f"encoder) and {going_load:.1f} s/GB ({load['encoder large.jsonl'] / going_load:.2f}). "
            "Goals: at least 0.7 of the encoder, at least 10 times the Megatron-style workers, constant memory: "
            f"8 times the corpus takes {growth:.2f} times the memory.",
        ]
    )


def make_corpus(path: Path, megabytes: int, seed: int) -> int:
    """Write about `megabytes` MB of text as .jsonl and as .txt; return the bytes of text."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [file for file in sorted(root.rglob("*.py")) if "site-packages" not in file.parts]
    sources = [file.read_bytes() for file in files]
    random = np.random.default_rng(seed)
    written = 0
    with open(path.with_suffix(".jsonl"), "w") as lines, open(path.with_suffix(".txt"), "w") as plain:
        while True:
            for source in sources:
                text = perturbed(source, random).decode("utf-8", "replace")
                lines.write(json.dumps({"text": text}) + "\n")
                plain.write(text)
                written += len(text.encode())
                if written >= megabytes * 10**6:
                    return written


def perturbed(source: bytes, random: np.random.Generator) -> bytes:
    """Replace about one letter in a hundred by a random one."""
    text = np.frombuffer(source, np.uint8).copy()
    places = random.integers(0, max(len(text), 1), len(text) // 100)
    places = places[(text[places] >= 97) & (text[places] <= 122)]
    text[places] = random.integers(97, 123, len(places))
    return text.tobytes()


def timed(what: str, corpus: Path, tokenizer: Path) -> tuple[float, float, float]:
    """Return the wall seconds, the CPU seconds and the peak memory (MB) of one measurement."""
    if what != "prepare":
        output, *_ = run([__file__, "--peer", what, str(corpus), "--tokenizer", str(tokenizer)])
        seconds, processor = json.loads(output)
        return seconds, processor, 0.0
    prefix = corpus.with_suffix("")
    # Remove the old output first: freeing its pages is not part of the measurement.
    for suffix in (".bin", ".checksums", ".idx"):
        Path(f"{prefix}{suffix}").unlink(missing_ok=True)
    arguments = ["--tokenizer", str(tokenizer), "--output", str(prefix)]
    _, seconds, usage = run(["-c", PREPARE, "prepare", str(corpus), *arguments])
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def run(arguments: list[str]) -> tuple[str, float, resource.struct_rusage]:
    """Run Python with `arguments`; return its output, its wall seconds and its resource usage."""
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments[:3])}... ended with {process.returncode}")
    return output, time.perf_counter() - started, usage


def encoder_alone(corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """Return gigatoken's wall and CPU seconds on all cores, with the texts in memory.

    It encodes 16 MB per call, its fastest size: a single call for all texts takes twice as long because of page faults.
    """
    import gigatoken

    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"].encode() for line in file]
    borders = np.cumsum([len(text) for text in texts]) // (16 << 20)
    batches = np.split(np.arange(len(texts)), np.flatnonzero(np.diff(borders)) + 1)
    calls = [[texts[i] for i in batch] for batch in batches]
    encoder = gigatoken.Tokenizer(tokenizer)
    started, processor = time.perf_counter(), time.process_time()
    for call in calls:
        encoder.encode_batch(call)
    return time.perf_counter() - started, time.process_time() - processor


def encoder_reads(corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of gigatoken's own JSONL reader and encoder; ids stay in memory."""
    import gigatoken

    encoder = gigatoken.Tokenizer(tokenizer)
    started, processor = time.perf_counter(), time.process_time()
    encoder.encode_files(gigatoken.JsonlFileSource([corpus]))
    return time.perf_counter() - started, time.process_time() - processor


class _Worker:
    """A Megatron-style worker's tokenizer."""

    encode: "object"


def megatron_style(corpus: Path, tokenizer: Path) -> tuple[float, float]:
    """Return the wall and CPU seconds of a preparation as in Megatron's preprocess_data.

    It uses a pool of processes, each with its own tokenizer. One JSON line is a task; its ids come back as a list, and
    the parent writes one document at a time.
    """
    started, processor = time.perf_counter(), time.process_time()
    lengths = []
    with (
        open(corpus, encoding="utf-8") as lines,
        open(corpus.with_suffix(".megatron"), "wb") as out,
        multiprocessing.Pool(len(os.sched_getaffinity(0)), _start, (str(tokenizer),)) as pool,
    ):
        for ids in pool.imap(_encode, lines, 32):
            out.write(np.array(ids, np.uint16).tobytes(order="C"))
            lengths.append(len(ids))
    seconds = time.perf_counter() - started
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, time.process_time() - processor + children.ru_utime + children.ru_stime


def _start(folder: str) -> None:
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _Worker.encode = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json").encode


def _encode(line: str) -> list[int]:
    return [*_Worker.encode(json.loads(line)["text"]).ids, 0]  # type: ignore[operator]


if __name__ == "__main__":
    main()
