"""Tokens per second of llmtrain's training step, compared to transformers' model in a plain loop.

Both train models of the same sizes on the same data in one process, interleaved, in alternating order. A ratio is the
median over rounds of the ratio within a round, because a shared machine's speed changes over time.
"""

import argparse
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm.ranks import connect
from llmtrain.launch.stop import StopRequest
from llmtrain.plan.facts import Facts
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import load_recipe
from llmtrain.training.loop import train_step
from llmtrain.training.run import Run, open_run
from llmtrain_data.indexed import IndexedWriter
from llmtrain_kernels.matmul import onednn_is_wider

sys.path.insert(0, str(Path(__file__).parent))
from table import machine, write_section

LIBRARY = (
    "On this CPU, llmtrain's matrix products use oneDNN, which uses the full vector width; the plain loop's use MKL, "
    "torch's default. "
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    batch: int
    compiled: bool = False

    @property
    def name(self) -> str:
        sizes = f"{self.family} {self.layers}x{self.hidden}, vocabulary {self.vocab}"
        return f"{sizes}, {self.batch}x{self.sequence} tokens{', train.compile' if self.compiled else ''}"


def case(
    family: str, size: tuple[int, int, int, int, int], vocab: int, rows: tuple[int, int], compiled: bool = False
) -> Case:
    """size: layers, hidden, heads, kv_heads, ffn. rows: sequences of a batch, and tokens of each."""
    layers, hidden, heads, kv_heads, ffn = size
    batch, sequence = rows
    return Case(
        family=family,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        vocab=vocab,
        sequence=sequence,
        batch=batch,
        compiled=compiled,
    )


CASES = [
    case("gpt2", (6, 256, 4, 4, 1024), 4096, (4, 256)),
    case("gpt2", (6, 384, 6, 6, 1536), 50257, (2, 256)),
    case("neox", (6, 256, 4, 4, 1024), 4096, (4, 256)),
    case("neox", (6, 384, 6, 6, 1536), 50432, (2, 256)),
    case("llama", (6, 256, 4, 2, 688), 4096, (4, 256)),
    case("llama", (6, 384, 6, 2, 1024), 32000, (2, 256)),
    case("gpt2", (6, 256, 4, 4, 1024), 4096, (4, 256), compiled=True),
    case("llama", (6, 256, 4, 2, 688), 4096, (4, 256), compiled=True),
]


def peer_model(case: Case) -> transformers.PreTrainedModel:
    """Return transformers' model with the same sizes."""
    common: dict[str, Any] = {"vocab_size": case.vocab, "bos_token_id": 0, "eos_token_id": 0}
    if case.family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_positions=case.sequence, n_embd=case.hidden, n_layer=case.layers, n_head=case.heads,
                attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **common,
            )
        )  # fmt: skip
    sizes: dict[str, Any] = {
        "hidden_size": case.hidden,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "intermediate_size": case.ffn,
        "max_position_embeddings": case.sequence,
        **common,
    }
    if case.family == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=case.kv_heads, **sizes))
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes))


def plain_loop(case: Case, run: Run, fused: bool) -> Callable[[int], None]:
    """Return the step of a usual training loop with transformers' model, compiled if the case is."""
    model = peer_model(case)
    if case.compiled:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=fused)

    def step(number: int) -> None:
        rows = torch.from_numpy(run.train_data.batch(0, number * case.batch, case.batch))[:, :-1].contiguous()
        optimizer.zero_grad()
        model(rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


@contextmanager
def our_loop(case: Case, folder: Path, documents: int = 100) -> Iterator[Run]:
    """Compose a real run, with its logging, on `documents` documents of 2000 tokens."""
    writer = IndexedWriter(folder / "set", np.dtype(np.uint16))
    writer.add(np.random.default_rng(0).integers(0, case.vocab, documents * 2000, np.uint16), np.full(documents, 2000))
    writer.commit()
    recipe = folder / "bench.yaml"
    recipe.write_text(
        f"model: {{family: {case.family}, layers: {case.layers}, hidden: {case.hidden}, heads: {case.heads}, "
        f"kv_heads: {case.kv_heads}, ffn: {case.ffn}, vocab: {case.vocab}, tie_embeddings: {case.family == 'gpt2'}}}\n"
        f"data: {{path: {folder / 'set'}, sequence_length: {case.sequence}}}\n"
        f"train: {{steps: 100000, global_batch: {case.batch}, microbatch: {case.batch}, compile: {case.compiled}}}\n"
        f"logging: {{dir: {folder}}}\n"
    )
    ranks = connect(Layout({Axis.DATA: 1}))
    facts = Facts(world=1, device="cpu")
    plan = make_plan(load_recipe(str(recipe)), facts)
    with open_run(plan, ranks, StopRequest()) as run:
        run.log.start(0, [])
        yield run


def measure(case: Case, rounds: int) -> list[list[float]]:
    """Return seconds of each step: ours, plain loop, plain loop with fused AdamW."""
    with tempfile.TemporaryDirectory() as folder, our_loop(case, Path(folder)) as run:
        plain, fused = plain_loop(case, run, False), plain_loop(case, run, True)
        loops: list[Callable[[int], object]] = [lambda number: train_step(run, number), plain, fused]
        seconds: list[list[float]] = [[] for _ in loops]
        for number in range(rounds + 1):
            order = range(len(loops)) if number % 2 else reversed(range(len(loops)))
            for index in order:
                started = time.perf_counter()
                loops[index](number)
                if number:  # the first step is a warm-up
                    seconds[index].append(time.perf_counter() - started)
    return seconds


def row(case: Case, seconds: list[list[float]]) -> str:
    """Return the table's row."""
    rates = [case.batch * case.sequence / statistics.median(times) for times in seconds]
    turns = list(zip(*seconds, strict=True))
    plain, fused = (statistics.median(turn[place] / turn[0] for turn in turns) for place in (1, 2))
    return f"| {case.name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {plain:.2f} | {rates[2]:,.0f} | {fused:.2f} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    lines = [
        "| model, fp32 | ours, tokens/s | plain loop, tokens/s | ratio | plain loop with fused AdamW | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        lines.append(row(case, measure(case, arguments.rounds)))
        print(lines[-1], flush=True)
    text = (
        f"## Training step\n\n{machine(['torch', 'transformers'])}. Medians of {arguments.rounds} steps each, "
        "interleaved in one process; ratios are medians of the ratios within a round. llmtrain's step includes "
        "sampling and logging. With `train.compile`, the plain loops' model is compiled by torch.compile, too. "
        f"{LIBRARY * onednn_is_wider()}Goal: at least 1.15 times the plain loop.\n\n" + "\n".join(lines)
    )
    print(text)
    if arguments.write:
        write_section(arguments.write, "step", text)


if __name__ == "__main__":
    main()
