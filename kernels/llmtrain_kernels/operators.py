"""Operators of torch that call a kernel. torch.compile, fake tensors and recorders see one call, and nothing inside.

`torch.library.custom_op` does the same, and takes some 30 us of the host for each call, in place of 5.
"""

import functools
from collections.abc import Callable
from typing import TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., object])
_NAMESPACE = "llmtrain"


def constant(function: F) -> F:
    """Mark a function whose result torch.compile takes as a constant of its graph.

    `torch.compiler.assume_constant_result` sets the same mark, but imports torch's compiler, which takes a run that
    compiles nothing longer than to import its own modules, and 140 MiB.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def traced_operator(
    name: str, writes: tuple[str, ...] = (), device: str = "CompositeExplicitAutograd"
) -> Callable[[F], F]:
    """Return a decorator that turns a function of tensors and numbers into the torch operator `llmtrain::name`.

    writes: names of the arguments that it changes. device: torch's dispatch key; by default tensors of all devices. It
    has no gradient: call it inside an autograd function.
    """

    def made(function: F) -> F:
        full = f"{_NAMESPACE}::{name}"
        torch.library.define(full, torch.library.infer_schema(function, mutates_args=writes))
        torch.library.impl(full, device)(function)
        return cast(F, getattr(getattr(torch.ops, _NAMESPACE), name).default)

    return made


def operator(name: str, writes: tuple[str, ...] = ()) -> Callable[[F], F]:
    """As `traced_operator`, for functions that torch.compile never reaches and that are called without gradients.

    The function is called directly, which saves 8 us of torch's dispatch, except where a dispatch mode looks: fake
    tensors and recorders.
    """

    def made(function: F) -> F:
        seen = traced_operator(name, writes)(function)

        # torch's `is_in_torch_dispatch_mode` is one flag for all threads: it stays set where two of them leave their
        # modes in the order in which they entered them.
        @functools.wraps(function)
        def call(*arguments: object, **named: object) -> object:
            return (seen if torch._C._len_torch_dispatch_stack() else function)(*arguments, **named)

        return cast(F, call)

    return made


def fake(name: str) -> Callable[[F], F]:
    """Return a decorator of a function that returns empty tensors like those that an operator returns."""

    def made(function: F) -> F:
        torch.library.register_fake(f"{_NAMESPACE}::{name}", function)
        return function

    return made
