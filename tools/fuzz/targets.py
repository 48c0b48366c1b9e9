"""The readers of files that may be untrusted, with the processing of the commands.

A reader calls the same functions as the commands, in the folder of the input. It starts no process and no run.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tools.fuzz import cases, seeds
from tools.fuzz.cases import Case


@dataclass(frozen=True)
class Target:
    """A reader. case: makes an input. reads: reads it in the working folder. static: files that every input has."""

    name: str
    case: Callable[[Random], Case]
    reads: Callable[[Case], None]
    static: Callable[[], Mapping[str, bytes]] = dict
    imports: Callable[[], None] = lambda: None

    def prepare(self) -> None:
        """Import the reader's modules, so that they do not count towards the limits of the first input."""
        self.imports()

    def write(self, case: Case, folder: Path) -> None:
        """Write an input into an otherwise empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        for name, content in {**self.static(), **case.files}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)

    def read(self, folder: Path, case: Case) -> None:
        """Read an input. Raises CommandError, DataError or OSError to reject it."""
        os.chdir(folder)
        self.reads(case)


def read_recipe(case: Case) -> None:
    """Read as `run --dry-run` and `recipes show`."""
    from llmtrain.plan.facts import Facts
    from llmtrain.plan.record import decisions
    from llmtrain.plan.resolve.check import advice
    from llmtrain.plan.resolve.prepare import check_and_plan
    from llmtrain.recipe.load import load_recipe
    from llmtrain.yaml.dump import to_yaml

    recipe = load_recipe("recipe.yaml", case.words)
    world = 8 if len(case.words) % 2 else 1
    facts = Facts(world=world, ranks_per_node=world, device="cpu")
    plan = check_and_plan(recipe, facts)
    to_yaml(plan.record)
    decisions(recipe, plan.record)
    advice(recipe, plan)


def read_cluster(case: Case) -> None:
    """Read as `cluster show`."""
    from io import StringIO

    from llmtrain.plan.resolve.cluster_source import topology_of
    from llmtrain.plan.views.cluster_view import describe, tables
    from llmtrain_data.output import Terminal, json_text

    words = [word for word in case.words if word != "--ranks"]
    found = describe(topology_of("cluster.yaml", words, 16 if "--ranks" in case.words else None))
    json_text(found)
    console = Terminal(file=StringIO())
    for part in tables(found):
        console.print(part)


def read_site(case: Case) -> None:
    """Read as `submit --dry-run`."""
    from llmtrain.launch.slurm.script import render
    from llmtrain.launch.submit import load_site
    from llmtrain.start.job import plan_job

    profile = load_site(Path("site.yaml"))
    render(plan_job("recipe.yaml", [], profile, 2, case.words[0] if case.words else None), profile)


def read_run(case: Case) -> None:
    """Read as `status`, `report` and a resume; plot only one in 1024 inputs."""
    from llmtrain.launch.status import statuses
    from llmtrain.telemetry.metrics import MetricsFile, read_metrics
    from llmtrain.telemetry.report import _page, write_report
    from llmtrain.telemetry.run_file import read_run_file
    from llmtrain_data.output import json_text

    (found,) = statuses([Path()])
    json_text(vars(found))
    rows, run = read_metrics(Path("metrics.jsonl")), read_run_file(Path())
    if any("event" not in row for row in rows):
        _page(Path(), run, rows, dict.fromkeys(("loss", "rate", "memory"), b""))
        if sum(case.files["metrics.jsonl"]) % 1024 == 0:
            write_report(Path())
    file = MetricsFile(Path("metrics.jsonl"), print)
    file.rewind(4)
    file.close()


def read_checkpoint(case: Case) -> None:
    """Read as `ckpt list`, `ckpt inspect` and `ckpt verify`."""
    from llmtrain.checkpoint.describe import inspect_checkpoint, list_checkpoints
    from llmtrain.checkpoint.verify import verify
    from llmtrain_data.output import json_text

    json_text(list_checkpoints(Path("step-00000001")))
    verify(Path("step-00000001"))
    json_text(inspect_checkpoint(Path("step-00000001")))


def read_model(case: Case) -> None:
    """Read as `model.hf`, and as converting the model before it reads weights."""
    from llmtrain.model.hf_config import read_hf_config, to_hf_config
    from llmtrain.model.tensors import parameter_count

    config = read_hf_config(Path())
    parameter_count(config)
    to_hf_config(config, "float32", {})


def read_weights(case: Case) -> None:
    """Read as converting a model."""
    from llmtrain.checkpoint.convert.hf_weights import hf_tensors
    from llmtrain.model.hf_config import read_hf_config

    for _ in hf_tensors(Path(), read_hf_config(Path())):
        pass


def read_data(case: Case) -> None:
    """Read as `data inspect`, with and without --verify, `data blend` and a run."""
    from llmtrain_data.blend import plan_blend
    from llmtrain_data.config import DataConfig
    from llmtrain_data.dataset import open_split
    from llmtrain_data.describe import describe
    from llmtrain_data.errors import DataError
    from llmtrain_data.verify import verify

    refused = None
    for read in (
        lambda: describe(Path("set"), None, 2).json(),
        lambda: verify(Path("set")).json(),
        lambda: plan_blend(["set"], None, 16, "98,1,1").json(),
        lambda: open_split(DataConfig(path="set", sequence_length=16, split=(100, 0, 0)), "train").batch(1, 0, 4),
    ):
        try:
            read()
        except DataError as error:
            refused = error
    if refused is not None:
        raise refused


def read_corpus(case: Case) -> None:
    """Read as `data prepare` and `data tokenizer`."""
    from llmtrain_data.corpus import open_corpus
    from llmtrain_data.corpus_options import CorpusOptions

    corpus = open_corpus(next(iter(case.files)), CorpusOptions(separator=case.words[0] if case.words else None))
    for chunk in corpus.chunks():
        chunk.texts()


def read_tokenizer(case: Case) -> None:
    """Read a tokenizer as `data prepare`, a run's start and `ckpt convert`."""
    from llmtrain.checkpoint.convert.tokenizer import special_tokens
    from llmtrain_data.encode import choose_encoder
    from llmtrain_data.ragged import ragged_batches
    from llmtrain_data.tokenizer import end_of_text_id, load_tokenizer, tokenizer_size

    special_tokens(Path("tokenizer"))
    tokenizer_size("tokenizer")
    tokenizer = load_tokenizer("tokenizer")
    end_of_text_id("tokenizer", tokenizer)
    with ragged_batches():
        choose_encoder(Path("tokenizer"), tokenizer, ["a"], "auto", 1)
    tokenizer.decode(tokenizer.encode("def f(x):\n    return 'é🙂'").ids)


def _with_torch() -> None:
    import torch  # noqa: F401


def _without_slurm() -> None:
    import matplotlib.figure  # noqa: F401
    from llmtrain.launch.slurm import queue

    # Asking Slurm starts a process.
    setattr(queue, "jobs", lambda numbers: None)  # noqa: B010


def _with_arrow() -> None:
    import pyarrow as pa
    import pyarrow.parquet

    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


TARGETS = {
    target.name: target
    for target in (
        Target("recipe", cases.recipe_case, read_recipe, seeds.data_set),
        Target("overrides", cases.override_case, read_recipe, seeds.plain_recipe),
        Target("cluster", cases.cluster_case, read_cluster),
        Target("site", cases.site_case, read_site, seeds.plain_recipe),
        Target("run", cases.run_case, read_run, imports=_without_slurm),
        Target("manifest", cases.manifest_case, read_checkpoint, imports=_with_torch),
        Target("shard", cases.shard_case, read_checkpoint, imports=_with_torch),
        Target("hf-config", cases.hf_config_case, read_model),
        Target("hf-weights", cases.hf_weights_case, read_weights, imports=_with_torch),
        Target("data", cases.data_case, read_data),
        Target("jsonl", cases.jsonl_case, read_corpus),
        Target("text", cases.text_case, read_corpus),
        Target("parquet", cases.parquet_case, read_corpus, imports=_with_arrow),
        Target("tokenizer", cases.tokenizer_case, read_tokenizer),
    )
}
