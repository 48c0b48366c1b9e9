"""Our three families against transformers' models: the same weights and input give the same logits and gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from llmtrain.checkpoint.convert.hf_weights import hf_tensors
from llmtrain.model.gpt import GPT
from llmtrain.model.hf_config import read_hf_config
from llmtrain.model.tensors import model_units
from llmtrain.sharding.engine import Engine, ShardingSpec
from llmtrain.sharding.unit import unsharded_unit
from torch import Tensor

from tests.programs import BACKWARD, programs_of, whole_model
from tests.unit.test_checkpoint_convert import SCALING

SPECIAL: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
# All versions of transformers read it, though the types of some leave it out.
ROTARY: dict[str, Any] = {"rotary_pct": 0.5}


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        n_layer=3, n_embd=48, n_head=4, n_positions=32, vocab_size=97,
        attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **SPECIAL,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def llama(tied: bool = False, **more: Any) -> transformers.PreTrainedModel:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, intermediate_size=80,
        max_position_embeddings=32, vocab_size=97, rms_norm_eps=1e-5, tie_word_embeddings=tied, **SPECIAL, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def neox(activation: str = "gelu", **more: Any) -> transformers.PreTrainedModel:
    config = transformers.GPTNeoXConfig(
        num_hidden_layers=3, hidden_size=48, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=32, vocab_size=97, hidden_act=activation, **SPECIAL, **ROTARY, **more,
    )  # fmt: skip
    return transformers.GPTNeoXForCausalLM(config)


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama-tied": lambda: llama(tied=True),
    "llama-scaled": lambda: llama(rope_scaling={**SCALING}),
    "neox": neox,
    "neox-scaled": lambda: neox(rope_scaling={**SCALING}),
    "neox-20b": lambda: neox("gelu_fast"),
}


def perturbed(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """Change every parameter from its initial value, so that norms and biases count too."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def ours_from(folder: Path, recompute: int = 0) -> tuple[GPT, Engine]:
    config = read_hf_config(folder)
    whole = whole_model(config, recompute)
    model = GPT(config, torch.device("cpu"), whole.groups)
    units = [unsharded_unit(u, model.unit(u.name), torch.device("cpu"), torch.float32, 0) for u in model_units(config)]
    ranges = {
        t.name: u.weight[o : o + t.numel] for u in units for t, o in zip(u.spec.tensors, u.spec.offsets, strict=False)
    }
    for name, tensor in hf_tensors(folder, config):
        ranges.pop(name).copy_(tensor.flatten())
    assert not ranges
    programs = programs_of(units, [whole])
    return model, Engine(model, units, ShardingSpec(), programs, lambda calls: None)


def gradients_by_name(folder: Path, model: transformers.PreTrainedModel) -> dict[str, Tensor]:
    """Bring the peer's gradients into canonical form: save them, and read them as if they were weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    model.save_pretrained(folder)
    return {name: tensor.flatten().clone() for name, tensor in hf_tensors(folder, read_hf_config(folder))}


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("family", MODELS)
def test_logits_and_gradients(family: str, recompute: int, tmp_path: Path) -> None:
    theirs = perturbed(MODELS[family]())
    theirs.save_pretrained(tmp_path / "weights")
    model, engine = ours_from(tmp_path / "weights", recompute)
    tokens = torch.randint(0, 97, (3, 33))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    expected = theirs(inputs).logits
    largest = float(expected.detach().abs().max())
    torch.testing.assert_close(model(inputs), expected, rtol=1e-5, atol=1e-5 * largest)

    loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    loss.backward()
    units = engine.units.values()
    our_loss = model(inputs, targets)
    engine.backward(BACKWARD, our_loss.backward)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    gradients = gradients_by_name(tmp_path / "gradients", theirs)
    assert set(gradients) == {tensor.name for unit in units for tensor in unit.spec.tensors}
    for unit in units:
        # Compare by parameter: if the peer has one for Q, K and V, as gpt2 and neox do, its gradient is one as well.
        # (In gpt2, the gradient of K's bias alone is only rounding, as that bias moves a query's scores equally.)
        for name, start, end in unit.spec.parameter_ranges:
            wanted = torch.cat([gradients[t.name] for t in unit.spec.tensors if t.parameter == name])
            error = (unit.gradient[start:end] - wanted).norm() / wanted.norm()
            assert error < 1e-4, (unit.spec.name, name)
