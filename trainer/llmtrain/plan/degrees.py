"""The `zero` and `quantize` sections made concrete: presets, tier names and `auto` become numbers. No torch in here."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from llmtrain.cluster.levels import Degrees
from llmtrain.cluster.quantity import quantity
from llmtrain.cluster.tiers import Tier, tier_ranks
from llmtrain.errors import BadInputError
from llmtrain.plan.plan import Quantization
from llmtrain.recipe.schema import Recipe
from llmtrain.recipe.zero import Degree, PartitionConfig, QuantizeConfig, ZeroConfig

_STATES = ("weights", "gradients", "optimizer")
_BITS = {"none": 0, "int8": 8, "int4": 4}

Section = TypeVar("Section", PartitionConfig, QuantizeConfig)


@dataclass(frozen=True)
class ZeroSettings:
    """The `zero` and `quantize` sections without presets and `auto`. hierarchical: whether weights are gathered level
    by level. resident: bytes for gathered weights."""

    degrees: Degrees
    hierarchical: bool
    resident: int
    quantization: Quantization


def zero_settings(
    recipe: Recipe, ranks: int, tiers: Sequence[Tier], fits: Callable[[ZeroSettings], bool] | None
) -> ZeroSettings:
    """Return the settings of both sections.

    ranks: number of data-parallel ranks. tiers: tiers along the data axis. fits: whether model states fit the memory of
    a rank with given settings; None if the description has no memory, and `auto` is then a node. Raises BadInputError
    with the key and the rule that it breaks.
    """
    zero, quantize = with_preset(recipe.zero, recipe.quantize, tiers)

    def settings(degrees: Degrees) -> ZeroSettings:
        hierarchical = zero.hierarchical == "auto" or zero.hierarchical
        quantization = _quantization(recipe.quantize, quantize, degrees)
        return ZeroSettings(degrees, hierarchical, _resident(zero), quantization)

    return settings(_degrees(zero, ranks, tiers, None if fits is None else lambda degrees: fits(settings(degrees))))


def _resident(zero: ZeroConfig) -> int:
    if zero.resident == "auto":
        return 0
    return int(quantity(zero.resident, "byte")) if isinstance(zero.resident, str) else zero.resident


def with_preset(zero: ZeroConfig, quantize: QuantizeConfig, tiers: Sequence[Tier]) -> tuple[ZeroConfig, QuantizeConfig]:
    """Return both sections with the preset's values for keys that are left out."""
    if zero.preset is None:
        return zero, quantize
    if zero.stage is not None:
        raise BadInputError(f"zero.stage is {zero.stage}, but zero.preset {zero.preset} sets it; leave one of them out")
    partition, secondary, packed = _presets(tiers[0].name)[zero.preset]
    zero = replace(
        zero,
        partition=_filled(zero.partition, partition),
        secondary=secondary if zero.secondary is None else zero.secondary,
    )
    try:
        return zero, _filled(quantize, packed)
    except ValueError as error:
        raise BadInputError(f"quantize.{error}") from error


def _presets(fastest: str) -> dict[str, tuple[PartitionConfig, Degree, QuantizeConfig]]:
    """Return the settings of each preset by name. fastest: name of the fastest tier."""
    return {
        "mics": (PartitionConfig(weights="auto"), 0, QuantizeConfig()),
        "zero++": (PartitionConfig(weights="all"), "node", QuantizeConfig(weights="int8", gradients="int4")),
        "topo": (
            PartitionConfig(weights=fastest, gradients="node", optimizer="all"),
            fastest,
            QuantizeConfig(weights="int8", secondary="int8", gradients="int4"),
        ),
    }


def _filled(own: Section, preset: Section) -> Section:
    missing = {entry.name: getattr(preset, entry.name) for entry in fields(own) if getattr(own, entry.name) is None}
    return replace(own, **missing)


def _degrees(zero: ZeroConfig, ranks: int, tiers: Sequence[Tier], fits: Callable[[Degrees], bool] | None) -> Degrees:
    """Return the degrees of a section.

    `auto` is the smallest number that fits (MiCS, section 3.2) and that the other degrees allow. If the memory is
    unknown, it is the allowed number nearest to a node, preferably not below it.
    """
    if zero.secondary == "auto":
        raise BadInputError("zero.secondary is auto; expected a number of ranks or a tier, such as node")
    if "auto" not in (zero.partition.weights, zero.partition.gradients, zero.partition.optimizer):
        return _with_auto(zero, ranks, tiers, ranks)
    first = 1 if fits else min(tier_ranks(tiers, "node"), ranks)
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    allowed = []
    for number in sorted(divisors, key=lambda number: (number < first, abs(number - first))):
        with suppress(BadInputError):
            allowed.append(_with_auto(zero, ranks, tiers, number))
    if not allowed:
        # This raises the error that explains why.
        return _with_auto(zero, ranks, tiers, ranks)
    fitting = [degrees for degrees in allowed if fits is None or fits(degrees)]
    if fitting:
        return fitting[0]
    raise BadInputError(
        f"zero.partition is auto, but the model states do not fit the {ranks} ranks' memory at any number "
        "(cluster.accelerator.memory); use more ranks, a smaller model, or auto for more of zero.partition"
    )


def _with_auto(zero: ZeroConfig, ranks: int, tiers: Sequence[Tier], auto: int) -> Degrees:
    """Return the degrees of a section, with the number `auto` for every `auto`. Raises BadInputError."""
    given = (zero.partition.weights, zero.partition.gradients, zero.partition.optimizer)
    staged = {0: (1, 1, 1), 1: (1, 1, ranks), 2: (1, ranks, ranks), 3: (ranks,) * 3}
    numbers: list[int] = []
    for index, (state, degree) in enumerate(zip(_STATES, given, strict=True)):
        if degree is not None:
            number = _number(f"zero.partition.{state}", degree, auto, tiers)
        elif zero.stage is not None or (not numbers and all(value is None for value in given)):
            number = staged[zero.stage or 0][index]
        else:
            # Without a stage, a state that is left out has the degree of the state before it.
            number = numbers[-1] if numbers else 1
        numbers.append(number)
    weights, gradients, optimizer = numbers
    secondary = _number("zero.secondary", zero.secondary or 0, auto, tiers)
    if ranks == 1 or (zero.preset and weights == 1):
        # A recipe for many ranks also runs on one, which needs no secondary copy.
        secondary = 0
    degrees = Degrees(ranks, weights, gradients, optimizer, secondary)
    _check(degrees)
    return degrees


def _number(key: str, degree: Degree, auto: int, tiers: Sequence[Tier]) -> int:
    if isinstance(degree, int):
        return degree
    if degree == "auto":
        return auto
    try:
        return tier_ranks(tiers, degree)
    except BadInputError as error:
        raise BadInputError(f"{key}: {error}") from error


def _check(degrees: Degrees) -> None:
    below, rule = 1, ""
    for state, number in zip(_STATES, (degrees.weights, degrees.gradients, degrees.optimizer), strict=True):
        if number % below:
            raise BadInputError(f"zero.partition.{state} is {number}; expected {rule}")
        if degrees.ranks % number:
            raise BadInputError(
                f"zero.partition.{state} is {number}; expected a divisor of the {degrees.ranks} data-parallel ranks"
            )
        below, rule = number, f"a multiple of zero.partition.{state} ({number})"
    secondary = degrees.secondary
    if not secondary:
        return
    if degrees.weights == 1:
        raise BadInputError(
            f"zero.secondary is {secondary}, but every rank holds all weights; it needs zero.stage=3 or "
            "zero.partition.weights above 1"
        )
    for other in (degrees.weights, degrees.gradients, degrees.optimizer, degrees.ranks):
        if (secondary % other and other % secondary) or secondary > degrees.ranks:
            raise BadInputError(
                f"zero.secondary is {secondary}; expected a divisor or a multiple of {other}, as zero.partition is "
                f"{degrees.weights}, {degrees.gradients}, {degrees.optimizer} of {degrees.ranks} ranks"
            )


def _quantization(given: QuantizeConfig, filled: QuantizeConfig, degrees: Degrees) -> Quantization:
    """Return the quantization, without what cannot apply. Raises BadInputError if the recipe asks for that itself, on
    several ranks; a preset, or a single rank, turns it off quietly."""
    nothing = {
        "weights": "no weights are gathered (zero.partition is all 1)" if degrees.optimizer == 1 else None,
        "secondary": "there is no secondary copy (zero.secondary)" if degrees.secondary == 0 else None,
        "gradients": "there is one data-parallel rank" if degrees.ranks == 1 else None,
    }
    bits: dict[str, int] = {}
    for key, why in nothing.items():
        chosen = getattr(filled, key) or "none"
        if why and chosen != "none" and degrees.ranks > 1 and getattr(given, key) == chosen:
            raise BadInputError(f"quantize.{key} is {chosen}, but {why}; set it to none")
        bits[key] = 0 if why else _BITS[chosen]
    return Quantization(**bits, block=filled.block)
