"""Words of nanoGPT, PyTorch, Hugging Face, Megatron-LM, DeepSpeed and torchtitan, and what this program calls the same
or has in their place: data for the advice in errors."""

import re
from collections.abc import Mapping
from types import MappingProxyType

# Names of keys, in whichever section they were looked for, in lower case with underscores.
KEYS: Mapping[str, str] = MappingProxyType(
    {
        # Batches and steps.
        "batch_size": "train.global_batch or train.microbatch",
        "global_batch_size": "train.global_batch",
        "train_batch_size": "train.global_batch",
        "gbs": "train.global_batch",
        "gradient_accumulation_steps": "train.global_batch",
        "grad_accum_steps": "train.global_batch",
        "micro_batch_size": "train.microbatch",
        "mbs": "train.microbatch",
        "local_batch_size": "train.microbatch",
        "per_device_train_batch_size": "train.microbatch",
        "train_micro_batch_size_per_gpu": "train.microbatch",
        "pipeline_parallel_microbatch_size": "train.microbatch",
        "max_steps": "train.steps",
        "max_iters": "train.steps",
        "train_iters": "train.steps",
        "train_samples": "train.steps",
        "num_train_epochs": "train.steps",
        "lr_decay_iters": "train.steps",
        "eval_interval": "train.eval_every",
        "eval_steps": "train.eval_every",
        "eval_iters": "train.eval_batches",
        "torch_compile": "train.compile",
        "deterministic_mode": "train.deterministic",
        "attn_implementation": "train.attention",
        "attention_backend": "train.attention",
        "use_flash_attn": "train.attention",
        "ddp_timeout": "train.timeout",
        "distributed_timeout_minutes": "train.timeout",
        # Data.
        "block_size": "data.sequence_length",
        "seq_len": "data.sequence_length",
        "seq_length": "data.sequence_length",
        "max_seq_len": "data.sequence_length",
        "max_seq_length": "data.sequence_length",
        "context_length": "data.sequence_length",
        "dataset": "data.path",
        "dataset_path": "data.path",
        "data_path": "data.path",
        "train_data_path": "data.path",
        "valid_data_path": "data.validation",
        "tokenizer_path": "data.tokenizer",
        "tokenizer_model": "data.tokenizer",
        "hf_assets_path": "data.tokenizer",
        # Optimizer.
        "learning_rate": "optimizer.lr",
        "min_learning_rate": "optimizer.min_lr",
        "min_lr_factor": "optimizer.min_lr",
        "warmup_steps": "optimizer.warmup",
        "warmup_iters": "optimizer.warmup",
        "lr_warmup_iters": "optimizer.warmup",
        "lr_warmup_fraction": "optimizer.warmup",
        "warmup_num_steps": "optimizer.warmup",
        "warmup_ratio": "optimizer.warmup",
        "lr_scheduler_type": "optimizer.schedule",
        "lr_decay_style": "optimizer.schedule",
        "decay_type": "optimizer.schedule",
        "decay_ratio": "optimizer.decay",
        "lr_wsd_decay_iters": "optimizer.decay",
        "grad_clip": "optimizer.clip",
        "clip_grad": "optimizer.clip",
        "max_grad_norm": "optimizer.clip",
        "gradient_clipping": "optimizer.clip",
        "max_norm": "optimizer.clip",
        "beta1": "optimizer.betas",
        "beta2": "optimizer.betas",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adam_eps": "optimizer.eps",
        "adam_epsilon": "optimizer.eps",
        # Model.
        "flavor": "model.preset",
        "model_name_or_path": "model.hf",
        "model_type": "model.family",
        "n_layer": "model.layers",
        "n_layers": "model.layers",
        "num_layers": "model.layers",
        "num_hidden_layers": "model.layers",
        "n_head": "model.heads",
        "n_heads": "model.heads",
        "num_heads": "model.heads",
        "num_attention_heads": "model.heads",
        "n_kv_heads": "model.kv_heads",
        "num_kv_heads": "model.kv_heads",
        "num_key_value_heads": "model.kv_heads",
        "num_query_groups": "model.kv_heads",
        "group_query_attention": "model.kv_heads",
        "n_embd": "model.hidden",
        "d_model": "model.hidden",
        "hidden_size": "model.hidden",
        "ffn_hidden_size": "model.ffn",
        "intermediate_size": "model.ffn",
        "n_inner": "model.ffn",
        "vocab_size": "model.vocab",
        "make_vocab_size_divisible_by": "model.vocab",
        "n_positions": "model.positions",
        "max_position_embeddings": "model.positions",
        "swiglu": "model.family",
        "normalization": "model.family",
        "position_embedding_type": "model.family",
        "norm_epsilon": "model.norm_eps",
        "layernorm_epsilon": "model.norm_eps",
        "rms_norm_eps": "model.norm_eps",
        "rotary_base": "model.rope_theta",
        "rotary_percent": "model.rotary_fraction",
        "use_rope_scaling": "model.rope_scaling.factor",
        "rope_scaling_factor": "model.rope_scaling.factor",
        "hidden_dropout": "model.dropout",
        "attention_dropout": "model.dropout",
        "tie_word_embeddings": "model.tie_embeddings",
        "untie_embeddings_and_output_weights": "model.tie_embeddings",
        # Precision.
        "dtype": "precision.compute",
        "mixed_precision": "precision.compute",
        "mixed_precision_param": "precision.compute",
        "bf16": "precision.compute",
        "fp16": "precision.compute",
        "params_dtype": "precision.compute",
        "mixed_precision_reduce": "precision.reduce",
        "reduce_dtype": "precision.reduce",
        "grad_reduce_in_bf16": "precision.reduce",
        "communication_data_type": "precision.reduce",
        "fp32_allreduce": "precision.reduce",
        "grad_accum_dtype": "precision.gradients",
        "initial_loss_scale": "precision.loss_scale",
        "initial_scale_power": "precision.loss_scale",
        # Parallelism.
        "tp": "parallel.tensor",
        "tp_size": "parallel.tensor",
        "tensor_parallel": "parallel.tensor",
        "tensor_parallel_size": "parallel.tensor",
        "tensor_parallel_degree": "parallel.tensor",
        "tensor_model_parallel_size": "parallel.tensor",
        "autotp_size": "parallel.tensor",
        "pp": "parallel.pipeline",
        "pp_size": "parallel.pipeline",
        "pipeline_parallel": "parallel.pipeline",
        "pipeline_parallel_size": "parallel.pipeline",
        "pipeline_parallel_degree": "parallel.pipeline",
        "pipeline_model_parallel_size": "parallel.pipeline",
        "num_stages": "parallel.pipeline",
        "dp": "parallel.data",
        "dp_size": "parallel.data",
        "data_parallel": "parallel.data",
        "data_parallel_size": "parallel.data",
        "data_parallel_replicate_degree": "parallel.data or zero.partition.weights",
        "data_parallel_shard_degree": "zero.partition.weights",
        "sp": "parallel.sequence",
        "sequence_parallel": "parallel.sequence",
        "sequence_parallel_size": "parallel.sequence",
        "partition_activations": "parallel.sequence",
        "pipeline_parallel_schedule": "pipeline.schedule",
        "virtual_pipeline_model_parallel_size": "pipeline.chunks",
        "num_layers_per_virtual_pipeline_stage": "pipeline.chunks",
        "num_virtual_stages_per_pipeline_rank": "pipeline.chunks",
        "pipeline_parallel_layers_per_stage": "pipeline.chunks",
        "vpp": "pipeline.chunks",
        "pipeline_model_parallel_layout": "pipeline.split",
        "pipeline_parallel_split_points": "pipeline.split",
        "decoder_first_pipeline_num_layers": "pipeline.split",
        "decoder_last_pipeline_num_layers": "pipeline.split",
        "module_fqns_per_model_part": "pipeline.split",
        # Sharding.
        "zero_optimization": "zero.stage",
        "zero_stage": "zero.stage",
        "use_distributed_optimizer": "zero.stage",
        "reshard_after_forward": "zero.stage",
        "stage3_max_live_parameters": "zero.resident",
        "stage3_max_reuse_distance": "zero.resident",
        "stage3_prefetch_bucket_size": "zero.resident",
        "stage3_param_persistence_threshold": "zero.resident",
        "zero_hpz_partition_size": "zero.secondary",
        "mics_shard_size": "zero.partition.weights",
        "mics_hierarchical_params_gather": "zero.hierarchical",
        "zero_quantized_weights": "quantize.weights",
        "zero_quantized_gradients": "quantize.gradients",
        # Offload and recomputation.
        "offload_optimizer": "offload.optimizer",
        "cpu_offload": "offload.optimizer",
        "optimizer_cpu_offload": "offload.optimizer",
        "optimizer_offload_fraction": "offload.share",
        "offload_param": "offload.parameters",
        "cpu_offload_params": "offload.parameters",
        "enable_cpu_offload": "offload.optimizer or offload.parameters",
        "cpu_offloading": "offload.activations",
        "cpu_checkpointing": "offload.activations",
        "nvme_path": "offload.paths",
        "sub_group_size": "offload.bucket",
        "buffer_count": "offload.overlap",
        "gradient_checkpointing": "activation_checkpointing",
        "recompute_activations": "activation_checkpointing",
        "recompute_granularity": "activation_checkpointing",
        "recompute_method": "activation_checkpointing",
        "recompute_num_layers": "activation_checkpointing.every",
        "number_checkpoints": "activation_checkpointing.every",
        # Checkpoints and logging.
        "save_steps": "checkpoint.every",
        "save_interval": "checkpoint.every",
        "save_total_limit": "checkpoint.keep",
        "keep_latest_k": "checkpoint.keep",
        "async_save": "checkpoint.async",
        "async_mode": "checkpoint.async",
        "asynchronous": "checkpoint.async",
        "resume_from_checkpoint": "checkpoint.resume",
        "init_from": "checkpoint.weights or model.hf",
        "initial_load_path": "checkpoint.weights or model.hf",
        "pretrained_checkpoint": "checkpoint.weights or model.hf",
        "log_interval": "logging.every",
        "logging_steps": "logging.every",
        "log_freq": "logging.every",
        "steps_per_print": "logging.every",
        "out_dir": "logging.dir",
        "output_dir": "logging.dir",
        "dump_folder": "logging.dir",
        "enable_wandb": "logging.wandb",
        "wandb_log": "logging.wandb",
        "report_to": "logging.wandb",
        "run_name": "name",
        "wandb_run_name": "name",
        "wandb_exp_name": "name",
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

# Values of a key, or of an option, in lower case.
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
        ("precision.gradients", "float32"): "fp32",
        ("precision.gradients", "bf16"): "compute",
        ("precision.gradients", "bfloat16"): "compute",
        ("precision.reduce", "float32"): "fp32",
        ("precision.reduce", "bf16"): "compute",
        ("precision.reduce", "bfloat16"): "compute",
        ("pipeline.schedule", "interleaved1f1b"): "interleaved",
        ("pipeline.schedule", "loopedbfs"): "breadth-first",
        ("pipeline.schedule", "zb-h1"): "zero-bubble",
        ("pipeline.schedule", "zb1p"): "zero-bubble",
        ("pipeline.schedule", "zb-v"): "zero-bubble-v",
        ("pipeline.schedule", "zbv"): "zero-bubble-v",
        ("pipeline.schedule", "zbvzerobubble"): "zero-bubble-v",
        ("offload.optimizer", "cpu"): "host",
        ("offload.step", "cpu"): "host",
        ("offload.step", "gpu"): "device",
        ("offload.parameters", "cpu"): "host",
        ("offload.gradients", "cpu"): "host",
        ("offload.activations", "cpu"): "host",
        ("optimizer.schedule", "warmup-stable-decay"): "wsd",
        ("train.attention", "sdpa"): "torch",
        ("train.attention", "flash_attention_2"): "flash-attn-2",
        ("train.attention", "flash_attention_3"): "flash-attn-3",
        ("model.family", "gpt"): "gpt2",
        ("model.family", "gpt_neox"): "neox",
        ("--split", "val"): "valid",
        ("--split", "validation"): "valid",
    }
)

# Parts of keys and values, as patterns, of features that this program does not have, and what is nearest.
UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "moe|experts?|ep|mixtral": (
            "mixtures of experts (MoE) are not supported; the nearest are dense models, whose layers parallel.tensor "
            "splits"
        ),
        r"context_parallel(?:ism)?|parallel\.context|cp|ulysses|ring_attention": (
            "context parallelism is not supported; the nearest is parallel.sequence=true, which splits activations "
            "over the ranks of parallel.tensor"
        ),
        "fsdp2?|hsdp|full_shard|hybrid_shard|shard_grad_op": (
            "the names of FSDP are not supported; the nearest to FULL_SHARD is zero.stage=3, to SHARD_GRAD_OP "
            "zero.stage=2, to HYBRID_SHARD zero.partition.weights=node"
        ),
        "selective": (
            "recomputing a part of a block is not supported; the nearest is activation_checkpointing=auto, which "
            "recomputes groups of blocks"
        ),
        "fp8": "computing in fp8 is not supported; the nearest is precision.compute=bf16",
        "q?lora|peft": "adapters (LoRA) are not supported; the nearest is model.hf, all of whose weights are trained",
        "sft|chat_template|mask_prompt|train_on_inputs|completion_only_loss": (
            "leaving tokens out of the loss is not supported; the nearest is model.hf with a set in data.path, all of "
            "whose tokens count"
        ),
        "reset_attention_mask|reset_position_ids|eod_mask_loss|block_causal|document_mask": (
            "attention within single documents is not supported; the nearest is a data.sequence_length like theirs"
        ),
        "rampup_batch_size|batch_size_rampup": (
            "a batch that grows is not supported; the nearest is train.global_batch, raised when a run resumes"
        ),
        "tensorboard": "TensorBoard is not supported; the nearest is logging.wandb=offline",
        "tf32": "computing in TF32 is not supported; the nearest is precision.compute=bf16",
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


def unsupported(words: str) -> str | None:
    """Return a sentence about the feature that a key or a value names, if this program does not have it; else None."""
    text = words.lower().replace("-", "_")
    found = (why for part, why in UNSUPPORTED.items() if re.search(rf"(?<![a-z0-9])(?:{part})(?![a-z0-9])", text))
    return next(found, None)
