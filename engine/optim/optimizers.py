"""Builds the optimizer over the master weights, from the config or from the user's optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...ops.config import Ops
from ...ops.libraries import load, optimizer_library
from ...ops.optim.shard_optimizer import ShardOptimizer
from ...utils.arguments import wrong
from ...utils.errors import UsageError
from ...zero.model.update import Updater
from .shape_seeing import refusal_text, sees_shapes, warning_text
from .trial import has_fused, try_optimizer

log = logging.getLogger("xds")

Named = dict[str, Any]
ClientOptimizer = (
    torch.optim.Optimizer | type[torch.optim.Optimizer] | Callable[[Any], torch.optim.Optimizer]
)

# elementwise arithmetic: a step on a shard equals that part of a step on the whole tensor
ELEMENTWISE = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# xds's optimizers by the type in the config, and their modules in ops/optim, loaded on first use
OWN = {
    "Adam": "adam",
    "AdamW": "adam",
    "Lamb": "lamb",
    "Lion": "lion",
    "Muon": "muon",
    "OneBitAdam": "one_bit_adam",
    "OneBitLamb": "one_bit_lamb",
}
# torch's own classes are used where nothing is cast and torch has a fused kernel for the masters' devices
ONE_PASS = {"Adagrad": "adagrad", "SGD": "sgd"}
NOT_FOR_MUON = ("embed", "lm_head")
ENGINE_FLAGS = ("torch_adam", "fused", "foreach", "amsgrad", "fp32_optimizer_states")


def own_class(name: str, params: Named) -> type[ShardOptimizer] | None:
    """xds's class for an optimizer of a config; None: torch's is used. amsgrad is torch's alone."""
    if name in ("Adam", "AdamW") and params.get("amsgrad"):
        return None
    module = (OWN | ONE_PASS).get(name)
    if module is None:
        return None
    loaded = import_module(f"...ops.optim.{module}", __package__)
    found: type[ShardOptimizer] = getattr(loaded, "Adam" if name == "AdamW" else name)
    return found


class OptimizerSection(Protocol):
    """The config's section `optimizer`."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Groups:
    """The parameter groups: `options[i]` holds the hyperparameters of group i; `index[id(param)]` is i."""

    options: tuple[Named, ...]
    index: dict[int, int]


_GROUPS = 'parameters of the model, or dicts with the key "params" that hold some'


def read_groups(model: nn.Module, source: Iterable[Any] | None) -> Groups:
    """The parameter groups in `source`: parameters, or dicts of them; None means every trainable parameter.

    Raises:
        UsageError: a parameter is in two groups, or does not belong to the model.
    """
    if source is not None and not isinstance(source, Iterable):
        raise wrong("model_parameters", source, _GROUPS)
    entries = list(model.parameters() if source is None else source)
    if entries and not isinstance(entries[0], dict):
        named = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        entries = [{"params": named}]
    own = {id(param): name for name, param in model.named_parameters()}
    options: list[Named] = []
    index: dict[int, int] = {}
    problems: list[str] = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or "params" not in entry:
            raise wrong(f"model_parameters, group {number}", entry, _GROUPS)
        params = entry["params"]
        params = [params] if isinstance(params, Tensor) else list(params)
        options.append({key: value for key, value in entry.items() if key != "params"})
        for param in params:
            if not isinstance(param, Tensor):
                raise wrong(f"model_parameters, group {number}", param, _GROUPS)
            if id(param) not in own:
                problems.append(
                    f"parameter group {number} holds a tensor of shape {tuple(param.shape)} that is not a "
                    "parameter of the model"
                )
            elif index.setdefault(id(param), number) != number:
                problems.append(
                    f"{own[id(param)]} is in parameter groups {index[id(param)]} and {number}: "
                    "leave it in one"
                )
    if problems:
        raise UsageError("; ".join(problems[:5]))
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    return Groups(tuple(options), {key: at for key, at in index.items() if key in trained})


def split_for_muon(model: nn.Module, groups: Groups) -> Groups:
    """Split every group in two: matrices, which Muon updates, and the rest, which AdamW updates.

    As in DeepSpeed, a matrix is a parameter of two or more dimensions whose name does not contain one of
    `NOT_FOR_MUON` (embeddings and the head).
    """
    matrices = {
        id(param)
        for name, param in model.named_parameters()
        if param.dim() >= 2 and not any(word in name.lower() for word in NOT_FOR_MUON)
    }
    options: list[Named] = []
    for entry in groups.options:
        options += [{**entry, "use_muon": True}, {**entry, "use_muon": False}]
    index = {key: 2 * at + (0 if key in matrices else 1) for key, at in groups.index.items()}
    return Groups(tuple(options), index)


def named_optimizer(
    section: OptimizerSection, updater: Updater, groups: Groups, **more: Any
) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the master weights. more: arguments of one of xds's own."""
    params = {k: v for k, v in section.params.items() if k not in ENGINE_FLAGS}
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    own = own_class(section.type, section.params)
    if own is not None and section.type in OWN:
        if section.type in ("Adam", "AdamW"):
            params.setdefault("adam_w_mode", True)
        return own(_entries(updater, groups), **params, **more)
    kind = getattr(torch.optim, section.type)
    if own is not None:
        places = {(master.raw.device, master.raw.dtype) for master in updater.masters}
        if updater.casts or not all(has_fused(kind, *place) for place in places):
            return own(_entries(updater, groups), **params)
        params["fused"] = True
    try_optimizer(kind, params)
    return _over(kind, updater, groups, f'optimizer.type = "{section.type}"', params)


def client_optimizer(
    given: ClientOptimizer, updater: Updater, groups: Groups, *, allow_untested: bool
) -> torch.optim.Optimizer:
    """The user's optimizer over the master weights.

    An optimizer object is changed in place; a class or another callable is called.
    """
    if not isinstance(given, torch.optim.Optimizer):
        if isinstance(given, type):
            return _over(given, updater, groups, given.__name__, {}, allow_untested)
        if not callable(given):
            raise wrong(
                "optimizer", given, "an optimizer, its class, or a callable that gets groups"
            )
        built: torch.optim.Optimizer = given(_entries(updater, groups))
        if not sees_shapes(type(built)):
            _check_slices(type(built), updater, type(built).__name__, allow_untested)
            return built
        given = built
    name = type(given).__name__
    if any(float(state.get("step", 1)) for state in given.state.values()):
        raise UsageError(
            f"the optimizer {name} has already taken steps: its state cannot be sharded afterwards; "
            "pass it before its first step"
        )
    tensors_of = _layout_for(type(given), updater, name, allow_untested)
    for number, group in enumerate(given.param_groups):
        group["params"] = tensors_of(number)
    if type(given) is torch.optim.Adagrad:  # it creates its state in the constructor
        given.state = torch.optim.Adagrad(given.param_groups).state
    return given


def load_kernels(
    section: Ops, optimizer: torch.optim.Optimizer, updater: Updater, device: torch.device
) -> None:
    """Build and load the kernels that the optimizer uses: the device's, and the host's where updates run there.

    Without kernels it runs plain torch.

    Raises:
        BuildError: the kernels cannot be built, and ops.require is true.
        UsageError: this device has no kernels, and ops.require is true.
    """
    gains = isinstance(optimizer, ShardOptimizer) and optimizer.gains_from_kernels(
        casts=updater.casts
    )
    if section.require and not optimizer_library(device):
        raise UsageError(
            f"ops.require = true, but there are no native ops for {device.type}: they exist for cpu and cuda; "
            "set it to false, and ops run their torch versions"
        )
    devices = [device] if updater.homes.host is None else [device, torch.device("cpu")]
    names = {optimizer_library(one) for one in devices} - {""}
    for name in sorted(names) if section.native and (gains or section.require) else ():
        load(name, require=section.require)


def _over(
    kind: type[torch.optim.Optimizer],
    updater: Updater,
    groups: Groups,
    name: str,
    params: Named,
    allow_untested: bool = False,
) -> torch.optim.Optimizer:
    tensors_of = _layout_for(kind, updater, name, allow_untested)
    entries = [{"params": tensors_of(at), **options} for at, options in enumerate(groups.options)]
    return kind(entries, **params)


def _layout_for(
    kind: type[torch.optim.Optimizer], updater: Updater, name: str, allow_untested: bool
) -> Callable[[int], list[Tensor]]:
    """Flat shards for elementwise arithmetic, whole parameters where nothing is sharded."""
    _check_slices(kind, updater, name, allow_untested)
    is_cut = updater.world.is_sharded or updater.has_slices
    if allow_untested and is_cut and sees_shapes(kind) and updater.world.collectives.rank == 0:
        log.warning(warning_text(name))
    if issubclass(kind, ShardOptimizer):
        return updater.optimizer_tensors.tensors_of
    if updater.world.is_alone:
        return (
            updater.optimizer_tensors.whole_params
        )  # the tensors plain torch would get: bit-identical results
    if kind in ELEMENTWISE:
        return updater.optimizer_tensors.tensors_of
    if not updater.world.is_sharded:
        return updater.optimizer_tensors.whole_params
    if allow_untested:
        return updater.optimizer_tensors.tensors_of
    raise UsageError(refusal_text(name, _elementwise_names()))


def _check_slices(
    kind: type[torch.optim.Optimizer], updater: Updater, name: str, allow_untested: bool
) -> None:
    """
    Raises:
        UsageError: an update may depend on the whole parameter, and tensor ranks have slices of it.
    """
    is_own = issubclass(kind, ShardOptimizer)
    is_elementwise = kind in ELEMENTWISE or (
        issubclass(kind, ShardOptimizer) and kind.is_elementwise
    )
    if is_elementwise or (allow_untested and not is_own) or not updater.has_slices:
        return
    hint = (
        ""
        if is_own
        else ", or set zero_allow_untested_optimizer to true if its arithmetic is per element"
    )
    raise UsageError(
        f"{name}: this optimizer may use norms or the shape of a whole parameter, and tensor_parallel.tp_size "
        f"> 1 cuts it; use one of {_elementwise_names()} or Lion, set tp_size to 1{hint}"
    )


def _elementwise_names() -> str:
    return ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))


def _entries(updater: Updater, groups: Groups) -> list[Named]:
    return [
        {"params": updater.optimizer_tensors.tensors_of(at), **options}
        for at, options in enumerate(groups.options)
    ]
