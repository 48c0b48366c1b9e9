"""Ranks whose machines differ, so that they plan other runs, or compute on another kind of device."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist
from llmtrain.comm.ranks import Ranks, _check_device
from llmtrain.errors import RunFailedError
from llmtrain.plan.facts import Facts
from llmtrain.plan.plan import Plan
from llmtrain.plan.resolve.make import make_plan
from llmtrain.recipe.load import parse_recipe
from llmtrain.training.same_plan import check_same_plan

from tests.tiny import write_corpus

RECIPE = {
    "name": "same",
    "model": {"family": "gpt2", "layers": 1, "hidden": 64, "heads": 4, "vocab": 64},
    "train": {"global_batch": 8},
}


def planned(path: Path, facts: Facts, **train: object) -> Plan:
    data = {"path": str(path), "sequence_length": 16}
    return make_plan(parse_recipe({**RECIPE, "data": data, "train": {"global_batch": 8, **train}}), facts)


def compare(main: Plan, other: Plan) -> None:
    said: list[str] = []
    first = SimpleNamespace(rank=0, from_main=lambda name, text: said.append(text) or text)
    check_same_plan(main, cast(Ranks, first))
    check_same_plan(other, cast(Ranks, SimpleNamespace(rank=3, from_main=lambda name, text: said[0])))


@pytest.mark.parametrize(
    ("change", "train", "said"),
    [
        ({}, {"microbatch": 4}, "train.microbatch: 1 -> 4"),
        ({"bf16": False}, {"microbatch": 1}, "precision.compute: bf16 -> fp16"),
        ({"triton": False}, {"microbatch": 1}, "optimizer.backend: triton -> torch"),
    ],
)
def test_a_rank_that_plans_otherwise_is_named(
    change: dict[str, object], train: dict[str, object], said: str, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "set", 4)
    facts = Facts(world=2, device="cuda", triton=True)
    main = planned(tmp_path / "set", facts, microbatch=1)
    with pytest.raises(RunFailedError, match=r"rank 3 on .* plans another run than rank 0") as raised:
        compare(main, planned(tmp_path / "set", replace(facts, **change), **train))  # type: ignore[arg-type]
    assert said in str(raised.value)


def test_machines_may_have_the_data_in_other_folders(tmp_path: Path) -> None:
    facts = Facts(world=2, device="cuda", triton=True)
    for name in ("one", "other"):
        write_corpus(tmp_path / name, 4)
    compare(planned(tmp_path / "one", facts), planned(tmp_path / "other", facts))


def test_a_rank_without_a_gpu_is_told_before_ranks_connect() -> None:
    store = dist.HashStore()
    _check_device(store, 0, "cuda")
    _check_device(store, 1, "cuda")
    with pytest.raises(RunFailedError, match=r"rank 2 on .* finds no GPU, and rank 0 has one"):
        _check_device(store, 2, "cpu")
