"""What NVIDIA's driver says of the GPUs, and what follows for a run."""

from pathlib import Path

import pytest
from llmtrain.launch.gpus import least_capability
from llmtrain.plan.facts import Facts
from llmtrain.plan.make import make_plan
from llmtrain.recipe.load import parse_recipe

RECIPE = {
    "name": "old",
    "model": {"family": "llama", "layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 64},
    "data": {"path": "set", "sequence_length": 16},
}


@pytest.mark.parametrize(
    ("said", "least"),
    [
        ("9.0\n8.0\n", (8, 0)),
        ("10.0\n9.0\n", (9, 0)),
        ("7.5\n", (7, 5)),
        ("[N/A]\n", None),
        ("No devices were found\n", None),
        ("", None),
    ],
)
def test_the_oldest_card_counts(
    said: str, least: tuple[int, int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert least_capability() == least


def test_without_the_tool_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert least_capability() is None


@pytest.mark.parametrize(("bf16", "compute", "attention"), [(True, "bf16", "flash"), (False, "fp16", "efficient")])
def test_old_cards_compute_in_fp16(bf16: bool, compute: str, attention: str) -> None:
    plan = make_plan(parse_recipe(RECIPE), Facts(world=1, device="cuda", bf16=bf16))
    assert (plan.compute, plan.kernels.attention) == (compute, attention)
