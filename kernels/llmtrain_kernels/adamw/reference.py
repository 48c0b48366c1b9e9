"""AdamW in elementary torch operations. They state the order of operations of the C++ kernel, whose bits are equal."""

from torch import Tensor

from llmtrain_kernels.adamw.step import AdamWStep, factors


def step(master: Tensor, m: Tensor, v: Tensor, gradient: Tensor, numbers: AdamWStep) -> None:
    """Update `master`, `m`, `v` (fp32 `[n]`) in place with `gradient`, fp32 `[n]`. Each operation rounds to fp32."""
    m_share, v_share, v_kept, eps, rate, kept = master.new_tensor(factors(numbers))
    if (divisor := numbers.divisor_on(gradient.device)) is not None:
        gradient = gradient / divisor
    m.add_((gradient - m) * m_share)
    v.copy_(v * v_kept + gradient * v_share * gradient)
    # torch's fp32 square root on CPUs is sometimes off by an ulp; that of fp64 always rounds to the right fp32 number.
    root = v.double().sqrt().float()
    master.copy_(master * kept - m / (root + eps) * rate)
