"""Words of nanoGPT, PyTorch and Hugging Face, and what this program calls the same: data for the advice in errors."""

from collections.abc import Mapping
from types import MappingProxyType

# Names of keys, in whichever section they were looked for.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "train.global_batch or train.microbatch",
        "per_device_train_batch_size": "train.microbatch",
        "micro_batch_size": "train.microbatch",
        "gradient_accumulation_steps": "train.global_batch",
        "max_steps": "train.steps",
        "max_iters": "train.steps",
        "valid_data_path": "data.validation",
        "eval_interval": "train.eval_every",
        "eval_steps": "train.eval_every",
        "eval_iters": "train.eval_batches",
        "learning_rate": "optimizer.lr",
        "warmup_steps": "optimizer.warmup",
        "warmup_iters": "optimizer.warmup",
        "lr_scheduler_type": "optimizer.schedule",
        "grad_clip": "optimizer.clip",
        "max_grad_norm": "optimizer.clip",
        "n_layer": "model.layers",
        "num_hidden_layers": "model.layers",
        "n_head": "model.heads",
        "num_attention_heads": "model.heads",
        "num_key_value_heads": "model.kv_heads",
        "n_embd": "model.hidden",
        "hidden_size": "model.hidden",
        "intermediate_size": "model.ffn",
        "vocab_size": "model.vocab",
        "block_size": "data.sequence_length",
        "max_position_embeddings": "model.positions",
        "dtype": "precision.compute",
        "mixed_precision": "precision.compute",
        "gradient_checkpointing": "activation_checkpointing",
        "save_steps": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "resume_from_checkpoint": "checkpoint.resume",
        "init_from": "checkpoint.weights or model.hf",
        "log_interval": "logging.every",
        "logging_steps": "logging.every",
        "out_dir": "logging.dir",
        "output_dir": "logging.dir",
    }
)

# Sections, and the key that a value in place of the whole section most likely means.
SECTIONS: Mapping[str, str] = MappingProxyType(
    {
        "precision": "precision.compute",
        "zero": "zero.stage",
        "model": "model.preset",
        "data": "data.path",
        "optimizer": "optimizer.lr",
        "train": "train.steps",
        "checkpoint": "checkpoint.every",
        "logging": "logging.every",
        "pipeline": "parallel.pipeline",
    }
)

# Values of a key, or of an option.
VALUES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("activation_checkpointing", "true"): "full",
        ("activation_checkpointing", "false"): "none",
        ("model.preset", "gpt2"): "gpt2-124m",
        ("model.preset", "gpt2-small"): "gpt2-124m",
        ("model.preset", "gpt2-medium"): "gpt2-355m",
        ("model.preset", "gpt2-large"): "gpt2-774m",
        ("model.preset", "gpt2-xl"): "gpt2-1.5b",
        ("precision.compute", "float16"): "fp16",
        ("precision.compute", "float32"): "fp32",
        ("precision.compute", "16-mixed"): "fp16",
        ("precision.compute", "bf16-mixed"): "bf16",
        ("--split", "val"): "valid",
        ("--split", "validation"): "valid",
    }
)

# Commands.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "run",
        "pretrain": "run",
        "launch": "run",
        "start": "run",
        "evaluate": "eval",
        "sample": "generate",
        "inference": "generate",
        "tokenize": "data prepare",
        "prepare": "data prepare",
        "convert": "ckpt convert",
        "export": "ckpt convert",
        "sbatch": "submit",
    }
)

# Options of a command.
OPTIONS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("plan", "--nproc"): "--ranks",
        ("run", "--ranks"): "--nproc",
        ("run", "--nproc_per_node"): "--nproc",
        ("run", "--nproc-per-node"): "--nproc",
        ("run", "--num_processes"): "--nproc",
        ("generate", "--max-new-tokens"): "--max-tokens",
        ("generate", "--max_new_tokens"): "--max-tokens",
    }
)
