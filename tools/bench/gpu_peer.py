"""A peer of the benchmark of a GPU: a model of transformers, or a GPT-2 in plain torch, with the shape and the batch of
a part, compiled by torch, with its fused AdamW in fp32 and autocast to bf16."""

import argparse
import json
import time
from dataclasses import replace

import torch
from llmtrain.comm.device import forget_peak_memory, synchronize
from llmtrain.model.hf_config import to_hf_config
from llmtrain.model.presets import PRESETS
from llmtrain.plan.flops import datasheet_peak, flops_per_token
from llmtrain.telemetry.mfu import share_of
from torch import Tensor, nn

from tools.bench.gpu import RESULT
from tools.bench.plain_gpt import PlainGPT

WARM_UP = 5


def model_of(preset: str, sequence: int, plain: bool) -> nn.Module:
    """Return a model with the shape of a preset, which maps tokens to their loss. plain: in plain torch."""
    if plain:
        return PlainGPT(PRESETS[preset], sequence)
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = to_hf_config(replace(PRESETS[preset], positions=sequence), "float32", {})
    config = AutoConfig.for_model(str(shape.pop("model_type")), **shape, use_cache=False)
    return _Losses(AutoModelForCausalLM.from_config(config))


class _Losses(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels=tokens).loss
        return loss


def measured(preset: str, sequence: int, batch: int, steps: int, plain: bool) -> None:
    """Train on random tokens; print the rate of the steps after `WARM_UP`, and the peak memory in bytes."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with device:
        model = model_of(preset, sequence, plain)
        tokens = torch.randint(0, 500, (batch, sequence))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    compiled = torch.compile(model)
    begin = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            synchronize(device)
            forget_peak_memory(device)
            begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16):
            loss = compiled(tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronize(device)
    rate = batch * sequence * steps / (time.perf_counter() - begin)
    found: dict[str, object] = {"card": "no GPU", "tokens_per_s": rate, "mfu": None, "planned": None, "measured": None}
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        peak, flops = datasheet_peak(name, "bf16"), rate * flops_per_token(PRESETS[preset], sequence)
        share = share_of(flops, flops, peak)
        found |= {"card": name, "mfu": share, "measured": torch.cuda.max_memory_allocated()}
    print(RESULT + json.dumps(found))


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("preset")
    parser.add_argument("--sequence", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--plain", action="store_true", help="a GPT-2 in plain torch")
    arguments = parser.parse_args()
    measured(arguments.preset, arguments.sequence, arguments.batch, arguments.steps, arguments.plain)


if __name__ == "__main__":
    main()
