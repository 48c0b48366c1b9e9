"""Conversion between Hugging Face's config.json and GPTConfig. No torch in here.

Keys and defaults are those of transformers' GPT2Config, LlamaConfig and GPTNeoXConfig, of version 4 and of version 5. A
setting that our model would compute differently is refused, never approximated.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmtrain_data.bounds import Factor, Hidden, Layers, SequenceLength, Vocab, Width
from llmtrain_data.untrusted import UnreadableError, read_json
from llmtrain_kernels.activation.kinds import Activation
from pydantic import TypeAdapter, ValidationError

from llmtrain.errors import BadInputError
from llmtrain.model.config import Dropout, Fraction, GPTConfig, NormEps, RopeScaling
from llmtrain.yaml.expected import expected
from llmtrain.yaml.shown import shown

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_FAMILIES = {"gpt2": "gpt2", "llama": "llama", "gpt_neox": "neox"}
_ARCHITECTURES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
}
# For each key: the default if config.json lacks it, and the values that our model computes.
_CAUSAL: dict[str, tuple[object, tuple[object, ...]]] = {"is_causal": (True, (True,))}
_REQUIRED: dict[str, dict[str, tuple[object, tuple[object, ...]]]] = {
    "gpt2": {
        "scale_attn_weights": (True, (True,)),
        "scale_attn_by_inverse_layer_idx": (False, (False,)),
        "add_cross_attention": (False, (False,)),
    },
    "llama": {
        "hidden_act": ("silu", ("silu", "swish")),
        "attention_bias": (False, (False,)),
        "mlp_bias": (False, (False,)),
    },
    "neox": {
        "use_parallel_residual": (True, (True,)),
        "attention_bias": (True, (True,)),
    },
}

# Other names that transformers reads for keys of GPT-2.
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}

# Hugging Face's names of our activations; exports write the first one.
_GELU: dict[Activation, tuple[str, ...]] = {
    "gelu": ("gelu",),
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
}

# Keys of `RopeScaling`, with Hugging Face's names and their types.
_SCALING: dict[str, tuple[str, object]] = {
    "factor": ("factor", Factor),
    "original_positions": ("original_max_position_embeddings", SequenceLength),
    "low_freq_factor": ("low_freq_factor", Factor),
    "high_freq_factor": ("high_freq_factor", Factor),
}


class _Config:
    """A config.json, with errors for values that our models do not have."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.exists():
            raise BadInputError(f"{path} is missing; expected a folder of a Hugging Face model")
        try:
            content = read_json(path)
        except UnreadableError as error:
            raise BadInputError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise BadInputError(f"{path} holds no JSON object; expected a Hugging Face model's configuration")
        self.content: dict[str, Any] = content

    def refuse(self, key: str, value: object, expected: str) -> BadInputError:
        """Return the error for such a value."""
        return BadInputError(f"{key} in {self._path} is {shown(value)}; our model computes {expected}")

    def number(self, key: str, default: float | None, kind: Any, source: Mapping[str, Any] | None = None) -> Any:
        """Return a number, from a section of the file if one is given. kind: its type in `GPTConfig`."""
        value = (self.content if source is None else source).get(key)
        value = default if value is None else value
        try:
            return TypeAdapter(kind).validate_python(value, strict=True)
        except ValidationError:
            raise self.refuse(key, value, f"only with {expected(kind)}") from None

    def get(self, key: str, default: object) -> object:
        """Return the value of a key; null means the default."""
        value = self.content.get(key)
        return default if value is None else value


def read_hf_config(folder: Path) -> GPTConfig:
    """Return the shape of the Hugging Face model in `folder`.

    Raises BadInputError for another architecture, and for anything in config.json that our model would
    compute differently.
    """
    config = _Config(folder / CONFIG)
    family = _FAMILIES.get(str(config.get("model_type", None)))
    if family is None:
        raise config.refuse("model_type", config.get("model_type", None), f"only {', '.join(_FAMILIES)}")
    names = config.get("architectures", [])
    for name in names if isinstance(names, list) else [names]:
        if name not in _ARCHITECTURES[family]:
            raise config.refuse("architectures", name, f"only {_ARCHITECTURES[family][0]}")
    for key, (default, allowed) in {**_CAUSAL, **_REQUIRED[family]}.items():
        if (value := config.get(key, default)) not in allowed:
            raise config.refuse(key, value, f"only with {allowed[0]!r}")
    if config.content.get("quantization_config"):
        raise config.refuse("quantization_config", "set", "only with weights that are not quantized")
    if (file := config.get("transformers_weights", WEIGHTS)) != WEIGHTS:
        raise BadInputError(
            f"transformers_weights in {folder / CONFIG} is {shown(file)}; name that file {WEIGHTS} and drop the key"
        )
    sizes = {"gpt2": _gpt2, "llama": _llama, "neox": _neox}[family](config)
    try:
        return GPTConfig.of({"family": family, "vocab": config.number("vocab_size", None, Vocab), **sizes})
    except ValueError as error:
        raise BadInputError(f"{folder / CONFIG} describes no model of ours: {error}") from error


def _gpt2(config: _Config) -> dict[str, Any]:
    for alias, key in _GPT2_ALIASES.items():
        if (value := config.content.get(alias)) is not None and config.content.setdefault(key, value) != value:
            raise config.refuse(alias, value, f"only with the {config.content[key]} of {key}; leave one of them out")
    hidden, heads = config.number("n_embd", 768, Hidden), config.number("n_head", 12, Hidden)
    return {
        "layers": config.number("n_layer", 12, Layers),
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "ffn": config.number("n_inner", 4 * hidden, Width),
        "positions": config.number("n_positions", 1024, SequenceLength),
        "tie_embeddings": bool(config.get("tie_word_embeddings", True)),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5, NormEps),
        "rope_theta": 10000.0,
        "rotary_fraction": 1.0,
        "activation": _gelu(config, "activation_function", "gelu_new"),
        "dropout": _dropout(config, ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    }


def _llama(config: _Config) -> dict[str, Any]:
    heads = config.number("num_attention_heads", 32, Hidden)
    rope = _rope(config, theta_key="rope_theta", fraction_key="partial_rotary_factor", fraction=1.0)
    if (fraction := rope["rotary_fraction"]) != 1.0:
        raise config.refuse("partial_rotary_factor", fraction, "only with 1.0 in this family")
    shape = _common(config, heads)
    if (head_dim := config.get("head_dim", shape["hidden"] // heads)) != shape["hidden"] // heads:
        raise config.refuse("head_dim", head_dim, f"only with hidden_size / heads, {shape['hidden'] // heads}")
    if (rate := config.number("attention_dropout", 0.0, Dropout)) > 0:
        what = "dropout after attention and the MLP too; set it to 0 there, and model.dropout in the recipe"
        raise config.refuse("attention_dropout", rate, what)
    return (
        shape
        | rope
        | {
            "kv_heads": config.number("num_key_value_heads", heads, Hidden),
            "norm_eps": config.number("rms_norm_eps", 1e-6, NormEps),
            "activation": "swiglu",
            "dropout": 0.0,
        }
    )


def _neox(config: _Config) -> dict[str, Any]:
    heads = config.number("num_attention_heads", 64, Hidden)
    rope = _rope(config, theta_key="rotary_emb_base", fraction_key="rotary_pct", fraction=0.25)
    return (
        _common(config, heads)
        | rope
        | {
            "kv_heads": heads,
            "norm_eps": config.number("layer_norm_eps", 1e-5, NormEps),
            "activation": _gelu(config, "hidden_act", "gelu"),
            "dropout": _dropout(config, ("hidden_dropout", "attention_dropout"), 0.0),
        }
    )


def _common(config: _Config, heads: int) -> dict[str, Any]:
    return {
        "layers": config.number("num_hidden_layers", None, Layers),
        "hidden": config.number("hidden_size", None, Hidden),
        "heads": heads,
        "ffn": config.number("intermediate_size", None, Width),
        "positions": config.number("max_position_embeddings", 2048, SequenceLength),
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _rope(config: _Config, theta_key: str, fraction_key: str, fraction: float) -> dict[str, Any]:
    """Return RoPE's base, its scaling and the rotated share of a head; version 5 keeps them in `rope_parameters`, which
    does not count beside `rope_scaling`."""
    key = "rope_scaling" if config.get("rope_scaling", {}) else "rope_parameters"
    section, scaling = config.get(key, {}), None
    if not isinstance(section, dict):
        raise config.refuse(key, section, "only RoPE without scaling, or as Llama 3.1 scales it")
    kind = section.get("rope_type", section.get("type", "default"))
    if kind == "llama3":
        scaling = _scaling(config, section)
    elif kind != "default":
        raise config.refuse(f"{key}.rope_type", kind, "only RoPE without scaling, 'default', or 'llama3'")
    theta = config.number(theta_key, 10000.0, Factor)
    fraction = config.number(fraction_key, fraction, Fraction)
    return {
        "rope_theta": config.number("rope_theta", theta, Factor, section),
        "rope_scaling": scaling,
        "rotary_fraction": config.number("partial_rotary_factor", fraction, Fraction, section),
    }


def _scaling(config: _Config, section: Mapping[str, Any]) -> dict[str, Any]:
    original = _SCALING["original_positions"][0]
    # Version 5 takes the one outside of the section first.
    if (outside := config.content.get(original)) is not None:
        section = {**section, original: outside}
    return {name: config.number(key, None, kind, section) for name, (key, kind) in _SCALING.items()}


def _gelu(config: _Config, key: str, default: str) -> Activation:
    value = config.get(key, default)
    for activation, names in _GELU.items():
        if value in names:
            return activation
    raise config.refuse(key, value, f"only with {' or '.join(names[0] for names in _GELU.values())}")


def _dropout(config: _Config, keys: tuple[str, ...], default: float) -> float:
    rates = {key: config.number(key, default, Dropout) for key in keys}
    if len(set(rates.values())) > 1:
        raise config.refuse(" and ".join(rates), list(rates.values()), "one dropout; make them equal")
    return rates[keys[0]]


def to_hf_config(config: GPTConfig, dtype: str, special: Mapping[str, int | None]) -> dict[str, object]:
    """Return the contents of config.json for a model whose weights are saved as `dtype` (float32, bfloat16,
    ...).

    special: bos_token_id and eos_token_id. Raises BadInputError for a model that transformers has no class
    for.
    """
    kind = next(name for name, family in _FAMILIES.items() if family == config.family)
    common: dict[str, object] = {
        "architectures": [_ARCHITECTURES[config.family][0]],
        "model_type": kind,
        "torch_dtype": dtype,
        "vocab_size": config.vocab,
        "tie_word_embeddings": config.tie_embeddings,
        **special,
    }
    if config.family == "gpt2":
        return common | _to_hf_gpt2(config)
    common |= {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": config.ffn,
        "max_position_embeddings": config.positions,
        # Transformers' Llama has no dropout after attention and the MLP, as ours has it. No inference takes it.
        "attention_dropout": 0.0 if config.family == "llama" else config.dropout,
    }
    if config.rope_scaling is not None:
        common["rope_scaling"] = _to_hf_scaling(config.rope_scaling)
    if config.family == "neox":
        return common | {
            "layer_norm_eps": config.norm_eps,
            "hidden_act": _GELU[config.activation][0],
            "hidden_dropout": config.dropout,
            "use_parallel_residual": True,
            "attention_bias": True,
            "rotary_emb_base": config.rope_theta,
            "rotary_pct": config.rotary_fraction,
        }
    if config.rotary_fraction != 1.0:
        raise BadInputError(
            f"model.rotary_fraction is {config.rotary_fraction}; Hugging Face's Llama rotates whole heads only"
        )
    return common | {
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _to_hf_gpt2(config: GPTConfig) -> dict[str, object]:
    return {
        "n_embd": config.hidden,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.ffn,
        "n_positions": config.positions,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _GELU[config.activation][0],
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }


def _to_hf_scaling(scaling: RopeScaling) -> dict[str, object]:
    return {"rope_type": "llama3", **{key: getattr(scaling, name) for name, (key, _) in _SCALING.items()}}
