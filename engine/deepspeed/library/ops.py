"""`deepspeed.ops`: optimizers by DeepSpeed's names over xds's own, and which ops have a counterpart here.

An optimizer steps alone, in a plain loop, or is passed to `initialize(optimizer=...)`. FusedAdam and
DeepSpeedCPUAdam are the same here: the engine updates flat shards on the device where they are stored. So are
FusedLion and DeepSpeedCPULion.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ....ops.kernels.adagrad import adagrad_
from ....ops.kernels.adam import adam_
from ....ops.kernels.lamb import lamb_apply_, lamb_direction_
from ....ops.kernels.lion import lion_
from ....ops.optim.adagrad import Adagrad
from ....ops.optim.adam import Adam
from ....ops.optim.lamb import Lamb, clamped
from ....ops.optim.lion import Lion
from ....ops.optim.shard_optimizer import ShardOptimizer
from ....utils.errors import UsageError
from ..errors import raises_theirs

States = dict[str, Tensor]


class StepsAlone(ShardOptimizer):
    """A base class: `step` updates whole parameters until an engine has the optimizer."""

    state_names: tuple[str, ...] = ()  # of a parameter's size
    takes_sparse = False
    fp32_optimizer_states = True  # without an engine; else the states have the parameter's dtype

    @abstractmethod
    def update_whole(
        self, values: Tensor, grad: Tensor, states: States, step: Tensor, group: dict[str, Any]
    ) -> None:
        """Update `values` and `states`, [n] fp32, of one parameter in place. grad: [n]; step: [] fp32."""

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        kept = getattr(self, "set_grad_none", True)
        super().zero_grad(kept if set_to_none is None else set_to_none)

    @raises_theirs
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter that has a gradient. With an engine: counts for torch's schedules only.

        Returns:
            The result of `closure`, if it is given and no engine has the optimizer.
        """
        if self.is_bound:
            super().step(closure)
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        self._step_whole(param, group)
        return loss

    def _step_whole(self, param: Tensor, group: dict[str, Any]) -> None:
        grad = param.grad
        assert grad is not None
        if grad.is_sparse:
            if not self.takes_sparse:
                raise UsageError(
                    f"{type(self).__name__}: a parameter of shape {tuple(param.shape)} has a sparse gradient: "
                    "needs a dense one; use torch.optim.SparseAdam, or sparse=False in the embedding"
                )
            grad = grad.to_dense()
        state = self.state[param]
        if not state:
            dtype = torch.float32 if self.fp32_optimizer_states else param.dtype
            state["step"] = int(group.get("step", 0))
            for name in self.state_names:
                state[name] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        state["step"] += 1
        values = _wide(param.detach())
        states = {name: _wide(state[name]) for name in self.state_names}
        number = torch.full((), float(state["step"]), dtype=torch.float32, device=param.device)
        self.update_whole(values, grad.reshape(-1), states, number, group)
        _write_back(values, param)
        for name, value in states.items():
            _write_back(value, state[name])


def _wide(tensor: Tensor) -> Tensor:
    """The elements as [n] fp32; the tensor's own memory where it has that form."""
    return tensor.to(torch.float32).reshape(-1)


def _write_back(values: Tensor, tensor: Tensor) -> None:
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values.view(tensor.shape))


# -- one update of whole parameters -----------------------------------------------------------------------


def _adam(
    self: Any, values: Tensor, grad: Tensor, states: States, step: Tensor, group: Any
) -> None:
    mean, square, rates = (
        states["exp_avg"],
        states["exp_avg_sq"],
        (group["eps"], group["weight_decay"]),
    )
    modes = (self.adam_w_mode, bool(group["bias_correction"]))
    lr = float(group["lr"])
    adam_(values, grad, mean, square, None, step, None, None, lr, *group["betas"], *rates, *modes)


def _adagrad(
    self: Any, values: Tensor, grad: Tensor, states: States, step: Tensor, group: Any
) -> None:
    rates = (float(group["lr"]), group["lr_decay"], group["eps"], group["weight_decay"])
    adagrad_(values, grad, states["exp_avg_sq"], None, step, None, None, *rates)


def _lion(
    self: Any, values: Tensor, grad: Tensor, states: States, step: Tensor, group: Any
) -> None:
    rates = (float(group["lr"]), *group["betas"], group["weight_decay"])
    lion_(values, grad, states["exp_avg"], None, None, None, *rates)


def _lamb(
    self: Any, values: Tensor, grad: Tensor, states: States, step: Tensor, group: Any
) -> None:
    bounds = torch.tensor([0, values.numel()], device=values.device)
    norms = torch.zeros(1, 2, dtype=torch.float64, device=values.device)
    direction = torch.empty_like(values)
    mean, square = states["exp_avg"], states["exp_avg_sq"]
    rates = (*group["betas"], group["eps"], group["weight_decay"], group["bias_correction"])
    lamb_direction_(values, grad, mean, square, direction, norms, bounds, step, None, None, *rates)
    rate = float(group["lr"]) * clamped(norms[0].tolist(), group)
    factor = torch.tensor([rate], dtype=torch.float32, device=values.device)
    lamb_apply_(values, direction, None, bounds, factor, None)


# -- DeepSpeed's classes ----------------------------------------------------------------------------------

_ADAM = ("exp_avg", "exp_avg_sq")
_BETAS = (0.9, 0.999)


def _class(
    name: str,
    base: Any,
    arguments: Mapping[str, Any],
    **attributes: Any,
) -> Any:
    """DeepSpeed's class `name` over `base`.

    Args:
        arguments: DeepSpeed's arguments after the parameters, in their order, with their defaults. Those that
            `base` has too go to it; `adamw_mode` is its adam_w_mode. `amsgrad`, `eps_inside_sqrt` and
            `max_grad_norm` are refused; the others are attributes.
    """
    first = "params" if name.startswith("Fused") else "model_params"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [inspect.Parameter(key, kind, default=value) for key, value in arguments.items()]
    signature = inspect.Signature([inspect.Parameter(first, kind), *own])
    taken = inspect.signature(base.__init__).parameters

    @raises_theirs
    def init(self: Any, *args: Any, **options: Any) -> None:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        given = dict(bound.arguments)
        params = given.pop(first)
        for key in ("amsgrad", "eps_inside_sqrt", "max_grad_norm"):
            value = given.pop(key, None)
            if value:
                raise UsageError(f"{name}({key}={value}): not supported; {_REMEDIES[key]}")
        passed = {_RENAMED.get(key, key): value for key, value in given.items()}
        for key in [key for key in passed if key not in taken]:
            setattr(self, key, passed.pop(key))
        base.__init__(self, params, **passed)

    def is_instance(cls: type, other: type) -> Any:
        """The optimizer that the engine makes is an instance of DeepSpeed's classes."""
        return True if other is base else NotImplemented

    inside = {
        "__init__": init,
        "__signature__": signature,
        "__subclasshook__": classmethod(is_instance),
        "__module__": __name__,
        "__doc__": f"xds's {base.__name__} with DeepSpeed's arguments.",
        **attributes,
    }
    return type(base)(name, (StepsAlone, base), inside)


_RENAMED = {"adamw_mode": "adam_w_mode"}
_REMEDIES = {
    "amsgrad": "pass torch.optim.AdamW(amsgrad=True)",
    "eps_inside_sqrt": "leave it out",
    "max_grad_norm": "leave it out and set gradient_clipping in the config",
}

FusedAdam = _class(
    "FusedAdam",
    Adam,
    {
        **{"lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8},
        **{"adam_w_mode": True, "weight_decay": 0.0, "amsgrad": False, "set_grad_none": True},
    },
    kind="Adam",
    state_names=_ADAM,
    update_whole=_adam,
    fp32_optimizer_states=False,
)
DeepSpeedCPUAdam = _class(
    "DeepSpeedCPUAdam",
    Adam,
    {
        **{"lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8, "weight_decay": 0.0},
        **{"amsgrad": False, "adamw_mode": True, "fp32_optimizer_states": True},
    },
    kind="Adam",
    state_names=_ADAM,
    update_whole=_adam,
)
FusedLamb = _class(
    "FusedLamb",
    Lamb,
    {
        **{"lr": 1e-3, "bias_correction": True, "betas": _BETAS, "eps": 1e-8},
        **{"eps_inside_sqrt": False, "weight_decay": 0.0, "max_grad_norm": 0.0},
        **{"max_coeff": 10.0, "min_coeff": 0.01, "amsgrad": False},
    },
    kind="Lamb",
    state_names=_ADAM,
    update_whole=_lamb,
)
FusedLion = _class(
    "FusedLion",
    Lion,
    {"lr": 1e-3, "betas": _BETAS, "weight_decay": 0.0, "set_grad_none": True},
    kind="Lion",
    state_names=("exp_avg",),
    update_whole=_lion,
    fp32_optimizer_states=False,
)
DeepSpeedCPULion = _class(
    "DeepSpeedCPULion",
    Lion,
    {"lr": 1e-3, "betas": _BETAS, "weight_decay": 0.0, "fp32_optimizer_states": True},
    kind="Lion",
    state_names=("exp_avg",),
    update_whole=_lion,
)
DeepSpeedCPUAdagrad = _class(
    "DeepSpeedCPUAdagrad",
    Adagrad,
    {
        **{"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0, "amsgrad": False},
        "fp32_optimizer_states": True,
    },
    kind="Adagrad",
    state_names=("exp_avg_sq",),
    update_whole=_adagrad,
    takes_sparse=True,
)

# -- builders of ops --------------------------------------------------------------------------------------

_OPS = {  # the part of the class name before "Builder" -> the op
    "CPUAdagrad": "cpu_adagrad",
    "CPUAdam": "cpu_adam",
    "CPULion": "cpu_lion",
    "FusedAdam": "fused_adam",
    "FusedLamb": "fused_lamb",
    "FusedLion": "fused_lion",
    "Utils": "utils",
}


class OpBuilder:
    """One op of DeepSpeed by name. NAME: its key in `ALL_OPS` and `__compatible_ops__`."""

    NAME = ""

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether xds has the optimizer or function of this op."""
        return self.name in _OPS.values()

    @staticmethod
    def is_rocm_pytorch() -> bool:
        return torch.version.hip is not None

    @raises_theirs
    def load(self, verbose: bool = False) -> Any:
        """
        Raises:
            UsageError: in any case.
        """
        raise UsageError(
            f"{type(self).__name__}.load(): the op {self.name!r} is not covered: xds builds its own ops, on "
            "first use; use the optimizer, such as deepspeed.ops.adam.DeepSpeedCPUAdam"
        )

    jit_load = builder = load


class CUDAOpBuilder(OpBuilder):
    """The base of the ops that DeepSpeed has for GPUs only."""


def _builder(title: str, op: str) -> type[OpBuilder]:
    return type(f"{title}Builder", (OpBuilder,), {"NAME": op, "__module__": __name__})


CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder, FusedLambBuilder, *_others = (
    _builder(title, op) for title, op in _OPS.items()
)
FusedLionBuilder, UtilsBuilder = _others
AsyncIOBuilder = _builder("AsyncIO", "async_io")
ALL_OPS: dict[str, OpBuilder] = {
    kind.NAME: kind()
    for kind in (
        *(CPUAdagradBuilder, CPUAdamBuilder, CPULionBuilder, FusedAdamBuilder, FusedLambBuilder),
        *(FusedLionBuilder, UtilsBuilder, AsyncIOBuilder),
    )
}
COMPATIBLE_OPS = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
