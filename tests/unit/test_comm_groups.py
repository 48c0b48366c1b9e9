"""NCCL's options for a group."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm import ranks
from llmtrain.comm.groups import ALWAYS, group_options
from llmtrain.plan.collective_buffers import MESSAGE_CTAS

MINUTE = timedelta(minutes=1)


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch have NCCL's options, which a build for CPUs lacks."""

    def options(is_high_priority_stream: bool) -> Any:
        return SimpleNamespace(is_high_priority_stream=is_high_priority_stream, config=SimpleNamespace())

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=options), raising=False)


def test_groups_have_the_timeout_that_torch_is_given(nccl: None) -> None:
    options = group_options("nccl", None, None, MINUTE)
    assert options._timeout == MINUTE
    assert options.is_high_priority_stream
    assert not vars(options.config)


def test_messages_between_stages_take_few_ctas(nccl: None) -> None:
    config = group_options("nccl", None, None, MINUTE, MESSAGE_CTAS).config
    assert (config.min_ctas, config.max_ctas) == (1, MESSAGE_CTAS)


def test_other_backends_have_no_options() -> None:
    assert group_options("gloo", None, None, MINUTE, MESSAGE_CTAS) is None


def test_the_group_of_all_ranks_has_one_timeout(nccl: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch warns on every rank where the options and the group differ. A job may be suspended for days."""
    given = dict[str, Any]()
    monkeypatch.setattr(ranks, "device_of", lambda local: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ranks, "_meet", lambda timeout: (dist.HashStore(), dist.HashStore(), 0))
    monkeypatch.setattr(ranks, "Watchdog", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options))
    ranks.connect(Layout({Axis.DATA: 2}), timeout=MINUTE)
    assert given["timeout"] == given["pg_options"]._timeout == ALWAYS
    # NCCL then connects at once, and not in the first step.
    assert given["device_id"] == torch.device("cuda", 0)
