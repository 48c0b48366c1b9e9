"""Kinds of MLP activations. No torch in here."""

from typing import Literal

Activation = Literal["gelu", "gelu_tanh", "swiglu"]
