"""The recipe's `offload` section."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from llmtrain_data.bounds import Share
from pydantic import Field

BucketSize = Annotated[int, Field(ge=1024, le=2**30)]
Overlap = Annotated[int, Field(ge=1, le=64)]


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Which model states and activations rest outside of the memory that computes.

    optimizer: where the fp32 weights and both moments rest: none (on the device), host (memory of the host; on a CPU
    that is the memory that computes) or nvme (files, which pass through the memory of the host in buckets;
    ZeRO-Infinity, section 6). step: what steps them: host (its CPU; ZeRO-Offload, section 4) or device (they come to
    the device in buckets, are stepped there, and go back; AxoNN, section V). parameters: where the weights rest that
    the model computes with: none (on the device), host or nvme; a unit's weights then come to the device before they
    are used and leave it after that, as far as `zero.resident` has no room for them. gradients: where the fp32 sums of
    gradients rest: none (on the device), host or nvme; auto is where the weights do, but host in place of nvme where
    they fit `cluster.node.host.memory`, and on the device where they fit `cluster.accelerator.memory` and moves then
    take less time, or where tensor-parallel ranks have to add them up
    (`parallel.sequence`, `quantize.gradients`, or on GPUs fp32 of `precision.reduce` or `precision.compute`).
    activations: where the inputs of the groups of activation_checkpointing rest between their forward and their
    backward pass: none (on the device), host or nvme; as many of them as `cluster.accelerator.memory` has room for
    stay, those that are used first, and two where that is not stated. share: part of each rank's optimizer states that
    leaves, from 0 to 1; those of its first layers stay. auto is the least with which the run fits
    `cluster.accelerator.memory`, beside resident weights where the weights rest elsewhere and less then moves, and 1
    where that is not stated. spare: part of what leaves that is stepped as its gradients arrive, before their norm is
    known, into spare memory or files of the same size; it counts once the norm is known and does not clip, and else the
    step is repeated from the old states. auto is 0 on CPUs, for nvme, and where no gradients are complete before the
    last pass ends; for host it is the most that fits `cluster.node.host.memory`, in eighths, or a quarter where that is
    not stated. spare_weights: where the new weights of what is stepped ahead wait for the norm: host, or device, so
    that they cross the host link during the backward pass; auto is device where no activations leave it and
    `cluster.accelerator.memory` has room for all of them beside what else it holds. paths: folders for nvme, one for
    each volume, over which bytes are striped; by default those of the cluster file's node.nvme. bucket: elements of a
    bucket of states; auto is 4194304 where a GPU's host has them in its memory, else 524288. overlap: buckets of
    optimizer states that are on their way while one is stepped (AxoNN's k; ranks have reduced their gradients during
    the backward pass). With optimizer host, overlap + 1 threads step a bucket each, and none is fetched ahead; where
    gradients are offloaded, it is one thread. auto is 3.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "strict": True}

    optimizer: Literal["none", "host", "nvme"] = "none"
    step: Literal["host", "device"] = "host"
    parameters: Literal["none", "host", "nvme"] = "none"
    gradients: Literal["auto", "none", "host", "nvme"] = "auto"
    activations: Literal["none", "host", "nvme"] = "none"
    share: Share | Literal["auto"] = "auto"
    spare: Share | Literal["auto"] = "auto"
    spare_weights: Literal["auto", "host", "device"] = "auto"
    paths: tuple[str, ...] = ()
    bucket: BucketSize | Literal["auto"] = "auto"
    overlap: Overlap | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        if self.paths and "nvme" not in (self.optimizer, self.parameters, self.gradients, self.activations):
            raise ValueError(
                "paths is given, but nothing rests in files; set optimizer, parameters, gradients or activations to "
                "nvme, or leave paths out"
            )
        if len(set(self.paths)) < len(self.paths):
            twice = next(path for path in self.paths if self.paths.count(path) > 1)
            raise ValueError(f"paths has {twice} twice; give a folder of each volume")
        if "" in self.paths:
            raise ValueError("paths has an empty path; give a folder of each NVMe volume")
        if self.optimizer == "none" and self.step == "device":
            raise ValueError(
                "step is device, but optimizer is none, so that nothing is brought to the device; "
                "set optimizer to host or nvme"
            )
