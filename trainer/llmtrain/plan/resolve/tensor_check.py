"""Whether a model can be split over tensor-parallel ranks. No torch in here."""

from llmtrain.cluster.parallel import ParallelConfig
from llmtrain.model.config import GPTConfig


def tensor_problems(config: GPTConfig, parallel: ParallelConfig, sequence_length: int) -> str | None:
    """Return an error about a size that `parallel.tensor` does not divide; None if it divides all.

    The vocabulary need not be divisible. `parallel.sequence` with one rank has no effect and is no error, so that a
    recipe with it also runs with `parallel.tensor=1`.
    """
    degree = parallel.tensor
    for key, what in (("heads", "heads"), ("kv_heads", "key/value heads"), ("ffn", "channels of the MLP")):
        value = getattr(config, key)
        if value % degree:
            return (
                f"parallel.tensor is {degree}, and model.{key} is {value}; every rank holds as many {what}, so "
                f"parallel.tensor must divide it: take {_divisors(config)}"
            )
    if config.vocab < degree:
        return f"parallel.tensor is {degree}, and model.vocab is {config.vocab}; every rank needs at least one token"
    if parallel.sequence and sequence_length % degree:
        return (
            f"parallel.sequence is true, and data.sequence_length is {sequence_length}; it must be a multiple of "
            f"parallel.tensor ({degree})"
        )
    return None


def _divisors(config: GPTConfig) -> str:
    fitting = [
        n for n in range(1, config.kv_heads + 1) if not (config.kv_heads % n or config.heads % n or config.ffn % n)
    ]
    return ", ".join(str(n) for n in fitting[:-1]) + (" or " if len(fitting) > 1 else "") + str(fitting[-1])
