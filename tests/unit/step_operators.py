"""The operators of a step in bf16 on a GPU, recorded on tensors without values. Prints them as JSON.

test_step_operators.py runs this file in a separate process, because it makes torch believe in a GPU.
"""

import json
from collections import Counter
from typing import Any
from unittest import mock

# Before torch: it loads the library that stands for a GPU.
from tools.bench import modelled

import torch  # isort: skip
from tools.tensors import tensors_of

PRESETS = ("gpt2-124m", "llama3.2-1b", "pythia-160m")
TOKENS, MICROBATCH = 1024, 2


class Kinds(modelled.Trace):
    """Notes of each operator also how large its largest tensor in fp32 is, in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[str, int]] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, given = len(self.operators), list((kwargs or {}).values())
        found = super().__torch_dispatch__(op, types, args, kwargs)
        if len(self.operators) > before:
            here = [one for value in (*args, *given, found) for one in tensors_of(value)]
            wide = [one.numel() for one in here if one.is_cuda and one.dtype == torch.float32]
            self.noted.append((self.operators[-1].name, max(wide, default=0)))
        return found


def operators(preset: str, layers: int, microbatches: int, *keys: str) -> list[tuple[str, int]]:
    """Return the operators of a step, and the elements of the largest tensor in fp32 of each."""
    kinds = Kinds()
    given = (
        f"model={{preset: {preset}, positions: {TOKENS}, layers: {layers}}}", f"train.microbatch={MICROBATCH}",
        f"train.global_batch={MICROBATCH * microbatches}", "activation_checkpointing=none", *keys,
    )  # fmt: skip
    with (
        mock.patch.object(modelled, "Trace", return_value=kinds),
        mock.patch.object(modelled.triton_launch, "triton_installed", return_value=True),
    ):
        modelled.traced(modelled.plan_of(preset, TOKENS, *given))
    return kinds.noted


def described(preset: str) -> dict[str, Any]:
    """Return the kernels of one more block of a microbatch, of the first one and of a further one, by name; and the
    names of operators that have a tensor in fp32 as large as half of a layer's activations."""
    # The first step of a process also tries which products torch has.
    operators(preset, 1, 1)
    found = {key: operators(preset, *key) for key in ((2, 1), (3, 1), (2, 2), (3, 2))}
    counts = {key: Counter(name for name, _ in value) for key, value in found.items()}
    first = counts[3, 1] - counts[2, 1]
    both = counts[3, 2] - counts[2, 2]
    hidden = modelled.plan_of(preset, TOKENS, f"model={{preset: {preset}, positions: {TOKENS}}}").model.hidden
    wide = {name for name, elements in found[3, 2] if elements >= MICROBATCH * TOKENS * hidden // 2}
    return {"first": first, "further": both - first, "wide": sorted(wide)}


if __name__ == "__main__":
    print(json.dumps({preset: described(preset) for preset in PRESETS}))
