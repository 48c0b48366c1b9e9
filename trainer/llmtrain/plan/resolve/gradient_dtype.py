"""Where sums of gradients cannot be in the compute dtype. No torch in here."""

from collections.abc import Mapping
from types import MappingProxyType

from llmtrain.plan.placement import OptimizerBackend
from llmtrain.plan.plan import Compute, Plan

READS: Mapping[OptimizerBackend, tuple[Compute, ...]] = MappingProxyType({"triton": ("bf16", "fp16"), "cpu": ("bf16",)})
"""The 16-bit gradients that kernels of the optimizer step read; all of them read fp32."""


def gradient_dtype_problem(plan: Plan) -> str | None:
    """Return an error if a plan sums gradients in the compute dtype where that is impossible, else None."""
    placements, offload = plan.sharding.placements.values(), plan.sharding.offload
    if plan.gradients == "fp32":
        return None
    if plan.reduces_fp32:
        return (
            "precision.gradients is compute, which rounds the sums of gradients after every microbatch, but "
            "precision.reduce is fp32; leave one of them out"
        )
    if offload.gradients != "device":
        return (
            f"precision.gradients is compute, but offload.gradients is {offload.gradients}, where all sums are fp32; "
            "leave it out, or set offload.gradients to none"
        )
    kernels = {placement.backend for placement in placements} | ({offload.backend} if offload.share else set())
    unable = sorted(kernel for kernel in kernels if plan.compute not in READS.get(kernel, ()))
    if not unable:
        return None
    return (
        f"precision.gradients is compute, but the kernel of the optimizer step ({unable[0]}) reads no {plan.compute} "
        "gradients; leave it out, or take a kernel that does (triton, or cpu for bf16)"
    )
