"""What scripts see of gradients: `param.grad` at stage 0, unused parameters, an engine without an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from ....ops.flat import shaped
from ....utils.errors import UsageError
from ....zero.core.owners import ParamOwner, ShardView, find_owner
from ...engine import Engine


@final
class ShownGrads:
    """The gradients of one engine. Its memory is one gradient more, on several ranks, from backward to step."""

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self._engine = engine
        self._is_whole = (
            engine.zero_optimization_stage() == 0
            and config.zero_optimization.offload_optimizer.device == "none"
        )
        self._is_used = self._is_whole and not (config.fp16.enabled or config.bf16.enabled)
        self._shown: list[tuple[nn.Parameter, ShardView, Tensor, float]] = []

    def show(self) -> None:
        """After a backward. Before the last one of a step nothing is shown: sums are not reduced yet."""
        if not (self._is_used and self._engine.internals.has_exact_sums()):
            return
        for param in self._engine.module.parameters():
            owner = find_owner(param)
            if param.requires_grad and owner is not None and owner.trains(param):
                self._show_one(param, owner)
        for param, _, grad, _ in self._shown:  # not earlier: the engine refuses unknown ones
            param.grad = grad
        self._allow()

    def _allow(self) -> None:
        self._engine.internals.allow_grads(grad for _, _, grad, _ in self._shown)

    def _show_one(self, param: nn.Parameter, owner: ParamOwner) -> None:
        stored = owner.grad(param)
        if stored is None or not stored.is_full or stored.local.dtype != param.dtype:
            return
        factor = owner.gradient_factor()
        view = shaped(stored.local, param.shape, stored.channels_last)
        grad = view if factor == 1.0 else view * factor
        self._shown.append((param, stored, grad, factor))

    @torch.no_grad()
    def take_back(self) -> None:
        """Before anything else that uses gradients: what the script has written counts. None drops one."""
        shown, self._shown = self._shown, []
        if not shown:
            return
        self._allow()
        if all(param.grad is None for param, _, _, _ in shown):
            self._engine.zero_grad()
            return
        for param, stored, grad, factor in shown:
            found, param.grad = param.grad, None
            if found is None:
                stored.local.zero_()
            elif found is not grad or factor != 1.0:
                view = shaped(stored.local, param.shape, stored.channels_last)
                torch.div(found, factor, out=view)

    def bring_own(self) -> None:
        """Before a step without a backward: gradients that the script has set are those of the step.

        They have the loss scale, and are averaged over ranks. The backward of a loss brings them, which has
        exactly these gradients.
        """
        engine = self._engine
        if not self._is_whole or engine.internals.has_seen_backward:
            return
        params = [one for one in engine.module.parameters() if one.requires_grad]
        own = [(param, param.grad) for param in params if param.grad is not None]
        if not own:
            return
        parts: list[Tensor] = []
        for param, grad in own:
            param.grad = None
            wide = torch.promote_types(param.dtype, torch.float32)
            parts.append((param.to(wide) * (grad.to(wide) / engine.loss_scale)).sum())
        engine.backward(torch.stack(parts).sum(), scale_wrt_gas=False)

    def forget(self) -> None:
        """The engine drops its gradients."""
        self._take_out()
        self._allow()

    def __del__(self) -> None:  # a script dropped its engine: the next one would add to these
        self._take_out()

    def _take_out(self) -> None:
        shown, self._shown = self._shown, []
        for param, _, grad, _ in shown:
            if param.grad is grad:
                param.grad = None


SHOWN = 3


@final
class UnusedParams:
    """Knows the parameters without a gradient since the last step; only where the config asks for it."""

    def __init__(self, engine: Engine, given: Mapping[str, Any]) -> None:
        zero = given.get("zero_optimization")
        section: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {}
        self._engine = engine
        self._is_used = (
            section.get("ignore_unused_parameters") is False
            and engine.zero_optimization_stage() in (1, 2)
            and engine.config.zero_optimization.offload_optimizer.device != "none"
        )
        # None: no backward of the engine since the last step
        self._absent: list[nn.Parameter] | None = None

    def after_backward(self) -> None:
        """Take note of the gradients of `engine.backward`."""
        if not self._is_used:
            return
        found = self._engine.internals.params_without_grad()
        still = None if self._absent is None else {id(one) for one in self._absent}
        self._absent = [one for one in found if still is None or id(one) in still]

    def forget(self) -> None:
        """The gradients of the step were dropped."""
        self._absent = None

    def before_step(self) -> None:
        """Raises UsageError: a parameter had no gradient in any backward of the step that ends now."""
        if self._absent is None or not self._engine.is_gradient_accumulation_boundary():
            return
        absent, self._absent = self._absent, None
        if not absent:
            return
        ids = {id(one) for one in absent}
        names = [name for name, one in self._engine.module.named_parameters() if id(one) in ids]
        raise UsageError(
            "zero_optimization.ignore_unused_parameters = false, and these parameters had no gradient: "
            f"{', '.join(names[:SHOWN])}{', ...' if names[SHOWN:] else ''}; use them in the loss, freeze them, "
            "or set the key to true"
        )


@final
class OnlyInfers:
    """A context without gradients of parameters: `initialize` and forwards of an engine without an optimizer.

    It may be entered again. In between the parameters keep `requires_grad`: TRL makes such an engine for the
    model that it trains afterwards, and the optimizer of the training takes the parameters that have it.
    """

    def __init__(self, params: Iterable[nn.Parameter] = ()) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._frozen: list[nn.Parameter] = []
        self._depth = 0

    def __bool__(self) -> bool:
        return bool(self._params)

    def __enter__(self) -> None:
        if self._depth == 0:  # a script may have frozen some since
            self._frozen = [param for param in self._params if param.requires_grad]
            self._set(False)
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._set(True)

    def _set(self, needed: bool) -> None:
        for param in self._frozen:
            param.requires_grad_(needed)
