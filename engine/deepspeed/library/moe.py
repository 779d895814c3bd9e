"""DeepSpeed's layer of experts with its arguments and names, and its functions that sort parameters.

    MoE            (hidden_states, used_token) -> (output, l_aux, exp_counts)
      MOELayer       hidden states in any shape -> the same shape
        TopKGate       tokens -> their experts, experts/gates.py
        Experts        tokens and their experts -> outputs, called as transformers calls its own

Differences. A layer is built with all its experts on every rank, under their global numbers; so a state dict
has the same names for each `ep_size`. Tokens travel in uneven parts, not in buffers of the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ....experts import gates
from ....utils.errors import UsageError
from ..errors import methods_raise_theirs, raises_theirs

Group = dict[str, Any]


@final
@methods_raise_theirs
class TopKGate(nn.Module):
    """A linear layer without bias, in fp32, whose outputs choose k experts for each token."""

    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """ep_group: without effect; no message is needed for the choice.

        Raises:
            UsageError: a wrong argument, with what is right.
        """
        super().__init__()
        if not 1 <= k <= num_experts:
            raise UsageError(
                f"k = {k}: a token goes to between 1 and num_experts = {num_experts} experts; lower k, or add "
                "experts"
            )
        if noisy_gate_policy is not None and noisy_gate_policy not in gates.NOISES:
            raise UsageError(
                f"noisy_gate_policy = {noisy_gate_policy!r}: it must be None or one of "
                f"{', '.join(gates.NOISES)}"
            )
        for name, value in (
            ("capacity_factor", capacity_factor),
            ("eval_capacity_factor", eval_capacity_factor),
            ("min_capacity", min_capacity),
        ):
            if not 0 <= value < float("inf"):
                raise UsageError(f"{name} = {value}: it must be a finite number of at least 0")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.num_experts = k, num_experts
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts = drop_tokens, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Any:
        """Experts for the tokens of `input` [S, H].

        Args:
            used_token: [S], 0 for tokens that go nowhere. It counts for k = 1 alone, as in DeepSpeed.
            use_tutel: without effect.
        Returns:
            For `sparse_routes` (top_k_index, top_k_weights, l_aux, exp_counts), see `gates.Routes`. Otherwise
            DeepSpeed's (l_aux, combine_weights [S, E, C], dispatch_mask [S, E, C], exp_counts).
        Raises:
            UsageError: fewer tokens than `min_capacity`, for k = 1.
        """
        routes = self._routes(input, used_token)
        if sparse_routes:
            return routes.top_k_index, routes.top_k_weights, routes.l_aux, routes.exp_counts
        combine = self._combine_weights(routes)
        return routes.l_aux, combine, combine.bool(), routes.exp_counts

    def _routes(self, hidden_states: Tensor, used_token: Tensor | None) -> gates.Routes:
        noise = self.noisy_gate_policy if self.training else None
        with torch.autocast(hidden_states.device.type, enabled=False):
            tokens = hidden_states.float()
            if noise == "Jitter":
                tokens = gates.jitter(tokens)
            logits = F.linear(tokens, self.wg.weight.float())
            limits = (self._factor(), self.min_capacity)
            if self.k == 1:
                return gates.top1(
                    logits, *limits, used_token, noise, self.drop_tokens, self.use_rts
                )
            if self.k == 2:
                sampling = self.top2_2nd_expert_sampling
                return gates.top2(logits, *limits, self.drop_tokens, sampling)
            return gates.topk(logits, self.k, *limits, self.drop_tokens)

    def _factor(self) -> float:
        return self.capacity_factor if self.training else self.eval_capacity_factor

    def _combine_weights(self, routes: gates.Routes) -> Tensor:
        """The weights at their places in DeepSpeed's buffers [E, C]."""
        num_tokens = len(routes.top_k_index)
        capacity = int(routes.exp_counts.max())
        if self.drop_tokens:
            factor = self._factor() * self.k
            sizes = (num_tokens, self.num_experts)
            capacity = gates.capacity_of(*sizes, factor, self.min_capacity)
        index = routes.top_k_index.t() if self.k == 2 else routes.top_k_index
        places = gates.places(index, self.num_experts)
        places = places.t() if self.k == 2 else places
        token, choice = (routes.top_k_index >= 0).nonzero(as_tuple=True)
        where = (token, routes.top_k_index[token, choice], places[token, choice])
        combine = routes.top_k_weights.new_zeros(num_tokens, self.num_experts, capacity)
        return combine.index_put(where, routes.top_k_weights[token, choice])


@final
class Experts(nn.Module):
    """Copies of an expert. The forward has the contract of transformers' modules of experts."""

    def __init__(
        self, expert: nn.Module, num_local_experts: int = 1, expert_group_name: str | None = None
    ) -> None:
        """expert_group_name: `group_name` of each parameter, beside `allreduce`, which is False."""
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(deepcopy(expert) for _ in range(num_local_experts))
        self.num_experts = num_local_experts
        for param in self.deepspeed_experts.parameters():
            param.allreduce = False  # type: ignore[attr-defined]
            param.group_name = expert_group_name  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sums of the outputs of experts [T, H].

        hidden_states: [T, H]. top_k_index: [T, K] experts, -1 for none. top_k_weights: [T, K]. Each expert is
        called once, with [1, 1, N, H], the dimensions that DeepSpeed's have. One without tokens gets a row
        of zeros, so that each parameter has a gradient on every rank.
        """
        num_choices = top_k_index.shape[1]
        numbers, order = (top_k_index.reshape(-1) + 1).sort(stable=True)
        counts = torch.bincount(numbers, minlength=self.num_experts + 1).tolist()
        routes = torch.split(order, counts)
        outputs = []
        for expert, route in zip(self.deepspeed_experts, routes[1:], strict=True):
            tokens = hidden_states[route // num_choices]
            inputs = tokens if len(route) else hidden_states.new_zeros(1, hidden_states.shape[1])
            output = expert(inputs[None, None])
            if isinstance(output, tuple):  # with a bias, which DeepSpeed ignores too
                output = output[0]
            outputs.append(output.reshape(len(inputs), -1)[: len(route)])
        none = outputs[0].new_zeros(counts[0], outputs[0].shape[1])
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)).to(order))
        by_choice = torch.cat((none, *outputs))[places.view_as(top_k_index).t()]  # [K, T, H]
        weights = top_k_weights.t().unsqueeze(-1)
        total = by_choice[0] * weights[0]
        for choice in range(1, num_choices):
            total = total + by_choice[choice] * weights[choice]
        return total.to(by_choice.dtype)


@final
class MOELayer(nn.Module):
    """A gate and its experts. `l_aux` and `exp_counts` are those of the last forward."""

    l_aux: Tensor
    exp_counts: Tensor

    def __init__(
        self,
        gate: nn.Module,
        experts: nn.Module,
        ep_group_name: str,
        ep_size: int,
        num_local_experts: int,
        use_tutel: bool = False,
    ) -> None:
        """use_tutel: without effect."""
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group_name, self.ep_size = ep_group_name, ep_size
        self.num_local_experts = num_local_experts

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        used = None if used_token is None else used_token.reshape(-1)
        index, weights, self.l_aux, self.exp_counts = self.gate(tokens, used, sparse_routes=True)
        output: Tensor = self.experts(tokens, index, weights)
        return output.reshape(hidden_states.shape)


@final
class MoE(nn.Module):
    """Experts in place of one module of a layer."""

    @raises_theirs
    def __init__(  # noqa: PLR0913 (DeepSpeed's arguments)
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        """
        Args:
            hidden_size: of inputs and outputs of `expert`.
            expert: is copied `num_experts` times.
            ep_size: how many ranks the script wants to share the experts.
            k: experts of a token.
            capacity_factor, eval_capacity_factor: an expert takes up to S k / num_experts times this of the S
                tokens of a rank, and at least `min_capacity`. The others are dropped.
            use_residual: also compute `expert` itself for each token; two learned weights mix both.
            noisy_gate_policy: "Jitter" multiplies inputs of the gate by up to 1 %; "RSample" adds noise to
                the choice of one expert. Both in training alone.
            drop_tokens: False: no limit.
            use_rts: for k = 1 an expert above its limit keeps random tokens.
            use_tutel, enable_expert_tensor_parallelism: without effect; an expert is whole.
            top2_2nd_expert_sampling: for k = 2 the second expert is drawn by its probability.
        Raises:
            UsageError: a wrong argument, with what is right.
        """
        super().__init__()
        if num_experts < 1 or ep_size < 1 or num_experts % ep_size:
            raise UsageError(
                f"num_experts = {num_experts} and ep_size = {ep_size}: both must be at least 1, and ep_size "
                "must divide num_experts; change one of them"
            )
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.expert_group_name = f"ep_size_{ep_size}"
        self.num_local_experts = num_experts // ep_size
        experts = Experts(expert, num_experts, self.expert_group_name)
        gate = TopKGate(
            *(hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity),
            *(noisy_gate_policy, drop_tokens, use_rts, None, top2_2nd_expert_sampling),
        )
        self.deepspeed_moe = MOELayer(
            gate, experts, self.expert_group_name, ep_size, self.num_local_experts, use_tutel
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def forward(
        self, hidden_states: Tensor, used_token: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, which has the shape of `hidden_states` [..., H], the balance loss, and the counts [E].

        used_token: 0 for tokens that go nowhere. The counts are those before tokens are dropped.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            residual = self.mlp(hidden_states)
            if isinstance(residual, tuple):
                residual = residual[0]
            mix = self.coefficient(hidden_states).softmax(-1)
            output = output * mix[..., 0:1] + residual * mix[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


# -- deepspeed.moe.utils ----------------------------------------------------------------------------------


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a module has a `MoE`, and the number of experts of the first one."""
    numbers = [one.num_experts for one in m.modules() if isinstance(one, MoE)]
    return bool(numbers), numbers[0] if numbers else 0


def is_moe_param(param: Tensor) -> bool:
    """Whether a parameter is of an expert of `MoE`: `param.allreduce` is False."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of no expert, and those of experts."""
    both: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for param in params:
        both[is_moe_param(param)].append(param)
    return both


def split_params_grads_into_shared_and_expert_params(
    group: Iterable[nn.Parameter],
) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of both, of parameters that have one."""
    shared, experts = split_params_into_shared_and_expert_params(
        param for param in group if param.grad is not None
    )
    return [_gradient(param) for param in shared], [_gradient(param) for param in experts]


def _gradient(param: nn.Parameter) -> Tensor:
    return param.grad.to(param.dtype)  # type: ignore[union-attr]


@raises_theirs
def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Group | tuple[Group, ...] | list[Group],
    max_group_size: float | None = 178956971,
) -> list[Group]:
    """Groups of an optimizer without experts, then groups of the experts of each, named "ep_size_E".

    Args:
        max_group_size: of a group of experts, in elements; a larger parameter has its own group.
    Raises:
        UsageError: no dict or list of dicts.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else param_groups
    if not isinstance(groups, (list, tuple)):
        kind = type(param_groups).__name__
        raise UsageError(f"param_groups is a {kind}: give a dict, or a list of dicts")
    groups = list(groups)
    added: list[Group] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        for name in dict.fromkeys(param.group_name for param in experts):  # type: ignore[attr-defined]
            mine = [param for param in experts if param.group_name == name]  # type: ignore[attr-defined]
            more = {**group, "name": name, "moe": True}
            added += [{**more, "params": part} for part in _parts(mine, max_group_size)]
    return groups + added


def _parts(params: list[nn.Parameter], max_numel: float | None) -> list[list[nn.Parameter]]:
    """Runs of parameters of at most `max_numel` elements together."""
    parts: list[list[nn.Parameter]] = [[]]
    size = 0
    for param in params:
        numel = int(getattr(param, "ds_numel", param.numel()))
        if max_numel is not None and parts[-1] and size + numel > max_numel:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += numel
    return parts


def is_moe_param_group(param_group: Group) -> bool:
    """Whether a group of an optimizer is one of experts."""
    return bool(param_group.get("moe", False))


@raises_theirs
def configure_moe_param_groups(model_parameters: list[Any]) -> list[Group]:
    """Parameters, or groups of an optimizer, as groups of which those of experts are apart.

    Raises:
        UsageError: no list of parameters or dicts.
    """
    if not isinstance(model_parameters, list) or not model_parameters:
        raise UsageError(
            "model_parameters must be a list of parameters or of dicts, with one at least"
        )
    for item in model_parameters:
        if not isinstance(item, (Tensor, dict)):
            kind = type(item).__name__
            raise UsageError(f"model_parameters has a {kind}: give parameters, or dicts")
    if not isinstance(model_parameters[0], dict):
        group = {"params": model_parameters, "name": "dense-params"}
        return split_params_into_different_moe_groups_for_optimizer(group)
    if any("moe" in group for group in model_parameters):
        return model_parameters
    return split_params_into_different_moe_groups_for_optimizer(model_parameters)


__all__ = ["MOELayer", "Experts", "MoE", "TopKGate"]
