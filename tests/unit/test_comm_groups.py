"""NCCL's options for a group."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from llmtrain.cluster.layout import Axis, Layout
from llmtrain.comm import ranks
from llmtrain.comm.groups import ALWAYS, connect_apart, group_options, group_over
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
    monkeypatch.setattr(ranks, "connect_apart", lambda: given.update(apart=True))
    ranks.connect(Layout({Axis.DATA: 2}), timeout=MINUTE)
    assert given["timeout"] == given["pg_options"]._timeout == ALWAYS
    # NCCL then connects at once, and not in the first step.
    assert given["device_id"] == torch.device("cuda", 0)
    assert given["apart"]


def test_further_groups_are_not_split_from_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch splits them where that one has a device."""
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    connect_apart()
    assert world.bound_device_id is None


@pytest.mark.parametrize(("backend", "device"), [("nccl", torch.device("cuda", 3)), ("gloo", None)])
def test_groups_connect_as_they_are_made(
    backend: str, device: torch.device | None, nccl: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[tuple[list[int], str, torch.device | None]]()

    def new_group(members: list[int], timeout: object, backend: str, pg_options: object, device_id: Any) -> str:
        made.append((members, backend, device_id))
        return f"group of {members}"

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    assert group_over(None, None, [(0, 1), (4, 5)], backend) == "group of [4, 5]"
    assert made == [([0, 1], backend, device), ([4, 5], backend, device)]
    assert group_over(None, None, [(0, 1)], backend) is None
