"""An optimizer that is made for the whole model on the meta device, and then bound to this rank's shards.

The code that makes it sees the whole model: all modules, names and shapes. So the groups are the same for every
sharding, and so is the order in which a checkpoint of a single process numbers the optimizer's state.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shoal.errors import error
from shoal.lanes.elementwise import is_known_elementwise
from shoal.spec.job import ELEMENTWISE_OPTIMIZERS


class OptimizerFactory:
    """Made from an optimizer of the whole model. SH110 if it is not elementwise, or has parameters of no module."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        _check_elementwise(type(optimizer))
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if any(id(p) not in names for group in optimizer.param_groups for p in group["params"]):
            fix = "Make it a part of the model, or use `shard: none`."
            raise error("SH110", "the optimizer has a parameter that is none of the model's", where="task", fix=fix)
        self._optimizer = optimizer
        self._groups = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    @property
    def param_order(self) -> list[str]:
        """The parameters' names in the order in which the optimizer numbers them."""
        return [name for names in self._groups for name in names]

    def rebind(self, param_module: nn.Module) -> Optimizer:
        """Bind the optimizer itself to these parameters."""
        made = self.make_another(param_module)
        for own, other in zip(self._optimizer.param_groups, made.param_groups, strict=True):
            own["params"] = other["params"]
        self._optimizer.state = made.state
        return self._optimizer

    def make_another(self, param_module: nn.Module) -> Optimizer:
        """Another optimizer with the same settings and groups, which may be empty."""
        original, local = self._optimizer, dict(param_module.named_parameters())
        groups = [
            {**group, "params": [local[name] for name in names if name in local]}
            for group, names in zip(original.param_groups, self._groups, strict=True)
        ]
        kind: Any = type(original)
        takes = inspect.signature(kind).parameters
        made: Optimizer = kind(groups, **{key: value for key, value in original.defaults.items() if key in takes})
        made._optimizer_step_pre_hooks = original._optimizer_step_pre_hooks
        made._optimizer_step_post_hooks = original._optimizer_step_post_hooks
        return made


def _check_elementwise(kind: type[Optimizer]) -> None:
    if is_known_elementwise(kind):
        return
    message = f"workers hold parts of tensors, and the Task's optimizer {kind.__name__} may need whole ones"
    fix = f"Use one of {', '.join(ELEMENTWISE_OPTIMIZERS)} of torch.optim; or `shard: none`, where others work too."
    raise error("SH110", message, where="task", fix=fix)
