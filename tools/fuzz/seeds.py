"""Valid inputs, as llmtrain writes them; created once, in memory."""

import gzip
import io
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

SITE = {
    "account": "abc", "partition": "gpu", "qos": "high", "constraint": "a100", "reservation": "r", "time": "24:00:00",
    "ranks_per_node": 4, "cpus_per_rank": 8, "gpus_per_node": 4, "exclusive": True, "margin": 300,
    "modules": ["cuda/12.4"], "python": "python", "environment": {"NCCL_SOCKET_IFNAME": "hsn0", "N": 1},
    "container": {"image": "x.sif", "runtime": "apptainer", "mounts": ["/data"]}, "sbatch": ["--x"], "srun": ["--y"],
}  # fmt: skip
TEXT = ("The quick brown fox jumps over the lazy dog. ÄÖÜ 漢字 🙂\n\n" * 40).encode()
SIZES: dict[str, Any] = {
    "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 128, "positions": 32, "vocab": 65,
    "tie_embeddings": True, "norm_eps": 1e-5, "rope_theta": 1e4, "rotary_fraction": 1.0, "activation": "gelu_tanh",
    "dropout": 0.0,
}  # fmt: skip


def copy(document: Any) -> Any:
    """Return a deep copy of a document."""
    return json.loads(json.dumps(document))


def parsed(text: bytes) -> Any:
    """Return the value of JSON, or an empty mapping if an earlier mutation made it invalid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


@cache
def recipes() -> Mapping[str, Any]:
    """The shipped recipes, and one with every key, with the path of `data_set`."""
    from llmtrain.recipe.load import as_data, parse_recipe
    from llmtrain.yaml.shipped import shipped_folder, shipped_names

    given = {"path": "set", "sequence_length": 16}
    found: dict[str, Any] = {}
    for name in shipped_names():
        recipe = yaml.safe_load((shipped_folder() / f"{name}.yaml").read_text())
        found[name] = recipe | {"data": recipe.get("data", {}) | given}
        found[name]["data"].pop("tokenizer", None)
    small = {"family": "llama", "layers": 2, "hidden": 32, "heads": 2, "vocab": 200}
    found["small"] = {"model": small, "data": given, "train": {"steps": 10, "global_batch": 8}}
    grid = {"parallel": {"tensor": 2, "pipeline": 2, "sequence": True}, "zero": {"stage": 3}, "cluster": "lab-2x2"}
    found["grid"] = found["small"] | grid
    zero = {"partition": {"weights": 2, "gradients": "node", "optimizer": "all"}, "secondary": 2}
    found["zero"] = found["small"] | {"zero": zero, "cluster": copy(clusters()["frontier"])}
    whole = parse_recipe({"name": "whole", **found["small"]})
    found["whole"] = copy(as_data(whole))
    return found


@cache
def plain_recipe() -> Mapping[str, bytes]:
    """A recipe file with its data."""
    return {"recipe.yaml": json.dumps(recipes()["small"]).encode(), **data_set()}


@cache
def clusters() -> Mapping[str, Any]:
    """The shipped cluster files, and each of them with every key."""
    from llmtrain.cluster.load import load_cluster, shipped_clusters
    from llmtrain.launch.measure.result import as_data
    from llmtrain.yaml.shipped import shipped_folder

    folder = shipped_folder() / "clusters"
    found = {name: yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in shipped_clusters()}
    return {**found, **{f"whole {name}": copy(as_data(load_cluster(name))) for name in shipped_clusters()}}


def run_folder() -> dict[str, bytes]:
    """The folder of a run that was told to stop."""
    figures = {"average": 1.5e6, "p90": 1.2e7, "peak": 2.5e10}
    step = {
        "tokens": 64, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.5, "step_time_s": 0.5, "tokens_per_s": 1000.0,
        "mfu": None, "mfu_measured": 0.4, "memory_bytes": {"rss": 2**30, "peak_rss": 2**31, "model_states": 2**28},
        "comm_bytes": {"weights": {"all_gather": 1536}}, "link_bytes_per_s": {"nic eth0": {"node": 0, **figures}},
        "skipped_steps": 1, "passed_batches": 0, "elapsed_s": 12.5, "rank_compute_s": {"max": 1.0},
        "loss_scale": 65536.0,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [{"step": number, **step} for number in range(1, 6)]
    rows.insert(3, {"event": "eval", "step": 3, "split": "validation", "loss": 2.0, "perplexity": 7.4})
    links = {"0": {"nic eth0": {"both": figures, "sent": figures, "received": figures}}}
    rows.append({"event": "end", "step": 5, "outcome": "stopped", "reason": "told to stop", "links": links})
    model = {"family": "gpt2", "layers": 2, "hidden": 32, "heads": 2, "vocab": 50}
    run = {
        "name": "tiny", "cwd": "/tmp", "model": model, "parameters": 1350000, "steps": 500, "tokens_per_step": 64,
        "total_tokens": 32000, "flops_per_token": 1e6, "world": 2, "device": "CPU", "precision": "fp32",
        "datasheet_peak": None, "measured_peak": 1e11, "unigram_entropy": 6.0, "decisions": ["microbatch is 8"],
    }  # fmt: skip
    holder = {
        "host": "a", "pid": 2**22 - 7, "started": 1.5, "user": "u", "job": None, "cluster": None,
        "since": "2026-01-01 10:00:00", "place": "b/1",
    }  # fmt: skip
    return {
        "metrics.jsonl": b"".join(json.dumps(row).encode() + b"\n" for row in rows),
        "run.json": json.dumps(run).encode(),
        "lock": json.dumps(holder).encode(),
        "slurm/jobs": b"7\n12_3\n",
        "slurm/sources": json.dumps({"/tmp/recipe.yaml": "0" * 16}).encode(),
        "recipe.resolved.yaml": b"name: tiny\n",
    }


def _files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def checkpoint() -> dict[str, bytes]:
    """The files of a valid checkpoint of step 1."""
    return dict(_checkpoint())


@cache
def _checkpoint() -> dict[str, bytes]:
    import torch
    from llmtrain.checkpoint.save import Checkpointer
    from llmtrain.checkpoint.state_shard import StateShard
    from llmtrain.cluster.layout import Axis, Layout
    from llmtrain.comm.ranks import Ranks
    from llmtrain.model.config import GPTConfig
    from llmtrain.model.tensors import model_units

    config = GPTConfig(family="gpt2", **SIZES)
    shards = [
        StateShard(unit, 0, unit.numel, {name: torch.ones(unit.numel) for name in ("master", "m", "v")})
        for unit in model_units(config)
    ]
    ranks = Ranks(0, 0, Layout({Axis.DATA: 1}), torch.device("cpu"))
    about = {"recipe": {"name": "tiny", "data": {"path": "set"}}, "model": asdict(config)}
    with tempfile.TemporaryDirectory() as folder:
        saver = Checkpointer(Path(folder), ranks, 1, asynchronous=False)
        assert saver.save(1, shards, {"samples": 8, "tokens": 128}, about) is None
        return _files_of(Path(folder) / "step-00000001")


def sealed(manifest: bytes) -> dict[str, bytes]:
    """A manifest with its checksum."""
    from llmtrain.checkpoint.checksums import sidecar

    return {"manifest.json": manifest, "manifest.json.xxh3": sidecar("manifest.json", manifest)}


def resealed(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    """The manifest of a checkpoint after a change of file `name`, with correct checksums."""
    from llmtrain.checkpoint.checksums import digest

    manifest = json.loads(files["manifest.json"])
    data = files[name]
    header = min(8 + int.from_bytes(data[:8], "little"), len(data))
    manifest["files"][name] |= {"bytes": len(data), "header": max(header, 8), "xxh3": digest(data[:header])}
    return sealed(json.dumps(manifest).encode())


@cache
def hf_configs() -> Mapping[str, Any]:
    """Configurations of small models of each family."""
    from llmtrain.model.config import GPTConfig
    from llmtrain.model.hf_config import to_hf_config

    special = {"bos_token_id": 1, "eos_token_id": 2}
    llama = SIZES | {"activation": "swiglu", "tie_embeddings": False}
    neox = SIZES | {"activation": "gelu", "rotary_fraction": 0.25, "tie_embeddings": False}
    configs = {"gpt2": SIZES, "llama": llama, "neox": neox}
    return {
        family: copy(to_hf_config(GPTConfig(family=family, **sizes), "float32", special))  # type: ignore[arg-type]
        for family, sizes in configs.items()
    }


def hf_model() -> dict[str, bytes]:
    """The folder of a small Hugging Face model."""
    return dict(_hf_model())


@cache
def _hf_model() -> dict[str, bytes]:
    from llmtrain.checkpoint.convert.convert import convert

    with tempfile.TemporaryDirectory() as folder:
        step = Path(folder) / "checkpoints" / "step-00000001"
        step.mkdir(parents=True)
        for name, content in checkpoint().items():
            (step / name).write_bytes(content)
        convert(step, Path(folder) / "hf", "fp32", "5GB", None)
        return _files_of(Path(folder) / "hf")


def names_in(safetensors: bytes) -> list[str]:
    """The names of the tensors of a file."""
    length = int.from_bytes(safetensors[:8], "little")
    return [name for name in json.loads(safetensors[8 : 8 + length]) if name != "__metadata__"]


@cache
def data_set() -> Mapping[str, bytes]:
    """A prepared set of 200 documents, with its checksums."""
    from llmtrain_data.indexed import IndexedWriter

    with tempfile.TemporaryDirectory() as folder:
        writer = IndexedWriter(Path(folder) / "set", np.dtype(np.uint16))
        for number in range(200):
            writer.add(np.arange(20 + number % 7) % 65, np.array([20 + number % 7]))
        writer.commit()
        return _files_of(Path(folder))


def sealed_checksums(content: bytes) -> bytes:
    """Return a checksums file with its digest corrected."""
    import xxhash
    from llmtrain_data.checksums import HEADER, SEALED

    if len(content) < HEADER.size:
        return content
    own = xxhash.xxh3_64(content[HEADER.size :])
    own.update(content[:SEALED])
    return content[:SEALED] + own.intdigest().to_bytes(8, "little") + content[HEADER.size :]


def gzipped(data: bytes) -> bytes:
    """Compress with gzip, without a timestamp."""
    return gzip.compress(data, 1, mtime=0)


def zstandard(data: bytes) -> bytes:
    """Compress with Zstandard."""
    import zstandard as zstd

    return zstd.ZstdCompressor(1).compress(data)


@cache
def parquet_files(views: bool) -> tuple[bytes, ...]:
    """Parquet files with a column of each text type, and of some other types. views: only Arrow's view types."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f"text {number}" for number in range(30)]
    columns: tuple[Any, ...] = (
        pa.array(texts), pa.array(texts, pa.large_string()), pa.array([text.encode() for text in texts]),
        pa.array(texts).dictionary_encode(), pa.array([None] * 30), pa.array(range(30)),
        pa.array([[text] for text in texts]),
    )  # fmt: skip
    if views:
        columns = (pa.array(texts, pa.string_view()), pa.array([text.encode() for text in texts], pa.binary_view()))
    found = []
    for column in columns:
        for compression in ("none", "snappy", "zstd"):
            file = io.BytesIO()
            pq.write_table(
                pa.table({"id": range(30), "text": column}), file, compression=compression, row_group_size=10
            )
            found.append(file.getvalue())
    return tuple(found)


@cache
def tokenizer() -> Mapping[str, bytes]:
    """The folder of a small byte-level tokenizer."""
    from llmtrain_data.tokenizer import train_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer(iter([[TEXT.decode()]]), 300, Path(folder) / "tokenizer")
        return _files_of(Path(folder) / "tokenizer")
