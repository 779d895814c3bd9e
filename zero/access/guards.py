"""Raises on operations that would silently fail on a sharded model: saving shards, adding parameters.

Uses torch's own hooks, which `remove` removes; nothing is patched.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ...ops.torch_internals import NoTorchFunctionSubclass, tree_map_only
from ...utils.errors import UsageError
from ..core.owners import IN_SHARDS, IN_SLICES, ParamOwner, find_owner

# -- a value of a state dict that this rank does not have whole: its shape is [0], and it warns when used

log = logging.getLogger("xds")

_NO_VALUES = frozenset(
    (
        *(
            getattr(Tensor, name).__get__
            for name in (
                *("shape", "dtype", "device", "requires_grad", "ndim", "is_sparse", "layout"),
                "is_meta",
            )
        ),
        *(Tensor.dim, Tensor.size, Tensor.numel, Tensor.element_size, Tensor.is_floating_point),
    )
)


@final
class Sentence:
    """What a use of values in parts logs, once."""

    def __init__(self) -> None:
        self.text = ""  # of the first one
        self._is_said = False

    def say(self) -> None:
        """Log it, at the first call."""
        if not self._is_said:
            self._is_said = True
            log.warning("%s", self.text)


@final
class InParts(Tensor):
    """Shape [0]. Whatever is made of it, copies and files too, is a plain tensor."""

    _sentence: Sentence

    @staticmethod
    def of(value: Tensor, sentence: Sentence) -> InParts:
        """One with the dtype and device of `value`."""
        made = value.detach().new_empty(0).as_subclass(InParts)
        made._sentence = sentence
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with NoTorchFunctionSubclass():
            if func in _NO_VALUES:
                return func(*args, **(kwargs or {}))
            return func(*_plain(args), **_plain(dict(kwargs or {})))


def _plain(given: Any) -> Any:
    def plain(tensor: InParts) -> Tensor:
        tensor._sentence.say()
        return tensor.as_subclass(Tensor)

    return tree_map_only(InParts, plain, given)


@final
@dataclass
class Leniency:
    """What a guard does not check; shared by the hooks of an engine.

    gathered: by the parameter's id, its whole value where user code still has it, and the owner's
        `num_writes` then.
    """

    lets_parts_out: bool = False
    sentence: Sentence | None = None
    gathered: dict[int, tuple[weakref.ref[Tensor], int]] = field(default_factory=dict)


@final
class Guards:
    """The checks on one engine's model, from `initialize` to `destroy`."""

    def __init__(self, model: nn.Module, owner: ParamOwner, *, defers: bool) -> None:
        """defers: parameters of a whole model may have no values for a while."""
        self._modules = weakref.WeakSet(model.modules())
        # known parameters may be registered again: peft parametrizes one in every forward and restores it
        self._params = WeakTensorKeyDictionary()
        self._params.update((param, True) for param in model.parameters())
        self._owner = weakref.ref(owner)
        self._leniency = Leniency()
        self._handles: list[RemovableHandle] = [
            register_module_parameter_registration_hook(self._parameter_registered),
            register_module_module_registration_hook(self._module_registered),
        ]
        for module in model.modules():
            params = list(module.parameters(recurse=False))
            if any(defers or _is_in_parts(param) for param in params):
                self._handles += [
                    module.register_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                        partial(_before_state_dict, self._leniency)
                    ),
                    module.register_state_dict_post_hook(  # type: ignore[no-untyped-call]
                        partial(_after_state_dict, self._leniency)
                    ),
                    module.register_load_state_dict_pre_hook(_before_load_state_dict),  # type: ignore[no-untyped-call]
                    module.register_load_state_dict_post_hook(_NotCopied(self._leniency, module)),  # type: ignore[no-untyped-call]
                ]
            elif any(owner.is_read_only(param) for param in params):
                self._handles.append(
                    module.register_load_state_dict_pre_hook(_before_load_shared)  # type: ignore[no-untyped-call]
                )

        self._handles.append(model.register_load_state_dict_pre_hook(_before_load))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Remove all checks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def keep_with_model(self, model: nn.Module, engine: object) -> None:
        """`engine` lives as long as `model`, until `remove`; user code that dropped it can destroy it."""
        self._handles.append(
            model.register_load_state_dict_post_hook(_Kept(engine))  # type: ignore[no-untyped-call]
        )

    def let_state_dict_have_parts(self, *, warns: bool) -> None:
        """From now on state_dict() works. What is in parts is a tensor of [0], or what `remember` has.

        Tensors of [0] share no memory, which writers of files look for.
        warns: the first use of such a value says where the whole ones are. Libraries ask for names alone.
        """
        self._leniency.lets_parts_out = True
        self._leniency.sentence = Sentence() if warns else None

    def remember(self, values: Mapping[str, Any], model: nn.Module) -> None:
        """`values` were gathered for user code. As long as it has them, state_dict() returns them too."""
        gathered = self._leniency.gathered
        for name, param in model.named_parameters(remove_duplicate=False):
            value, owner = values.get(name), find_owner(param)
            if isinstance(value, Tensor) and owner is not None:
                gathered[id(param)] = (weakref.ref(value), owner.num_writes)

    def forget(self) -> None:
        """Parameters are about to change."""
        self._leniency.gathered.clear()

    def _parameter_registered(self, module: nn.Module, name: str, param: nn.Parameter) -> None:
        if module not in self._modules or param in self._params:
            return
        if self._owner() is not None:
            raise UsageError(
                f"{type(module).__name__}.{name} = a parameter, after xds.initialize: the engine would neither "
                "train nor shard it; set it before xds.initialize, or call engine.destroy(), change the model, "
                "and initialize again"
            )

    def _module_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is None or module not in self._modules or self._owner() is None:
            return
        unknown = [n for n, p in submodule.named_parameters() if p not in self._params]
        if unknown:
            raise UsageError(
                f"{type(module).__name__}.{name} = {type(submodule).__name__}, after xds.initialize: the "
                f"engine would neither train nor shard its parameters ({', '.join(unknown[:3])}); add "
                "modules before xds.initialize, or call engine.destroy(), change the model and initialize again"
            )


@final
class _Kept:
    """A hook that does nothing but hold an object. Copies and files of the model do not have the object."""

    def __init__(self, held: object = None) -> None:
        self._held = held

    def __call__(self, *_: object) -> None:
        pass

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


@final
class _NotCopied:
    """A hook that does nothing, until the module is copied while it has parameters in parts."""

    def __init__(self, leniency: Leniency, module: nn.Module) -> None:
        self._leniency = leniency
        self._module = weakref.ref(module)

    def __call__(self, *_: object) -> None:
        pass

    def __deepcopy__(self, memo: object) -> _Kept:
        module = self._module()
        hidden, why = ([], "") if module is None else _hidden(module)
        if hidden and not self._leniency.lets_parts_out:  # there copies are whole
            raise UsageError(
                f"copy.deepcopy of a {type(module).__name__} whose parameters are {why}, as by AveragedModel: "
                f"{hidden[0]} is not whole on this rank; copy the model before xds.initialize, and load "
                "engine.full_state_dict(rank0_only=False) into the copy, on every rank"
            )
        return _Kept()

    def __reduce__(self) -> tuple[type[_Kept], tuple[()]]:
        return _Kept, ()


def _is_in_parts(param: nn.Parameter) -> bool:
    """Its values are in shards or slices."""
    owner = find_owner(param)
    return owner is not None and bool(owner.why_in_parts(param))


def has_parts(model: nn.Module) -> bool:
    """This rank does not have all parameters of `model` whole. The same on all ranks."""
    return any(_is_in_parts(param) for param in model.parameters())


def _hidden(module: nn.Module) -> tuple[list[str], str]:
    """Names of parameters in parts that no context has gathered; and why they are in parts."""
    names = []
    why = IN_SHARDS
    for name, param in module.named_parameters(recurse=False):
        owner = find_owner(param)
        how = "" if owner is None else owner.why_in_parts(param)
        if owner is not None and how and not owner.is_overridden(param):
            names.append(name)
            why = IN_SLICES if IN_SLICES in (how, why) else how
    return names, why


def _settle(module: nn.Module) -> None:
    owners = {id(o): o for p in module.parameters(recurse=False) if (o := find_owner(p))}
    for owner in owners.values():
        owner.settle_alone()


def _before_state_dict(leniency: Leniency, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars:  # the parameters themselves, not their values
        return
    _settle(module)
    if leniency.lets_parts_out:
        return
    hidden, why = _hidden(module)
    if hidden:
        raise UsageError(
            f"state_dict() of a module whose parameters are {why}: {prefix}{hidden[0]} is not "
            "whole on this rank; call engine.state_dict() or engine.full_state_dict(...) on every rank; "
            "save_pretrained takes the latter as state_dict="
        )


def _after_state_dict(
    leniency: Leniency, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    if not leniency.lets_parts_out:
        return
    hidden, why = _hidden(module)
    for name in hidden:
        value = state_dict.get(prefix + name)
        if value is not None and not isinstance(value, nn.Parameter):  # keep_vars
            whole = _gathered(leniency, getattr(module, name))
            state_dict[prefix + name] = (
                _placeholder(leniency, value, prefix + name, why) if whole is None else whole
            )


def _gathered(leniency: Leniency, param: nn.Parameter) -> Tensor | None:
    value, owner = leniency.gathered.get(id(param)), find_owner(param)
    if value is None or owner is None or value[1] != owner.num_writes:
        return None
    return value[0]()


def _placeholder(leniency: Leniency, value: Tensor, name: str, why: str) -> Tensor:
    sentence = leniency.sentence
    if sentence is None:
        return value.new_empty(0)
    sentence.text = sentence.text or (
        f"state_dict() of a module whose parameters are {why}: {name} and others have the shape [0] there, and "
        "in files made of it. The whole weights: engine.save_16bit_model(folder) or engine.full_state_dict() "
        "on every rank; engine.save_checkpoint is complete"
    )
    return InParts.of(value, sentence)


def _before_load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    _settle(module)
    names, why = _hidden(module)
    hidden = [name for name in names if prefix + name in state_dict]
    if hidden:
        raise UsageError(
            f"load_state_dict() into a module whose parameters are {why}: {prefix}{hidden[0]} is "
            "not whole on this rank; call engine.load_state_dict(...) or xds.zero.load_weights(module, ...) on "
            "every rank"
        )


def _before_load(module: nn.Module, *_: Any) -> None:
    for param in module.parameters():
        owner = find_owner(param)
        if owner is not None:
            owner.begin_edit(param)


def _before_load_shared(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any
) -> None:
    for name, param in module.named_parameters(recurse=False):
        owner = find_owner(param)
        is_free = owner is None or not owner.is_read_only(param) or owner.is_overridden(param)
        if prefix + name in state_dict and not is_free:
            raise UsageError(
                f"load_state_dict() into a module with zero_optimization.shared_parameters: the ranks of a "
                f"machine have one copy of {prefix}{name}; call engine.load_state_dict(...) or "
                "xds.zero.load_weights(module, ...) on every rank"
            )


__all__ = ["Guards", "InParts", "Sentence", "has_parts"]
