"""From the facts of a run to what its kernels keep for the backward pass. No torch in here."""

from llmtrain_kernels.attention.choice import FLASH_CHANNELS

from llmtrain.model.config import GPTConfig
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import COMPUTE_BYTES, AttentionBackend, Compute, Kernels

# Bytes of the state of torch's random generator for CPUs.
CPU_GENERATOR = 5056


def kernels_of(facts: Facts, model: GPTConfig, compute: Compute, deterministic: bool = False) -> Kernels:
    """Return what the kernels keep that a run on these facts takes. deterministic: see `TrainConfig`."""
    if facts.device == "cuda":
        return _on_cuda(facts, model, COMPUTE_BYTES[compute], deterministic)
    return _on_cpu(facts, model, compute)


def _on_cuda(facts: Facts, model: GPTConfig, compute_bytes: int, deterministic: bool) -> Kernels:
    """Return what flash-attn, torch's kernels and ours keep, by their sources."""
    attention: AttentionBackend = "math"
    if compute_bytes == 2 and facts.bf16 and model.head_dim <= FLASH_CHANNELS:
        attention = "flash"
    elif not deterministic and model.head_dim % (16 // compute_bytes) == 0:
        attention = "efficient"
    return Kernels(
        attention=attention,
        head_multiple=8 if attention == "flash" else 1,
        query_multiple=32 if attention == "efficient" else 1,
        # flash: three numbers of 64 bits; efficient: seed and offset.
        seeds={"flash": 24, "efficient": 16, "math": 0}[attention],
        statistic=4,
        mask=1,
        weights_mask=1,
        # torch keeps the states of all generators in host memory.
        generator=0,
        # Our kernel works in place; torch's operations make probabilities in fp32.
        logit=0 if facts.triton else 4,
        rotates_in_place=facts.triton,
        adds_to_fp32=not facts.amd,
    )


def _on_cpu(facts: Facts, model: GPTConfig, compute: Compute) -> Kernels:
    # For RMSNorm, the C++ kernel keeps fp32 statistics, and torch's operations keep none, as the backward pass
    # recomputes them. torch's LayerNorm keeps statistics in the compute dtype.
    ours = 4 if facts.native and compute != "fp16" else 0
    return Kernels(
        # torch has no fused kernel with dropout.
        attention="math" if model.dropout else "flash",
        head_multiple=1,
        query_multiple=1,
        seeds=0,
        statistic=ours if model.family == "llama" else COMPUTE_BYTES[compute],
        # The factor of each element: 0, or 1 / (1 - p). Attention weights are fp32.
        mask=COMPUTE_BYTES[compute],
        weights_mask=4,
        generator=CPU_GENERATOR,
        # Our kernel works in place; torch converts the logits to fp32 before the softmax.
        logit=0 if ours else 8,
        rotates_in_place=False,
        adds_to_fp32=False,
    )
