"""Ranks of a run that are not there: collectives and messages of the one that is there return at once, and move
nothing."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from llmtrain.comm import backend, collectives, messages_nccl, messages_torch, nccl, ranks, subgroups
from llmtrain_kernels.quantize import op as quantize

# Those that call torch.distributed.
MODULES = (backend, collectives, messages_nccl, messages_torch, nccl, ranks)


class Group:
    """A communicator, from the view of one of its ranks."""

    def __init__(self, members: Sequence[int], own: int) -> None:
        self.members, self._own = list(members), own

    def rank(self) -> int:
        """See torch."""
        return self.members.index(self._own)

    def size(self) -> int:
        """See torch."""
        return len(self.members)


class Silent:
    """Stands for torch.distributed."""

    def __init__(self, world: int, rank: int) -> None:
        self._rank = rank
        self.group = SimpleNamespace(WORLD=Group(range(world), rank))

    def get_rank(self) -> int:
        """See torch."""
        return self._rank

    def get_process_group_ranks(self, group: Group) -> list[int]:
        """See torch."""
        return list(group.members)

    def group_over(self, cluster: Any, card: Any, groups: Any, *options: Any) -> Group | None:
        """See `llmtrain.comm.subgroups`."""
        own = [members for members in groups if self._rank in members]
        return Group(own[0], self._rank) if own else None

    def __getattr__(self, name: str) -> Any:
        """Return a call whose work is done."""
        return lambda *arguments, **options: mock.MagicMock()


@contextmanager
def alone(world: int, rank: int) -> Iterator[None]:
    """Let one rank of a run on GPUs be the only one. Tensors without values have addresses, and are packed at once."""
    silent = Silent(world, rank)
    registers = SimpleNamespace(cudaHostRegister=lambda *given: 0, cudaHostUnregister=lambda *given: 0)
    changes = [
        *(mock.patch.object(module, "dist", silent) for module in MODULES),
        mock.patch.object(nccl, "ALL_GATHER", silent.all_gather),
        mock.patch.object(nccl, "REDUCE_SCATTER", silent.reduce_scatter),
        mock.patch.object(subgroups, "group_over", silent.group_over),
        mock.patch.object(quantize, "_backend"),
        mock.patch.object(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata << 40),
        mock.patch.object(torch.Tensor, "data_ptr", _address),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(torch.cuda, "cudart", return_value=registers),
    ]
    with ExitStack() as entered:
        for change in changes:
            entered.enter_context(change)
        yield


def _address(tensor: torch.Tensor) -> int:
    return (tensor.untyped_storage()._cdata << 40) + int(tensor.storage_offset()) * tensor.itemsize
