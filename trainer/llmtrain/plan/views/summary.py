"""The figures of a run before it starts: parameters, tokens, FLOPs, memory. No torch in here."""

from dataclasses import asdict, dataclass

from llmtrain_data import units
from llmtrain_data.dataset import open_split
from llmtrain_data.errors import DataError

from llmtrain.model.tensors import parameter_count
from llmtrain.optim.lr_schedule import learning_rate
from llmtrain.plan.flops import flops_per_token
from llmtrain.plan.per_rank.states import most_states
from llmtrain.plan.plan import Plan
from llmtrain.plan.record import decisions
from llmtrain.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of a plan.

    tokens: tokens that the run trains on. training_tokens: tokens of the training split; epochs: passes over them; both
    None if the data cannot be opened. data_problem: the reason for that, else None. flops: FLOPs of the whole run.
    lr, last_lr: learning rates after `warmup` steps and in the last step. state_bytes_per_rank: bytes of model states
    on the rank that holds most. auto: one line for each decision.
    """

    parameters: int
    ranks: int
    device: str
    steps: int
    tokens_per_step: int
    tokens: int
    training_tokens: int | None
    epochs: float | None
    data_problem: str | None
    flops: float
    lr: float
    warmup: int
    last_lr: float
    state_bytes_per_rank: int
    auto: list[str]

    def as_data(self) -> dict[str, object]:
        """Return the summary as plain data, for JSON."""
        return asdict(self)

    def comments(self) -> str:
        """Return the summary as a table in YAML comments."""
        tokens = f"{units.number(self.tokens)}, {units.number(self.tokens_per_step)} per step"
        epochs = f"not known: {self.data_problem}"
        if self.epochs is not None and self.training_tokens is not None:
            epochs = f"{self.epochs:.3g} of the {units.number(self.training_tokens)} tokens of the training split"
        rows = [
            ("parameters", units.number(self.parameters)),
            ("steps", str(self.steps)),
            ("tokens", tokens),
            ("epochs", epochs),
            ("FLOPs", f"{self.flops:.2e}"),
            ("learning rate", f"{self.lr:.4g} after {self.warmup} steps, {self.last_lr:.4g} in the last step"),
            ("ranks", f"{self.ranks} x {self.device}"),
            ("states per rank", f"{units.size(self.state_bytes_per_rank)} of weights, gradients and optimizer states"),
            *(("auto" if index == 0 else "", line) for index, line in enumerate(self.auto)),
        ]
        # One line each: text after a line break in a path would be read as YAML.
        return "".join(f"# {name:<17}{' '.join(value.split())}\n" for name, value in rows)


def summarize(recipe: Recipe, plan: Plan, device: str) -> Summary:
    """Return the summary of a recipe's plan on `device`. Opens the data. Raises DataError for an id of the data that is
    not in the model's vocabulary, as the run's start does."""
    per_step, steps = plan.batch.tokens, plan.training.steps
    training, problem = None, None
    try:
        samples = open_split(plan.data, "train", plan.model.vocab)
    except DataError as error:
        problem = str(error)
    else:
        samples.check_ids()
        training = sum(source.token_count for source in samples.sources)
    return Summary(
        parameters=parameter_count(plan.model),
        ranks=plan.grid.world,
        device=device,
        steps=steps,
        tokens_per_step=per_step,
        tokens=per_step * steps,
        training_tokens=training,
        epochs=per_step * steps / training if training else None,
        data_problem=problem,
        flops=float(flops_per_token(plan.model, plan.batch.sequence_length)) * per_step * steps,
        lr=plan.optimizer.lr,
        warmup=plan.optimizer.warmup,
        last_lr=learning_rate(plan.optimizer, steps - 1, steps),
        state_bytes_per_rank=most_states(plan).total,
        auto=decisions(recipe, plan.record),
    )
