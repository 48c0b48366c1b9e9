"""Inputs of recomputed groups that leave the device between their forward and their backward pass (ZeRO-Infinity,
section 5.1.2), as the plan's list says."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from llmtrain.comm.device import give_freed_memory_back
from llmtrain.offload.activation_copies import ActivationCopies, CpuCopies, GpuCopies
from llmtrain.offload.activation_store import ActivationStore, FileActivations, HostActivations
from llmtrain.offload.striped_file import StripedFile
from llmtrain.offload.usage import TierUsage
from llmtrain.plan.activation_offload import ActivationMoves, ActivationOffload, GroupInput
from llmtrain.plan.per_rank.rank_activations import in_pages
from llmtrain.plan.pipeline.actions import Action, Kind


@dataclass
class _Kept:
    """What autograd keeps of a group input: its values, if it stays."""

    group_input: GroupInput
    values: Tensor | None


class OffloadedActivations:
    """Follows a rank's list of moves. Raises RuntimeError if a group input is saved or used in another order than
    listed."""

    def __init__(self, moves: ActivationMoves, store: ActivationStore, copies: ActivationCopies) -> None:
        self._moves, self._store, self._copies = moves, store, copies
        self._saves, self._uses = iter(moves.saves), iter(moves.uses)
        self._action: Action | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose all passes of an optimizer step. Raises RuntimeError if the passes have left out a planned move."""
        self._saves, self._uses = iter(self._moves.saves), iter(self._moves.uses)
        yield
        for left in (next(self._saves, None), next(self._uses, None)):
            if left is not None:
                raise RuntimeError(f"the step ended before {left}")

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Enclose a pass."""
        self._action = action
        yield
        if action.kind is Kind.F:
            self._copies.release()

    def hooks(self, group: int) -> saved_tensors_hooks:
        """Return what takes the input of a group in place of autograd. Inside, only this input is saved."""
        return saved_tensors_hooks(partial(self._save, group), self._use)

    def usage(self) -> TierUsage:
        """Return the usage since the start."""
        return replace(self._store.usage(), gpu_waited=self._copies.waited)

    def close(self) -> None:
        """Wait for the transfers that run, and free the memory outside."""
        self._store.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the host's memory."""
        return self._store.nbytes

    def _save(self, group: int, values: Tensor) -> _Kept:
        assert self._action is not None
        group_input = GroupInput(self._action.microbatch, self._action.chunk, group)
        save = next(self._saves, None)
        if save is None or save.group_input != group_input or self._action.kind is not Kind.F:
            raise RuntimeError(f"{group_input} is saved, but the plan has {save}")
        if save.region is None:
            return _Kept(group_input, values.detach())
        self._copies.save(values, save.region)
        return _Kept(group_input, None)

    def _use(self, kept: _Kept) -> Tensor:
        use = next(self._uses, None)
        if use is None or use.group_input != kept.group_input or (use.region is None) != (kept.values is not None):
            raise RuntimeError(f"{kept.group_input} is used, but the plan has {use}")
        values = kept.values if use.region is None else self._copies.take(use.region)
        assert values is not None
        self._copies.advance()
        for region in use.reads:
            self._copies.fetch(region)
        return values


def open_activations(
    offload: ActivationOffload, moves: ActivationMoves, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> OffloadedActivations | None:
    """Return what moves a rank's group inputs; None if none of them leaves. shape, dtype: of a group input. device:
    what the rank computes on. Raises RunFailedError."""
    if not moves.left:
        return None
    on_gpu = device.type != "cpu"
    if not on_gpu:
        # On a CPU, memory that is free but kept would take the place of what leaves.
        give_freed_memory_back()
    store: ActivationStore
    if offload.tier == "host":
        store = HostActivations(moves, shape, dtype, pinned=on_gpu)
    else:
        size = in_pages(prod(shape) * dtype.itemsize)
        file = StripedFile(offload.paths, [size] * moves.regions, offload.bandwidths)
        store = FileActivations(moves, shape, dtype, file, pinned=on_gpu)
    return OffloadedActivations(moves, store, GpuCopies(store, device, shape, dtype) if on_gpu else CpuCopies(store))
