"""Commands and options of other programs, and what this program has in their place: data for the advice in errors."""

from collections.abc import Mapping
from types import MappingProxyType

# Commands.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "train": "run",
        "pretrain": "run",
        "launch": "run",
        "start": "run",
        "evaluate": "eval",
        "sample": "generate",
        "inference": "generate",
        "tokenize": "data prepare",
        "prepare": "data prepare",
        "convert": "ckpt convert",
        "export": "ckpt convert",
        "sbatch": "submit",
    }
)

# Options of a command.
OPTIONS: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("plan", "--nproc"): "--ranks",
        ("run", "--ranks"): "--nproc",
        ("run", "--gpus"): "--nproc",
        ("run", "--nproc_per_node"): "--nproc",
        ("run", "--nproc-per-node"): "--nproc",
        ("run", "--num_processes"): "--nproc",
        ("generate", "--max-new-tokens"): "--max-tokens",
        ("generate", "--max_new_tokens"): "--max-tokens",
    }
)

# Options that other programs have, and what to do without them.
WITHOUT_OPTION: Mapping[str, str] = MappingProxyType(
    {
        "--config": "a recipe is named without an option, as in `llmtrain run RECIPE`",
        "--resume": "the same command resumes a run from its last checkpoint",
        "--nnodes": "torchrun, srun or mpirun starts ranks on several nodes, and `llmtrain submit` has --nodes",
    }
)
