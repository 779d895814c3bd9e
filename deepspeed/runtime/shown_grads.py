"""At stage 0 in fp32 `param.grad` is there between `engine.backward` and `engine.step`, as in DeepSpeed.

Scripts clip it with `torch.nn.utils.clip_grad_norm_`, or read it. The engine has the sums over ranks; what is
shown is their mean, and what the script has made of it goes back into the sums before the step:

    engine.backward ──> sums ── x 1/ranks ──> param.grad ──> the script ── x ranks ──> sums ──> engine.step

A script may also set `param.grad` itself at stage 0, without any backward: `engine.step` takes those.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from ...engine.engine import Engine
from ...zero.access.owners import Owner, Stored, find_owner


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
        self._shown: list[tuple[nn.Parameter, Stored, Tensor, float]] = []

    def show(self) -> None:
        """After a backward. Before the last one of a step nothing is shown: sums are not reduced yet."""
        step = self._engine._step
        if not (self._is_used and step.reduces_when_asked() and self._engine._sharded.sums_exactly):
            return
        for param in self._engine.module.parameters():
            owner = find_owner(param)
            if param.requires_grad and owner is not None and owner.trains(param):
                self._show_one(param, owner)
        for (
            param,
            _,
            grad,
            _,
        ) in self._shown:  # not earlier: the engine refuses unknown ones as it sums
            param.grad = grad
        self._allow()

    def _allow(self) -> None:
        self._engine._sharded.backwards.allow_shown(grad for _, _, grad, _ in self._shown)

    def _show_one(self, param: nn.Parameter, owner: Owner) -> None:
        stored = owner.grad(param)
        if stored is None or not stored.is_full or stored.local.dtype != param.dtype:
            return
        factor = owner.gradient_factor()
        view = stored.local.view(param.shape)
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
                torch.div(found, factor, out=stored.local.view(param.shape))

    def bring_own(self) -> None:
        """Before a step without a backward: gradients that the script has set are those of the step.

        They have the loss scale, and are averaged over ranks. The backward of a loss brings them, which has
        exactly these gradients.
        """
        engine = self._engine
        if not self._is_whole or engine._sharded.backwards.has_seen_one:
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


__all__ = ["ShownGrads"]
