"""The parameters of a unit's module as views into one flat buffer."""

from torch import Tensor, nn

from llmtrain.model.tensors import UnitSpec


class UnitParameters:
    """A module's parameters, in the order of the unit's flat buffer; stacked tensors make one parameter. starts, ends:
    where each begins and ends in the buffer."""

    def __init__(self, spec: UnitSpec, module: nn.Module, weight: Tensor, gathered: bool) -> None:
        """Replace the parameters of `module`: by views into `weight` if it is the gathered unit, else by empty
        parameters of its dtype, until `show`."""
        self._ranges = spec.parameter_ranges
        self.starts = [start for _, start, _ in self._ranges]
        self.ends = [end for *_, end in self._ranges]
        self._shapes = [module.get_parameter(name).shape for name, _, _ in self._ranges]
        values = self.views(weight) if gathered else [weight.new_empty(0) for _ in self._ranges]
        self.tensors = tuple(
            _replace(module, name, value) for (name, _, _), value in zip(self._ranges, values, strict=True)
        )
        self._cached_views: dict[int, list[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.tensors)

    def show(self, flat: Tensor) -> None:
        """Make the parameters views into `flat`, `[padded]` of their dtype: gathered weights in a buffer that lives as
        long as the unit."""
        for parameter, view in zip(self.tensors, self.cached_views(flat), strict=True):
            parameter.data = view

    def cached_views(self, flat: Tensor) -> list[Tensor]:
        """Return `views` of `flat`, a buffer that lives as long as the unit. They are cached, because making a view
        takes about 5 us."""
        found = self._cached_views.get(flat.data_ptr())
        if found is None:
            found = self._cached_views[flat.data_ptr()] = self.views(flat)
        return found

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return, for each parameter, the view of its shape into `flat`, `[padded]` of any dtype, a buffer of the full
        unit."""
        return [flat[start:end].view(shape) for (_, start, end), shape in zip(self._ranges, self._shapes, strict=True)]


def _replace(module: nn.Module, name: str, values: Tensor) -> nn.Parameter:
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(values)
    setattr(module.get_submodule(owner), leaf, parameter)
    return parameter
