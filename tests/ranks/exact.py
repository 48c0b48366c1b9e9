"""What a gpt2 run comes to in plain torch and any precision, fp64 for what exact arithmetic would give."""

from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from harness import BATCH, STEPS
from llmtrain.checkpoint.convert.hf_config import read_hf_config
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from llmtrain.model.init import initialize
from llmtrain.model.tensors import model_units
from llmtrain.optim.schedule import learning_rate
from llmtrain.optim.step import clip_divisor
from llmtrain.recipe.load import load_recipe
from llmtrain.recipe.prepare import settle
from llmtrain.recipe.resolve import Facts, shape
from llmtrain_data.dataset import open_split
from torch import Tensor

MICROBATCH = 24


def exact_weights(path: Path, overrides: list[str], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return every weight after the run, by its name in checkpoints, all computed in `dtype`."""
    recipe = settle(load_recipe(str(path), overrides), Facts(world=1, ranks_per_node=1, device="cpu"), read_hf_config)
    config, optimizer, data = shape(recipe), recipe.optimizer, open_split(recipe.data, "train")
    model = _model(config, recipe.seed, dtype)
    parameters = list(model.parameters())
    m, v = ([torch.zeros_like(one) for one in parameters] for _ in range(2))
    for step in range(STEPS):
        rows = torch.from_numpy(data.batch(recipe.seed, step * BATCH, BATCH))
        for part in rows.split(MICROBATCH):
            (_loss(model, part) * (MICROBATCH / BATCH)).backward()
        gradients = [one.grad for one in parameters if one.grad is not None]
        norm = float(torch.stack([one.double().norm() for one in gradients]).norm())
        divisor, lr = clip_divisor(norm, 1.0, optimizer.clip), learning_rate(optimizer, step, STEPS)
        (beta1, beta2), count = optimizer.betas, step + 1
        with torch.no_grad():
            for one, gradient, first, second in zip(parameters, gradients, m, v, strict=True):
                gradient.div_(divisor)
                first.lerp_(gradient, 1 - beta1)
                second.lerp_(gradient.square(), 1 - beta2)
                # Matrices decay, vectors do not.
                one.mul_(1 - lr * optimizer.weight_decay * (one.ndim > 1))
                one.addcdiv_(
                    first, (second / (1 - beta2**count)).sqrt() + optimizer.eps, value=-lr / (1 - beta1**count)
                )
        model.zero_grad()
    return {name: one.detach() for name, one in _by_name(model, config).items()}


def _loss(model: GPT, rows: Tensor) -> Tensor:
    def attention(qkv: Tensor, heads: int, rotary: None, dropout: float) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in qkv.chunk(3, 2))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, weight), targets)

    # The kernels of this project know fp32 and less.
    layers = "llmtrain.model.layers"
    with patch(f"{layers}.joint_attention", attention), patch(f"{layers}.linear_cross_entropy", cross_entropy):
        return model(rows[:, :-1], rows[:, 1:])


def _model(config: GPTConfig, seed: int, dtype: torch.dtype) -> GPT:
    assert (config.family, config.kv_heads) == ("gpt2", config.heads)
    model = GPT(config, torch.device("cpu")).to_empty(device="cpu").to(dtype)
    held = _by_name(model, config)
    for unit in model_units(config):
        values = torch.empty(unit.numel)
        initialize(unit, 0, unit.numel, seed, values)
        for tensor, part in zip(unit.tensors, values.split([one.numel for one in unit.tensors]), strict=True):
            held[tensor.name].data.copy_(part.view(tensor.shape))
    return model


def _by_name(model: GPT, config: GPTConfig) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        stacked = "qkv" if ".qkv." in name else "-"
        for letter, part in zip(stacked, parameter.data.chunk(len(stacked)), strict=True):
            found[name.replace(".qkv.", f".{letter}.")] = part
    return found
