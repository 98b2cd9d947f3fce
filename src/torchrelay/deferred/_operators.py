"""Properties of operations that recording and replay depend on, looked up once per overload.

Two operations are defined here: initialisers whose control flow depends on values are recorded as
one operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrelay import _torch

__all__ = ["Operator", "constant", "describe", "is_plain_normal", "trunc_normal"]

aten = torch.ops.aten

# In-place operations that leave nothing of what was there before.
_FILLS = {
    "aten::zero_", "aten::fill_.Scalar", "aten::fill_.Tensor", "aten::copy_", "aten::normal_",
    "aten::uniform_", "aten::bernoulli_.float", "aten::bernoulli_.Tensor", "aten::exponential_",
    "aten::log_normal_", "aten::cauchy_", "aten::geometric_", "aten::random_", "aten::random_.from",
    "aten::random_.to",
}  # fmt: skip

# In-place operations with one tensor, whose result has its shape and dtype.
_SIMPLE = _FILLS - {"aten::copy_", "aten::fill_.Tensor", "aten::bernoulli_.Tensor"} | {
    "aten::mul_.Scalar", "aten::div_.Scalar", "aten::add_.Scalar", "aten::sub_.Scalar",
    "aten::erfinv_", "aten::clamp_", "aten::clamp_min_", "aten::clamp_max_", "aten::neg_",
    "aten::exp_", "aten::log_", "aten::mul_.Tensor", "aten::div_.Tensor", "aten::add_.Tensor",
    "aten::sub_.Tensor", "aten::sqrt_", "aten::abs_", "aten::tanh_", "aten::sigmoid_", "aten::cos_",
    "aten::sin_",
}  # fmt: skip

# Factories whose first argument is the size, and whose result is contiguous.
_SIZED = {
    "aten::empty.memory_format", "aten::zeros", "aten::ones", "aten::full", "aten::rand",
    "aten::randn",
}  # fmt: skip

# Of the operations that are executed in a way of their own.
_KINDS = {
    **dict.fromkeys(_SIMPLE, "simple"),
    **dict.fromkeys(_SIZED, "sized"),
    "aten::_local_scalar_dense": "number",
    "aten::detach": "detach",
    "aten::new_empty": "new_empty",
    "aten::lift": "lift",
    "aten::lift_fresh": "lift",
}

# Operations without a tensor argument are factories; so are these, whose argument only lends its
# attributes.
_LIKE = {
    "empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros",
}  # fmt: skip

# Overloads that take a generator, for those that do not.
_WITH_GENERATOR = {
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
    aten.rand_like.default: aten.rand_like.generator,
    aten.randn_like.default: aten.randn_like.generator,
    aten.randint_like.default: aten.randint_like.generator,
    aten.randint_like.low_dtype: aten.randint_like.low_generator_dtype,
}


# Elementwise operations by IEEE arithmetic or by comparison: an element's result does not depend on
# its place.
_ELEMENTWISE = {
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "clamp", "clamp_max", "clamp_min",
    "clone", "copy_", "div", "eq", "fill", "ge", "gt", "le", "logical_and", "logical_not",
    "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "reciprocal",
    "relu", "rsub", "sign", "sqrt", "sub", "where", "_to_copy",
}  # fmt: skip
# By approximation: checked before use, see parts.
_APPROXIMATED = {"cos", "erf", "erfinv", "exp", "expm1", "log", "log1p", "sin", "tanh"}
_OF_TORCH = ("aten", "prims", "prim", "c10d", "_c10d_functional", "torchrelay")
_VIEWS = ("aten::_unsafe_view", "aten::lift_fresh", "aten::lift")
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclass(frozen=True)
class Operator:
    """Properties of one overload.

    Attributes:
        name: ``aten::add_.Tensor``.
        kind: how it is executed: "simple", in place, on one tensor, keeping its shape and dtype;
            "pure", its one result is a new tensor, which its arguments alone decide; "number", it
            returns a number that is in its argument; "sized", a factory of a contiguous tensor;
            "composite", by a decomposition into simpler operations; "detach", "new_empty", "lift";
            or as any other.
        is_view: the result is a region of its first tensor argument's storage.
        is_factory: its result depends on no tensor's values.
        changes_shape: in place, and what changes is how the tensor sees its storage (``t_``).
        fills: overwrites its first argument without reading it.
        draws: takes random numbers, or may do so.
        with_generator: the overload to call to give it a generator, or None.
        written: positions and names of the arguments it writes.
        slices: elementwise, and an element's bits do not depend on where it lies.
        approximates: elementwise, by a method that may depend on where an element lies.
        creates: it has results that are no alias of an argument.
        needs_values: its result, or the shape of it, depends on values.
        takes_dtype, takes_device: it has an argument of that name.
    """

    name: str
    kind: str = "any"
    is_view: bool = False
    is_factory: bool = False
    changes_shape: bool = False
    fills: bool = False
    draws: bool = False
    with_generator: Any = None
    written: tuple[int | str, ...] = ()
    slices: bool = False
    approximates: bool = False
    creates: bool = False
    needs_values: bool = False
    takes_dtype: bool = False
    takes_device: bool = False


# No normal number that the CPU generator makes is further from the mean than this many standard
# deviations: it takes the logarithm of a number of 24 bits (53 for float64), the smallest of which
# gives 5.8 (8.6).
_FARTHEST = {torch.float64: 9.0}
_FARTHEST_ELSE = 6.0


def trunc_normal(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, *, generator: Any = None
) -> torch.Tensor:
    """Call ``nn.init.trunc_normal_``, which redraws until no number is outside ``[a, b]``."""
    return _torch.trunc_normal(tensor, mean, std, a, b, generator)


def is_plain_normal(dtype: torch.dtype, mean: float, std: float, a: float, b: float) -> bool:
    """Return whether no number can fall outside ``[a, b]``, so that nothing is redrawn."""
    reach = _FARTHEST.get(dtype, _FARTHEST_ELSE) * std
    return a < mean - reach and mean + reach < b


def constant(value: torch.Tensor) -> torch.Tensor:
    """Return values that were known when recorded: ``torch.tensor([1, 2])``."""
    return value


_described: list[Any] = []  # so that their ids stay theirs
_known: dict[int, Operator] = {
    id(constant): Operator(name="torchrelay::constant", creates=True),
    id(trunc_normal): Operator(
        name="torchrelay::trunc_normal",
        fills=True,
        draws=True,
        with_generator=trunc_normal,
        written=(0,),
    ),
}


def describe(func: Any) -> Operator:
    """Return the properties of ``func``, an ``OpOverload`` or an operation of this module."""
    key = id(func)  # an overload's hash is computed in Python
    found = _known.get(key)
    if found is None:
        _described.append(func)
        found = _known[key] = _describe(func)
    return found


def _describe(func: Any) -> Operator:
    schema, name, tags = func._schema, func.name(), set(func.tags)
    arguments = schema.arguments
    named = {argument.name for argument in arguments}
    tensors = sum("Tensor" in str(argument.type) for argument in arguments)
    base = schema.name.removeprefix("aten::")
    out_of_place = base if base == "copy_" else base.removesuffix("_")
    operator = Operator(
        name=name,
        is_view=func.is_view or name in _VIEWS,
        is_factory=tensors == 0 or (tensors == 1 and base in _LIKE),
        changes_shape=torch.Tag.inplace_view in tags,
        fills=name in _FILLS,
        # Operators of others need not declare that they draw.
        draws="generator" in named
        or torch.Tag.nondeterministic_seeded in tags
        or func.namespace not in _OF_TORCH,
        with_generator=func if "generator" in named else _WITH_GENERATOR.get(func),
        written=tuple(
            argument.name if argument.kwarg_only else position
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
        slices=out_of_place in _ELEMENTWISE | _APPROXIMATED and not name.endswith((".out", "_out")),
        approximates=out_of_place in _APPROXIMATED,
        creates=any(result.alias_info is None for result in schema.returns),
        needs_values=bool(tags & _BY_VALUE),
        takes_dtype="dtype" in named,
        takes_device="device" in named,
    )
    return replace(operator, kind=_KINDS.get(name) or _kind_of(func, operator))


def _kind_of(func: Any, operator: Operator) -> str:
    if func._can_decompose() and func.has_kernel_for_dispatch_key(
        torch._C.DispatchKey.CompositeImplicitAutograd
    ):
        return "composite"
    special = (
        operator.is_view
        or operator.is_factory
        or operator.changes_shape
        or operator.written
        or operator.draws
        or operator.needs_values
        or operator.name.startswith("aten::quantize")
    )
    makes_one = [str(result.type) for result in func._schema.returns] == ["Tensor"]
    is_pure = func.namespace == "aten" and operator.creates and makes_one and not special
    return "pure" if is_pure else "any"
