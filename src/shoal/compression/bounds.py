"""Interval bounds: the smallest and largest value that each activation can have, for all inputs of a box.

The model is traced into a graph of its layers (torch.fx). Each operation maps bounds to bounds in float64. An
operation without a rule ends the proof for what depends on it: its result is unbounded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shoal.compression.shape import BATCH_NORMS, CONVOLUTIONS
from shoal.errors import ShoalError, describe_exception, error

ROUNDING = 1e-11
"""Bounds are widened by this share of the terms, which is more than float64 loses in a sum of 10,000 of them."""
AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, *AVERAGES)
PASSING = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Flatten)
RISING = (nn.ReLU, nn.ReLU6, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.Softplus, nn.ELU, nn.Hardtanh)
AVERAGE_FUNCTIONS = (F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d)
RISING_FUNCTIONS = (
    F.relu,
    torch.relu,
    F.relu6,
    torch.sigmoid,
    torch.tanh,
    F.max_pool1d,
    F.max_pool2d,
    *AVERAGE_FUNCTIONS,
    torch.flatten,
    F.leaky_relu,
)
"""`leaky_relu` and `ELU` only rise if their slopes do."""
RISING_METHODS = ("relu", "sigmoid", "tanh", "flatten", "contiguous", "squeeze", "unsqueeze")
RESHAPING_METHODS = ("view", "reshape")


@dataclass(frozen=True)
class Bounds:
    """Elementwise bounds of a batch of one sample, in float64."""

    low: Tensor
    high: Tensor

    def rising(self, act: Callable[[Tensor], Tensor]) -> Bounds:
        """Under a function that never falls."""
        return Bounds(act(self.low), act(self.high))

    def linear(self, act: Callable[[Tensor], Tensor], absolute: Callable[[Tensor], Tensor]) -> Bounds:
        """Under a linear map: `absolute` is the same map with absolute weights and without a bias."""
        middle, radius = act((self.low + self.high) / 2), absolute((self.high - self.low) / 2)
        terms = absolute(torch.maximum(self.low.abs(), self.high.abs()))  # large ones may cancel each other
        radius = radius + torch.where(radius > 0, ROUNDING * (middle.abs() + terms), 0.0)
        return Bounds(middle - radius, middle + radius)

    def outwards(self) -> Bounds:
        """Wider by what one operation may lose. What is the same everywhere stays so."""
        far = torch.full_like(self.low, torch.inf)
        apart = self.low < self.high
        return Bounds(
            torch.where(apart, self.low.nextafter(-far), self.low),
            torch.where(apart, self.high.nextafter(far), self.high),
        )


def trace(model: nn.Module) -> fx.GraphModule:
    """The graph of the model's layers. SH662 if it cannot be traced."""
    try:
        with torch.no_grad():
            return fx.symbolic_trace(model)
    except Exception as failure:
        what = describe_exception(failure)
        raise error("SH662", f"the model's code cannot be traced: {what}", where=type(model).__name__) from failure


class BoundsInterpreter(fx.Interpreter):
    """Runs a graph on bounds. `found` has the bounds of each node, `refused` the operations without a rule."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.found: dict[str, Bounds] = {}
        self.refused: dict[str, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        """An operation that fails on bounds has no rule for them."""
        try:
            if n.op != "output" and any(self.env[one] is None for one in n.all_input_nodes):
                raise error("SH662", "its input has no bounds")
            result = super().run_node(n)
        except ShoalError as failure:
            self.refused[n.name] = failure.message
            return None
        except Exception as failure:
            self.refused[n.name] = f"there are no bounds for {_name_of(n.target)}: {describe_exception(failure)}"
            return None
        if isinstance(result, Bounds):
            self.found[n.name] = result
        return result

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, values = self.fetch_attr(target), [*args, *kwargs.values()]
        if len(values) != 1 or not isinstance(values[0], Bounds):
            raise error("SH662", f"there are no bounds for a {type(layer).__name__} with other inputs")
        return module_bounds(layer, values[0])

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not _has_bounds((args, kwargs)):
            return super().call_function(target, args, kwargs)
        if not args and "input" in kwargs:
            args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
        if target in (operator.add, torch.add, operator.iadd) and len(args) == 2 and not kwargs:
            return _add(*args)
        if target in (torch.cat, torch.concat, torch.stack):
            return _joined(target, *args, **kwargs)
        if target in (F.dropout, F.dropout2d):
            return args[0]
        if target is getattr:
            return getattr(args[0].low, args[1])
        if target is F.leaky_relu and _slope(*args[1:], **kwargs) < 0:
            raise error("SH662", "there are no bounds for a leaky_relu that falls")
        if target in RISING_FUNCTIONS and not _has_bounds((args[1:], kwargs)):

            def act(x: Tensor) -> Any:
                return target(x, *args[1:], **kwargs)

            value: Bounds = args[0]
            return value.linear(act, act) if target in AVERAGE_FUNCTIONS else value.rising(act)
        return _no_rule(target)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        value, rest = args[0], args[1:]
        if not _has_bounds((args, kwargs)):
            return super().call_method(target, args, kwargs)
        if _has_bounds((rest, kwargs)):
            return _no_rule(target)
        if target == "size":
            return value.low.size(*rest)
        if target in RISING_METHODS or target in RESHAPING_METHODS:
            return value.rising(lambda x: getattr(x, target)(*rest, **kwargs))
        return _no_rule(target)


def _has_bounds(value: Any) -> bool:
    """Whether there are bounds anywhere in the arguments of a call."""
    if isinstance(value, dict):
        return any(map(_has_bounds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_bounds, value))
    return isinstance(value, Bounds)


def _add(left: Any, right: Any) -> Bounds:
    if not isinstance(left, Bounds):
        left, right = right, left
    if isinstance(right, Bounds):
        return Bounds(left.low + right.low, left.high + right.high).outwards()
    return left.rising(lambda x: x + right).outwards()  # type: ignore[no-any-return]


def _joined(act: Any, tensors: Any, dim: int = 0) -> Bounds:
    """Tensors side by side. The first dimension stays that of samples."""
    if not all(isinstance(one, Bounds) for one in tensors):
        raise error("SH662", f"there are no bounds for {act.__name__} with other tensors")
    low, high = act([one.low for one in tensors], dim), act([one.high for one in tensors], dim)
    if dim % low.dim() == 0:
        raise error("SH662", f"there are no bounds for {act.__name__} along the first dimension")
    return Bounds(low, high)


def _slope(negative_slope: float = 0.01, inplace: bool = False) -> float:
    return negative_slope


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", target))


def _no_rule(target: Any) -> Any:
    raise error("SH662", f"there are no bounds for {_name_of(target)}")


def module_bounds(layer: nn.Module, value: Bounds) -> Bounds:
    """The bounds of a layer's output. SH662 if there is no rule for this kind of layer."""
    if isinstance(layer, nn.Linear):
        weight, bias = layer.weight.double(), None if layer.bias is None else layer.bias.double()
        return value.linear(lambda x: F.linear(x, weight, bias), lambda x: F.linear(x, weight.abs()))
    if isinstance(layer, CONVOLUTIONS) and layer.padding_mode == "zeros":
        return _convolution_bounds(layer, value)
    if isinstance(layer, BATCH_NORMS) and layer.running_var is not None:
        return _batch_norm_bounds(layer, value)
    if isinstance(layer, nn.Flatten):
        return value.rising(layer)
    if isinstance(layer, PASSING):
        return value
    if isinstance(layer, AVERAGES):
        return value.linear(layer, layer)
    falls = getattr(layer, "negative_slope", 0) < 0 or getattr(layer, "alpha", 0) < 0
    if isinstance(layer, (*POOLS, *RISING)) and not getattr(layer, "return_indices", False) and not falls:
        return value.rising(layer)
    raise error("SH662", f"there are no bounds for a {type(layer).__name__}")


def _convolution_bounds(layer: Any, value: Bounds) -> Bounds:
    weight, bias = layer.weight.double(), None if layer.bias is None else layer.bias.double()
    run: Any = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[weight.dim() - 2]
    how = (layer.stride, layer.padding, layer.dilation, layer.groups)
    return value.linear(lambda x: run(x, weight, bias, *how), lambda x: run(x, weight.abs(), None, *how))


def _batch_norm_bounds(layer: Any, value: Bounds) -> Bounds:
    shape = (1, -1, *(1 for _ in value.low.shape[2:]))
    scale = (layer.running_var.double() + layer.eps).rsqrt()
    shift = -layer.running_mean.double() * scale
    if layer.affine:
        scale, shift = scale * layer.weight.double(), shift * layer.weight.double() + layer.bias.double()
    return value.linear(
        lambda x: x * scale.reshape(shape) + shift.reshape(shape), lambda x: x * scale.abs().reshape(shape)
    )


@torch.no_grad()
def propagate(graph: fx.GraphModule, box: Bounds) -> BoundsInterpreter:
    """Bounds of every node for inputs in the box. The model must be in evaluation mode."""
    interpreter = BoundsInterpreter(graph)
    interpreter.run(box)
    return interpreter
