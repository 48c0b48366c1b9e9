"""Messages between pipeline stages over gloo, on CPUs."""

from collections.abc import Callable, Mapping

import torch.distributed as dist

from llmtrain.comm.arrivals import Wait
from llmtrain.comm.messages import Channel
from llmtrain.comm.messages_torch import TorchMessages
from llmtrain.plan.program.posted_receives import posting_of


class GlooMessages(TorchMessages):
    """See TorchMessages. ahead: receives to post ahead, at least as many as there are messages in flight: gloo sends a
    message only once it knows of its receive, which costs a round trip."""

    def __init__(
        self,
        peers: Mapping[Channel, tuple[dist.ProcessGroup, int]],
        ahead: int,
        on_arrival: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(peers, posting_of("gloo", ahead), on_arrival)

    def arrival(self, channel: Channel, work: dist.Work) -> Wait:
        """See TorchMessages."""
        return work.wait
