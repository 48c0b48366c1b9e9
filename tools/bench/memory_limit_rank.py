"""One process of `memory_limit`: trains a GPT of a peer for some steps, and prints its parameters.

    python -m tools.bench.memory_limit_rank PEER LAYERS

Weights come into being where the peer keeps them. Activations are recomputed block by block.
"""

import json
import logging
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from llmtrain.model.config import GPTConfig
from llmtrain.model.gpt import GPT
from torch import Tensor, nn

from tools.ports import free_ports

HIDDEN, VOCAB, TOKENS, STEPS = 1024, 32768, 256, 5
CPU = torch.device("cpu")


def config_of(layers: int) -> GPTConfig:
    """Return the model: as small as the comparison allows, but for its layers."""
    return GPTConfig(
        family="gpt2", layers=layers, hidden=HIDDEN, heads=16, kv_heads=16, ffn=4 * HIDDEN, positions=TOKENS,
        vocab=VOCAB, tie_embeddings=True, norm_eps=1e-5, rope_theta=1e4, rotary_fraction=1.0, activation="gelu_tanh",
        dropout=0.0,
    )  # fmt: skip


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return a sequence of random tokens, and its targets."""
    row = torch.randint(0, VOCAB, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
    return row[:, :-1], row[:, 1:]


@torch.no_grad()
def initialize(parameter: Tensor) -> None:
    """Set weights of which the loss is finite."""
    if parameter.dim() > 1:
        parameter.normal_(std=0.02)
    else:
        parameter.fill_(0.5)


def fsdp2(layers: int) -> int:
    """Train with torch's fully_shard, parameters, gradients and optimizer states on the host."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    mesh, policy = init_device_mesh("cpu", (1,)), CPUOffloadPolicy(pin_memory=False)
    with torch.device("meta"):
        model = GPT(config_of(layers), CPU, [range(block, block + 1) for block in range(layers)])
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, offload_policy=policy)
    fully_shard(model, mesh=mesh, offload_policy=policy)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        initialize(parameter.to_local())  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for number in range(STEPS):
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(number, loss.item(), flush=True)
    return sum(parameter.numel() for parameter in model.parameters())


def deepspeed_zero3(layers: int) -> int:
    """Train with DeepSpeed's ZeRO-3, parameters and optimizer on the host."""
    import deepspeed

    host = {"device": "cpu", "pin_memory": False}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": 3, "offload_optimizer": host, "offload_param": host},
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1_000_000,
    }
    # `deepspeed.zero.Init` cannot partition parameters that a module creates on the meta device, so all of them are
    # allocated here.
    model = GPT(config_of(layers), CPU, [range(block, block + 1) for block in range(layers)])
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
            initialize(getattr(module, name))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for number in range(STEPS):
        loss = engine(*batch(number))
        engine.backward(loss)
        engine.step()
        print(number, loss.item(), flush=True)
    return sum(parameter.ds_numel for parameter in model.parameters())  # type: ignore[attr-defined]


PEERS: dict[str, Callable[[int], int]] = {"FSDP2": fsdp2, "DeepSpeed ZeRO-3": deepspeed_zero3}


def main() -> None:
    """Train, and print the number of parameters."""
    logging.disable(logging.WARNING)
    (port,) = free_ports(1)
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ.update({**place, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"})
    dist.init_process_group("gloo")
    parameters = PEERS[sys.argv[1]](int(sys.argv[2]))
    print(json.dumps({"parameters": parameters}), flush=True)
    # DeepSpeed's threads would keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main()
