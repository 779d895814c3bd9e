"""Builds the optimizer over the master weights, from the config or from the user's optimizer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...compression.config import ONE_BIT_OPTIMIZERS
from ...ops.config import Ops
from ...ops.device import device_of, with_native_ops
from ...ops.libraries import NativeOpsWarning, load, optimizer_library
from ...ops.optim.config import REGISTERED
from ...ops.optim.shard_optimizer import ShardOptimizer
from ...utils.arguments import needed_arguments, wrong
from ...utils.errors import UsageError, XdsError
from ...zero.model.update import Updater
from ..config.optimizer import OPTIMIZERS

# -- trials of torch's optimizers and schedules on one number, before they are used ----------------------
# torch checks their parameters in the constructor, in the first step, or not at all. Its errors name neither
# the section of the config nor the class.


def try_optimizer(kind: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> None:
    """One step of `kind` with `params`.

    Raises:
        UsageError: it fails; names optimizer.params and torch's reason.
    """

    def one_step() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = kind([weight], **params)
        weight.grad = torch.ones(1)
        optimizer.step()
        if not torch.isfinite(weight).all():
            raise ValueError("the first step gives a weight that is not finite")

    _try("optimizer", kind.__name__, params, one_step)


def has_fused(kind: type[torch.optim.Optimizer], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's fused kernel of `kind` updates tensors of `dtype` on `device`.

    One step asks. torch's tables do not agree: 2.11 has a GPU kernel of Adagrad, and its class refuses it.
    """
    weight = torch.zeros(1, device=device, dtype=dtype, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    params: dict[str, Any] = {"fused": True}
    try:
        kind([weight], **params).step()
    except RuntimeError:
        return False
    return True


def try_schedule(make: Callable[[torch.optim.Optimizer], Any], name: str, params: Any) -> None:
    """Two steps of the schedule that `make` builds. Raises UsageError like `try_optimizer`."""

    def two_steps() -> None:
        weight = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        schedule = make(optimizer)
        for _ in range(2):
            optimizer.step()
            schedule.step()

    _try("scheduler", name, params, two_steps)


def _try(section: str, name: str, params: Any, trial: Callable[[], None]) -> None:
    try:
        trial()
    except XdsError:
        raise
    except Exception as error:
        raise UsageError(
            f"{section}.params = {dict(params)!r} for {name}: torch refuses them with {type(error).__name__}: "
            f"{error}; see the documentation of torch's {name}"
        ) from None


# -- optimizers whose update is not per element: on flat shards their numbers differ from plain torch's
# `zero_allow_untested_optimizer` lets any optimizer step on shards. transformers and accelerate set it for
# every optimizer, so it does not mean that somebody looked at this one. These are known to be wrong there.

# by the names of their classes: they come from libraries that may not be installed
SHAPE_SEEING = frozenset(
    "Adafactor AdaFactor CAME SM3 AdaLomo "  # factors of rows and columns
    "Lamb LAMB FusedLAMB FusedMixedPrecisionLamb Lars LARS NovoGrad FusedNovoGrad "  # norms of a parameter
    "AdamP SGDP Fromage StableAdamW StableAdamWUnfused AdamMini Adam_mini Adalite "
    "Shampoo ScalableShampoo DistributedShampoo SOAP PSGD KFAC "  # products of a matrix with itself
    "Muon MuonWithAuxAdam SingleDeviceMuon SingleDeviceMuonWithAuxAdam AdaMuon MuonClip Dion Scion "
    "GaLoreAdamW GaLoreAdamW8bit GaLoreAdafactor APOLLOAdamW QAPOLLOAdamW".split()  # projections
)


def sees_shapes(kind: type[torch.optim.Optimizer]) -> bool:
    """`kind`, or a class that it is made from, has a name in `SHAPE_SEEING`, and is not one of xds's own."""
    if issubclass(kind, ShardOptimizer):  # these get the shapes and the other ranks' parts
        return False
    return any(base.__name__ in SHAPE_SEEING for base in kind.__mro__)


def _check_step(kind: type[torch.optim.Optimizer]) -> None:
    """
    Raises:
        UsageError: the engine cannot step optimizers of this class.
    """
    is_torchs = kind.__module__.startswith("torch.optim.")
    reason = OPTIMIZERS.refused.get(kind.__name__, "") if is_torchs else ""
    needed = needed_arguments(kind.step)
    if needed and not reason:
        reason = f"its step() needs {', '.join(needed)}, and the engine has none; use AdamW"
    if reason:
        raise UsageError(f"{kind.__name__}: {reason}")


def warning_text(name: str) -> str:
    """What `name` does at zero_optimization.stage 1 to 3, and what to use instead."""
    return (
        f"{name}: its update depends on the shape or the norm of a whole parameter, but at "
        "zero_optimization.stage >= 1 it gets 1-D shards, so training differs from that without ZeRO; "
        "zero_allow_untested_optimizer is true (transformers and accelerate set it), so it steps all the same. "
        f"Use zero_optimization.stage = 0, AdamW, or optimizer.type = {_whole_names()} in the config"
    )


def refusal_text(name: str, elementwise: str) -> str:
    """Why `name` is refused on shards. elementwise: names of the optimizers to use instead."""
    return (
        f"{name}: this optimizer may use the shape of a parameter, and with zero_optimization.stage >= 1 "
        f"it would see 1-D shards; use zero_optimization.stage = 0, one of {elementwise} or Lion, "
        f"optimizer.type = {_whole_names()} in the config, or set zero_allow_untested_optimizer to true if its "
        "arithmetic is per element"
    )


def _whole_names() -> str:
    """The optimizers of the config that get the whole parameters at every stage."""
    names = [name for name, each in REGISTERED.items() if not each.is_elementwise]
    names = sorted({*names} - {*ONE_BIT_OPTIMIZERS})
    return f"{', '.join(names[:-1])} or {names[-1]}"


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
NO_MATRICES = ("embed", "lm_head")
ENGINE_FLAGS = ("torch_adam", "fused", "foreach", "fp32_optimizer_states", "state_dtype")


class OptimizerSection(Protocol):
    """The config's section `optimizer`."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Groups:
    """The parameter groups: `options[i]` holds the hyperparameters of group i; `index[id(param)]` is i.

    stacks: id of the parameters that are matrices, one after the other.
    """

    options: tuple[Named, ...]
    index: dict[int, int]
    stacks: frozenset[int] = frozenset()


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
    names = {id(param): name for name, param in model.named_parameters()}
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
            if id(param) not in names:
                problems.append(
                    f"parameter group {number} holds a tensor of shape {tuple(param.shape)} that is not a "
                    "parameter of the model"
                )
            elif index.setdefault(id(param), number) != number:
                problems.append(
                    f"{names[id(param)]} is in parameter groups {index[id(param)]} and {number}: "
                    "leave it in one"
                )
    if problems:
        raise UsageError("; ".join(problems[:5]))
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    return Groups(
        tuple(options),
        {key: number_of_group for key, number_of_group in index.items() if key in trained},
    )


def split_by_kind(section: OptimizerSection | None, model: nn.Module, groups: Groups) -> Groups:
    """`groups` for the optimizer of the config: split in two if it has a formula for matrices alone.

    As in DeepSpeed, a matrix is a parameter of two or more dimensions whose name does not contain one of
    `NO_MATRICES` (embeddings and the head). Of three dimensions it is a stack of matrices, such as experts,
    unless it is a convolution's. A parameter beside a stack that has a vector for each matrix is its bias.
    Muon takes all of these, others take parameters of two dimensions.
    """
    found = None if section is None else REGISTERED.get(section.type)
    if section is None or found is None or not found.matrix_flag:
        return groups
    stacks, biases = _stacked(model)
    matrices = {
        id(param)
        for name, param in model.named_parameters()
        if (param.dim() >= 2 if section.type == "Muon" else param.dim() == 2)
        and not any(word in name.lower() for word in NO_MATRICES)
    }
    matrices -= biases
    options: list[Named] = []
    for entry in groups.options:
        options += [{**entry, found.matrix_flag: True}, {**entry, found.matrix_flag: False}]
    index = {
        key: 2 * number + (0 if key in matrices else 1) for key, number in groups.index.items()
    }
    return Groups(tuple(options), index, frozenset(stacks & matrices))


def _stacked(model: nn.Module) -> tuple[set[int], set[int]]:
    """id of the parameters of `model` that are stacks of matrices, and of the vectors beside them."""
    stacks: set[int] = set()
    biases: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            continue
        own = list(module.parameters(recurse=False))
        lengths = {param.shape[0] for param in own if param.dim() == 3}
        stacks.update(id(param) for param in own if param.dim() == 3)
        biases.update(id(param) for param in own if param.dim() == 2 and param.shape[0] in lengths)
    return stacks, biases


def named_optimizer(
    section: OptimizerSection, updater: Updater, groups: Groups, **more: Any
) -> torch.optim.Optimizer:
    """The optimizer that the config names, over the master weights. more: arguments of one of xds's own."""
    params = {k: v for k, v in section.params.items() if k not in ENGINE_FLAGS}
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    registration = REGISTERED.get(section.type)
    if section.type == "Muon":
        more["stacks"] = _stacks_of_muon(updater, groups)
    if registration is not None and not registration.is_torchs:
        return registration.load()(_entries(updater, groups), **params, **more)
    kind = getattr(torch.optim, section.type)
    if registration is not None:  # torch's kernel is used where it can be
        places = {(master.raw.device, master.raw.dtype) for master in updater.masters}
        if updater.casts or not all(has_fused(kind, *place) for place in places):
            return registration.load()(_entries(updater, groups), **params)
        params["fused"] = True
    try_optimizer(kind, params)
    return _over(kind, updater, groups, f'optimizer.type = "{section.type}"', params)


def _stacks_of_muon(updater: Updater, groups: Groups) -> list[str]:
    """The names of the stacks of matrices.

    Raises:
        UsageError: a rank has a part of a matrix.
    """
    names = []
    for master in updater.masters:
        for param, slot in zip(master.params.params, master.params.layout.slots, strict=True):
            if id(param) in groups.stacks:
                names.append(slot.name)
            elif (
                groups.options[slot.group]["use_muon"]
                and slot.numel
                and slot.shape != slot.whole_shape
            ):
                raise UsageError(
                    f'optimizer.type = "Muon": it needs whole matrices, and a rank has a part of {slot.name}; '
                    "choose AdamW, or set expert_parallel.autoep_size to 1"
                )
    return names


def client_optimizer(
    given: ClientOptimizer, updater: Updater, groups: Groups, *, allow_untested: bool
) -> torch.optim.Optimizer:
    """The user's optimizer over the master weights.

    An optimizer object is changed in place; a class or another callable is called.

    Raises:
        UsageError: it is none, its step needs arguments, or it needs whole parameters that no rank has.
    """
    if isinstance(given, type):
        return _over(given, updater, groups, given.__name__, {}, allow_untested)
    if not isinstance(given, torch.optim.Optimizer):
        if not callable(given):
            raise wrong(
                "optimizer", given, "an optimizer, its class, or a callable that gets groups"
            )
        return _of_factory(given, updater, groups, allow_untested)
    name = type(given).__name__
    if any(float(state.get("step", 1)) for state in given.state.values()):
        raise UsageError(
            f"the optimizer {name} has already taken steps: its state cannot be sharded afterwards; "
            "pass it before its first step"
        )
    tensors_of = _layout_for(type(given), updater, name, allow_untested)
    _replace_params(given, [tensors_of(number) for number in range(len(given.param_groups))])
    return given


def _of_factory(
    make: Callable[[Any], Any], updater: Updater, groups: Groups, allow_untested: bool
) -> torch.optim.Optimizer:
    """The optimizer that `make` builds. Its class decides what it gets, and is known when it has been built.

    Where nothing is sharded `make` gets whole parameters: also a class that makes states in its constructor is
    right then. Optimizers that work on flat ranges get these afterwards.
    """
    tensors = updater.optimizer_tensors
    held_of = tensors.tensors_of if updater.world.is_sharded else tensors.whole_params
    held = [held_of(number) for number in range(len(groups.options))]
    entries = [
        {"params": tensors_of_group, **options}
        for tensors_of_group, options in zip(held, groups.options, strict=True)
    ]
    built = make(entries)
    if not isinstance(built, torch.optim.Optimizer):
        raise wrong("the result of optimizer, a callable,", built, "a torch.optim.Optimizer")
    name = type(built).__name__
    wanted = _layout_for(type(built), updater, name, allow_untested)
    if wanted == held_of:
        return built
    if [list(map(id, tensors_of_group)) for tensors_of_group in held] == [
        list(map(id, group["params"])) for group in built.param_groups
    ]:
        _replace_params(built, [wanted(number) for number in range(len(held))])
    elif isinstance(built, ShardOptimizer):
        raise UsageError(
            f"{name}: the callable given as optimizer= has changed the parameter groups, and this optimizer "
            "updates flat ranges; give the groups as model_parameters= of xds.initialize"
        )
    return built  # with other groups: element by element whole parameters give the same


def _replace_params(given: torch.optim.Optimizer, params: Sequence[list[Tensor]]) -> None:
    """Let the groups of `given` have the tensors `params`.

    Raises:
        UsageError: its constructor has made states of other tensors.
    """
    for group, tensors in zip(given.param_groups, params, strict=True):
        group["params"] = tensors
    if type(given) is torch.optim.Adagrad:  # it makes its states in the constructor
        given.state = torch.optim.Adagrad(given.param_groups, **given.defaults).state
    elif any(isinstance(key, Tensor) and state for key, state in given.state.items()):
        name = type(given).__name__
        raise UsageError(
            f"{name}: its constructor has made states of the parameters that it was given, and xds gives it "
            f"others; pass the class, optimizer={name}, and hyperparameters in model_parameters="
        )


def as_shard_optimizer(optimizer: torch.optim.Optimizer, updater: Updater) -> ShardOptimizer:
    """What the engine steps: `optimizer` itself, or one that steps it."""
    if isinstance(optimizer, ShardOptimizer):
        return optimizer
    from ...zero.core.torch_optimizer import TorchShardOptimizer

    return TorchShardOptimizer(optimizer, updater.optimizer_tensors)


def check_masters(optimizer: torch.optim.Optimizer, updater: Updater) -> None:
    """Raises UsageError: masters or states have fewer bits, and `optimizer` does not round them itself."""
    is_narrow = any(m.raw.dtype.itemsize == 2 for m in updater.masters)
    rounds = isinstance(optimizer, ShardOptimizer) and optimizer.rounds_masters
    if is_narrow and not rounds:
        raise UsageError(
            f"{type(optimizer).__name__} cannot update 16-bit masters, because its rounding would lose small "
            'updates; set optimizer.type to "AdamW" in the config and pass no optimizer, or remove '
            "bf16_master_weights_and_grads and fp16_master_weights_and_grads"
        )
    if updater.has_narrow_states and not rounds:
        raise UsageError(
            f"{type(optimizer).__name__} has states of its own dtype, but optimizer.params.state_dtype is set, "
            "which is for the config's optimizer; pass no optimizer, or remove the key"
        )


def load_kernels(
    section: Ops, optimizer: torch.optim.Optimizer, updater: Updater, device: torch.device
) -> None:
    """Build and load the kernels that the optimizer uses: the device's, and the host's where updates run there.

    Without kernels it runs plain torch.

    Raises:
        BuildError: the kernels cannot be built, and ops.require is true.
        UsageError: this device has no kernels, and ops.require is true; or no fp64, which the optimizer needs.
    """
    gains = isinstance(optimizer, ShardOptimizer) and optimizer.gains_from_kernels(
        casts=updater.casts
    )
    if section.require and not optimizer_library(device):
        raise UsageError(
            f"ops.require = true, but there are no native ops for {device.type}: they exist for "
            f"{' and '.join(with_native_ops())}; set it to false, and ops run their torch versions"
        )
    is_whole = isinstance(optimizer, ShardOptimizer) and not optimizer.is_elementwise
    if is_whole and updater.stores.host is None and not device_of(device).has_fp64:
        raise UsageError(
            f"optimizer.type = {type(optimizer).__name__}: its norms need fp64, which {device.type} lacks;"
            " set offload_optimizer, or take an optimizer such as AdamW"
        )
    if section.native and gains and not optimizer_library(device):
        warnings.warn(
            f"there are no native ops for {device.type}; their torch versions run, which are slower",
            NativeOpsWarning,
            stacklevel=2,
        )
    devices = [device] if updater.stores.host is None else [device, torch.device("cpu")]
    names = {optimizer_library(kind) for kind in devices} - {""}
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
    entries = [
        {"params": tensors_of(number), **options} for number, options in enumerate(groups.options)
    ]
    return kind(entries, **params)


def _layout_for(
    kind: type[torch.optim.Optimizer], updater: Updater, name: str, allow_untested: bool
) -> Callable[[int], list[Tensor]]:
    """Flat shards for elementwise arithmetic, whole parameters where nothing is sharded."""
    _check_step(kind)
    _check_slices(kind, updater, name, allow_untested)
    is_cut = updater.world.is_sharded or updater.has_slices
    if allow_untested and is_cut and sees_shapes(kind) and updater.world.collectives.rank == 0:
        log.warning(warning_text(name))
    if issubclass(kind, ShardOptimizer):
        return updater.optimizer_tensors.tensors_of
    if updater.world.is_alone:
        # the tensors plain torch would get: bit-identical results
        return updater.optimizer_tensors.whole_params
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
        f"or expert_parallel.autoep_size > 1 cuts it; use one of {_elementwise_names()} or Lion, set both "
        f"keys to 1{hint}"
    )


def _elementwise_names() -> str:
    return ", ".join(sorted(kind.__name__ for kind in ELEMENTWISE))


def _entries(updater: Updater, groups: Groups) -> list[Named]:
    return [
        {"params": updater.optimizer_tensors.tensors_of(number), **options}
        for number, options in enumerate(groups.options)
    ]


# -- how many state tensors of a parameter's size an optimizer will make, known before it is built -------
# torch's own classes make their states in the first step, so one step on two numbers is tried.

UNKNOWN = 2  # as many as Adam; further states stay in memory
NUMEL = 2  # of the trial: a state of one element would look like a constant


def count_states(section: OptimizerSection | None, given: Any) -> int:
    """State tensors for each parameter.

    Args:
        section: the config's, used if `given` is None.
        given: the script's optimizer, its class, or a callable.
    """
    if given is None:
        assert section is not None
        return _of_section(section)
    if isinstance(given, torch.optim.Optimizer):
        groups = [{k: v for k, v in group.items() if k != "params"} for group in given.param_groups]
        return _of_class(type(given), groups, given.defaults)
    return _of_class(given, [{}], {}) if isinstance(given, type) else UNKNOWN


def _of_section(section: OptimizerSection) -> int:
    registration = REGISTERED.get(section.type)
    if registration is not None:
        return registration.load().num_states
    params = {k: v for k, v in section.params.items() if k not in ENGINE_FLAGS}
    return _of_class(getattr(torch.optim, section.type), [{}], params)


def _of_class(kind: Any, options: Sequence[Any], params: Mapping[str, Any]) -> int:
    if issubclass(kind, ShardOptimizer):
        return int(kind.num_states)
    if not kind.__module__.startswith("torch.optim"):
        return UNKNOWN  # a constructor of somebody else's may do anything
    weights = [torch.zeros(NUMEL, requires_grad=True) for _ in options]
    entries = [{"params": [w], **group} for w, group in zip(weights, options, strict=True)]
    try:
        optimizer = kind(entries, **params)
        for weight in weights:
            weight.grad = torch.ones(NUMEL)
        optimizer.step()
    except Exception:
        return UNKNOWN  # what is wrong is said where the optimizer is built
    return max(
        (sum(map(_has_values, state.values())) for state in optimizer.state.values()), default=0
    )


def _has_values(state: object) -> bool:
    return isinstance(state, Tensor) and state.numel() == NUMEL
