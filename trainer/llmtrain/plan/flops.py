"""FLOPs of training, and the peak FLOP/s of cards. No torch in here."""

import re

from llmtrain.cluster.description import Accelerator
from llmtrain.model.config import GPTConfig
from llmtrain.model.tensors import model_units

# Dense peak of one device in TFLOP/s, from the makers' data sheets and architecture papers (half of a figure
# that assumes sparsity; fp32 is the rate without TF32). First match wins, so narrower names come first. An
# AMD MI200 shows each of its two dies as a device, hence half a card; fp32 on AMD runs on the matrix cores.
_DATASHEET: tuple[tuple[str, dict[str, float]], ...] = (
    (r"\bGB300\b", {"bf16": 2500.0, "fp16": 2500.0}),
    (r"\bGB200\b", {"bf16": 2500.0, "fp16": 2500.0, "fp32": 80.0}),
    (r"\bB300\b", {"bf16": 2250.0, "fp16": 2250.0}),
    (r"\bB200\b", {"bf16": 2250.0, "fp16": 2250.0, "fp32": 75.0}),
    (r"\bH200 NVL\b", {"bf16": 835.5, "fp16": 835.5, "fp32": 60.0}),
    (r"\bG?H200\b", {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0}),
    (r"\bH20\b", {"bf16": 148.0, "fp16": 148.0, "fp32": 44.0}),
    (r"\bH[18]00 PCIe\b", {"bf16": 756.5, "fp16": 756.5, "fp32": 51.0}),
    (r"\bH100 NVL\b", {"bf16": 835.5, "fp16": 835.5, "fp32": 60.0}),
    (r"\bH100\b|\bH800\b", {"bf16": 989.5, "fp16": 989.5, "fp32": 67.0}),
    (r"\bA[18]00\b", {"bf16": 312.0, "fp16": 312.0, "fp32": 19.5}),
    (r"\bA30\b", {"bf16": 165.0, "fp16": 165.0, "fp32": 10.3}),
    (r"\bV100-PCIE\b", {"fp16": 112.0, "fp32": 14.0}),
    (r"\bV100\b", {"fp16": 125.0, "fp32": 15.7}),
    (r"\bT4\b", {"fp16": 65.0, "fp32": 8.1}),
    (r"\bL40S\b", {"bf16": 362.0, "fp16": 362.0, "fp32": 91.6}),
    (r"\bL40\b", {"bf16": 181.0, "fp16": 181.0, "fp32": 90.5}),
    (r"\bL4\b", {"bf16": 121.0, "fp16": 121.0, "fp32": 30.3}),
    (r"\bA40\b", {"bf16": 149.7, "fp16": 149.7, "fp32": 37.4}),
    (r"\bA10\b", {"bf16": 125.0, "fp16": 125.0, "fp32": 31.2}),
    (r"\bRTX A6000\b", {"bf16": 154.8, "fp16": 154.8, "fp32": 38.7}),
    (r"\bRTX 6000 Ada\b", {"bf16": 364.2, "fp16": 364.2, "fp32": 91.1}),
    (r"\bRTX 5090$", {"bf16": 209.5, "fp16": 209.5, "fp32": 104.8}),
    (r"\bRTX 4090$", {"bf16": 165.2, "fp16": 165.2, "fp32": 82.6}),
    (r"\bRTX 3090$", {"bf16": 71.0, "fp16": 71.0, "fp32": 35.6}),
    (r"\bMI300A\b", {"bf16": 980.6, "fp16": 980.6, "fp32": 122.6}),
    (r"\bMI3(00|25)X\b", {"bf16": 1307.4, "fp16": 1307.4, "fp32": 163.4}),
    (r"\bMI250X\b", {"bf16": 191.5, "fp16": 191.5, "fp32": 47.9}),
    (r"\bMI250\b", {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3}),
    (r"\bMI210\b", {"bf16": 181.0, "fp16": 181.0, "fp32": 45.3}),
)


def multiplying_parameters(config: GPTConfig) -> int:
    """Return the number of weights that a token is multiplied with: all matrices except the embeddings, and the head.

    Embedding lookups multiply nothing; a tied head does. Norms and biases do not count.
    """
    matrices = [
        tensor
        for unit in model_units(config)
        if unit.name != "embedding"
        for tensor in unit.tensors
        if len(tensor.shape) == 2
    ]
    tied_head = config.vocab * config.hidden if config.tie_embeddings else 0
    return sum(tensor.numel for tensor in matrices) + tied_head


def flops_per_token(config: GPTConfig, sequence_length: int) -> int:
    """Return the FLOPs of training per token, forward and backward.

    6 x (parameters that multiply) + 12 x layers x hidden x sequence; the second term is attention's two
    products, not halved for the causal mask (PaLM, appendix B). Recomputed activations are not counted.
    """
    attention = 12 * config.layers * config.hidden * sequence_length
    return 6 * multiplying_parameters(config) + attention


def datasheet_peak(device_name: str, precision: str) -> float | None:
    """Return the dense peak of a card in FLOP/s at fp32, bf16 or fp16; None for an unknown card or precision.

    The name of a MIG slice or a laptop card does not determine its peak, so these are unknown.
    """
    if re.search(r"\bMIG\b|Laptop", device_name):
        return None
    for pattern, peaks in _DATASHEET:
        if re.search(pattern, device_name):
            return peaks[precision] * 1e12 if precision in peaks else None
    return None


def computes_bf16(accelerator: Accelerator | None) -> bool:
    """Return whether a described card computes in bf16. True if neither its datasheet nor the stated peaks tell."""
    if accelerator is None:
        return True
    name = accelerator.name
    if name is not None and datasheet_peak(name, "fp16") is not None:
        return datasheet_peak(name, "bf16") is not None
    return "fp16" not in accelerator.peak or "bf16" in accelerator.peak


def is_amd(name: str) -> bool:
    """Return whether a card with this name is AMD's."""
    return re.search(r"\bMI\d{2,3}", name) is not None


def lack_of_bf16(compute: str, accelerator: Accelerator | None) -> str | None:
    """Return the start of a sentence that a plan computes in bf16 on a card that has none by its datasheet; else
    None."""
    name = accelerator.name if accelerator else None
    if compute != "bf16" or name is None or datasheet_peak(name, "fp16") is None or datasheet_peak(name, "bf16"):
        return None
    return f"{name} does not compute in bf16"
