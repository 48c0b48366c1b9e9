"""Plain data as YAML."""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf


def to_yaml(data: Mapping[str, Any]) -> str:
    """Return plain data as YAML, which `read_yaml` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(data)))
