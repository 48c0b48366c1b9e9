"""What a transport posts before it is needed."""

import pytest
import torch
import torch.distributed as dist
from llmtrain.parallel.pipeline.transport import Channel, TorchTransport


class Arrived:
    """The work of a message that is there."""

    def wait(self) -> None:
        pass


def test_as_many_receives_are_posted_as_messages_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where fewer are, gloo holds a message back until its sender has heard of the receive, a round trip later."""
    posted: list[int] = []

    def irecv(values: torch.Tensor, peer: int, group: object) -> Arrived:
        posted.append(values.numel())
        return Arrived()

    monkeypatch.setattr(dist, "irecv", irecv)
    channel = Channel(0, 1)
    transport = TorchTransport({channel: (None, 0)}, torch.device("cpu"), torch.float32, 3)  # type: ignore[dict-item]
    transport.expect(channel, [torch.Size((number,)) for number in range(1, 6)])
    assert posted == [1, 2, 3]
    assert transport.receive(channel).numel() == 1
    assert posted == [1, 2, 3, 4]
    for _ in range(4):
        transport.receive(channel)
    assert posted == [1, 2, 3, 4, 5]
