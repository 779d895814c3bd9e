"""How a block of a mixture chooses experts and weighs them: a convention, which is found by trying.

    logits = router(x)             [T, N]
    scores = softmax or sigmoid of the logits
    choice = the K best scores, with a bias if there is one, within the best groups of experts
    weights = scores of the choice, divided by their sum or not, times a scale
    output = sum of weight * expert(x), or of expert(weight * x);  + shared experts, with a gate or without

`find_convention` runs a copy of the block that has random weights in its router, and small stand-ins for its
experts. So the values of the model are not needed, and weights that begin as zeros hide nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, final

import torch
from torch import Tensor, nn

from ..utils.errors import UsageError
from .config import ExpertParallel

BATCH, TOKENS = 2, 16  # of the proof
FAR = 16.0  # added to the logit of the expert that a token is made for
NEAR = 1e-4  # relative difference of two results that are equal
MOST_TRIED = 16  # choices of a token that are tried where no attribute names their number
Groups = tuple[int, int, int, float]
SCORES = {"softmax": (True,), "sigmoid": (False,), "auto": (True, False)}  # is it a softmax
TOP_K_NAMES = ("top_k", "num_experts_per_tok", "topk", "k", "num_selected_experts", "moe_top_k")
SCALE_NAMES = ("routed_scaling_factor", "route_scale")
GROUP_NAMES = (("num_expert_groups", "n_group"), ("num_limited_groups", "topk_group"))


@final
@dataclass(frozen=True, eq=False)
class Block:
    """A block of the model: its router, its experts, and the others that are called with all tokens.

    router, experts, shared, gate: names of children. bias: (name of a submodule, name in it) of the tensor [N]
    that is added to scores for the choice alone; None: there is none.
    """

    name: str
    module: nn.Module
    router: str
    experts: str
    shared: tuple[str, ...]
    gate: str | None
    bias: tuple[str, str] | None

    @property
    def num_experts(self) -> int:
        return len(self.child(self.experts))  # type: ignore[arg-type]

    def child(self, name: str) -> nn.Module:
        return self.module.get_submodule(name)


@final
@dataclass(frozen=True)
class Convention:
    """What a block computes from the output of its router.

    is_softmax: of the scores; else the sigmoid. None: the router returns numbers of experts, and weights.
    groups: (number of groups, groups that a token keeps, scores of a group that are summed, the score in its
        other groups); None: no groups.
    weighs_inputs: experts get weight * x.
    is_flat: the router is called with [T, H]; else with the input of the block.
    has_shared, has_gate: shared experts are added; times the sigmoid of the gate.
    form: the parts of the result, "output" or "logits", each with its number of dimensions; None: it is no
        tuple.
    """

    is_softmax: bool | None
    top_k: int
    normalizes: bool = False
    scale: float = 1.0
    groups: Groups | None = None
    has_bias: bool = False
    weighs_inputs: bool = False
    is_flat: bool = False
    has_shared: bool = False
    has_gate: bool = False
    form: tuple[tuple[str, int], ...] | None = None

    def choose(self, output: Any, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The experts of each token [T, K], and their weights. output: of the router."""
        if self.is_softmax is None:
            choices = choices_in(output)
            assert choices is not None
            return choices
        logits = logits_in(output)
        assert logits is not None
        wide = logits if logits.dtype == torch.float64 else logits.float()
        scores = wide.softmax(-1) if self.is_softmax else wide.sigmoid()
        ranked = scores if bias is None or not self.has_bias else scores + bias
        if self.groups is not None:
            ranked = _within_groups(ranked, *self.groups)
        index = ranked.detach().topk(self.top_k, -1).indices
        weights = scores.gather(-1, index)
        if self.normalizes:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return index, weights * self.scale


def logits_in(output: Any) -> Tensor | None:
    """The first tensor of floating point in the output of a router, flattened to [T, N]."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = (part for part in parts if isinstance(part, Tensor) and part.is_floating_point())
    logits = next(tensors, None)
    return None if logits is None or not logits.dim() else logits.reshape(-1, logits.shape[-1])


def choices_in(output: Any) -> tuple[Tensor, Tensor] | None:
    """Numbers of experts [T, K] and weights of the same shape in the output of a router, if they are there."""
    parts = output if isinstance(output, tuple | list) else (output,)
    tensors = [part for part in parts if isinstance(part, Tensor) and part.dim()]
    for index in tensors:
        for weights in tensors:
            is_index = index.dtype in (torch.int64, torch.int32)
            if is_index and weights.is_floating_point() and index.shape == weights.shape:
                width = index.shape[-1]
                return index.reshape(-1, width).long(), weights.reshape(-1, width)
    return None


def _within_groups(
    scores: Tensor, num_groups: int, num_kept: int, num_best: int, other: float
) -> Tensor:
    """The scores [T, N], with `other` outside of the best groups of neighbouring experts."""
    grouped = scores.view(len(scores), num_groups, -1)
    value = grouped.topk(min(num_best, grouped.shape[-1]), -1).values.sum(-1)
    kept = torch.zeros_like(value, dtype=torch.bool)
    kept.scatter_(-1, value.topk(num_kept, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), other).view_as(scores)


# -- the conventions that are tried ---------------------------------------------------------------------------


@final
class _Hints:
    """Numbers that the config, the block, its router or the model's config name."""

    def __init__(self, block: Block, section: ExpertParallel, model_config: Any) -> None:
        router = block.child(block.router)
        own = getattr(block.module, "config", None)
        self._owners = [block.module, router, own, model_config]
        self._section, self._block, self._model_config = section, block, model_config

    def top_k(self) -> list[int]:
        """
        Raises:
            UsageError: a key names more choices than there are experts, or a missing attribute.
        """
        section, block = self._section, self._block
        given = section.top_k if isinstance(section.top_k, int) else None
        key = "top_k"
        if given is None and section.top_k_attr is not None:
            key, given = "top_k_attr", getattr(self._model_config, section.top_k_attr, None)
            if not isinstance(given, int):
                raise UsageError(
                    f"expert_parallel.top_k_attr = {section.top_k_attr!r}: the model's config has no such "
                    "number; give the name of an attribute of model.config, or set expert_parallel.top_k"
                )
        if given is not None:
            if given > block.num_experts:
                raise UsageError(
                    f"expert_parallel.{key}: a token chooses {given} experts, and {block.name} has "
                    f"{block.num_experts}; set expert_parallel.top_k to at most {block.num_experts}"
                )
            return [given]
        named = [number for name in TOP_K_NAMES for number in self._numbers(name)]
        tried = [*named, *range(1, min(block.num_experts, MOST_TRIED) + 1)]
        whole = (int(number) for number in tried if 1 <= number <= block.num_experts)
        return list(dict.fromkeys(whole))

    def scales(self) -> list[float]:
        section = self._section
        if section.routed_scaling_factor != "auto":
            return [section.routed_scaling_factor]
        if section.route_scale != 1.0:
            return [section.route_scale]
        named = [float(number) for name in SCALE_NAMES for number in self._numbers(name)]
        return list(dict.fromkeys([*named, 1.0]))

    def groups(self) -> list[Groups | None]:
        section = self._section
        given = (section.num_expert_groups, section.num_limited_groups)
        numbers = [
            [number]
            if number is not None
            else [int(n) for name in names for n in self._numbers(name)]
            for number, names in zip(given, GROUP_NAMES, strict=True)
        ]
        tried: list[Groups] = [
            (count, kept, best, other)
            for count, kept, best in product(*numbers, (2, 1))
            for other in (-torch.inf, 0.0)
            if 1 <= kept <= count and count > 1 and self._block.num_experts % count == 0
        ]
        is_asked = given[0] is not None
        return list(dict.fromkeys(tried)) if is_asked else list(dict.fromkeys([*tried, None]))

    def _numbers(self, name: str) -> list[float]:
        values = (getattr(owner, name, None) for owner in self._owners)
        return [n for n in values if isinstance(n, int | float) and not isinstance(n, bool)]


def _tried(block: Block, hints: _Hints, section: ExpertParallel) -> Iterator[Convention]:
    """All conventions that the config allows, without the flags of shared experts."""
    norms = (False, True) if section.route_norm is None else (section.route_norm,)
    applied = {"pre": (True,), "post": (False,), "auto": (False, True)}[section.score_apply]
    biases = (True, False) if block.bias is not None else (False,)
    for weighs_inputs in applied:
        if section.score_func == "auto":
            yield Convention(None, 1, weighs_inputs=weighs_inputs)
        for top_k, groups, has_bias, is_softmax, normalizes, scale in product(
            hints.top_k(), hints.groups(), biases, SCORES[section.score_func], norms, hints.scales()
        ):
            yield Convention(
                is_softmax, top_k, normalizes, scale, groups, has_bias, weighs_inputs=weighs_inputs
            )


# -- the proof ------------------------------------------------------------------------------------------------


class _StandIn(nn.Module):
    """In place of an expert: tanh(a * x + b). is_gate: the sum of that over all elements, [T, 1]."""

    def __init__(self, width: int, generator: torch.Generator, *, is_gate: bool = False) -> None:
        super().__init__()
        self.a, self.b = (torch.randn(width, generator=generator) for _ in range(2))
        self._is_gate = is_gate

    def forward(self, x: Tensor) -> Tensor:
        result = torch.tanh(x * self.a + self.b)
        return result.mean(-1, keepdim=True) if self._is_gate else result


@final
class _Copy:
    """A copy of a block with stand-ins for experts, and random parameters elsewhere."""

    def __init__(self, block: Block) -> None:
        generator = torch.Generator().manual_seed(0)
        module, router = block.module, block.child(block.router)
        self.width = width = _width_of(router, block.num_experts)
        self.experts = [_StandIn(width, generator) for _ in range(block.num_experts)]
        self._a, self._b = (torch.stack([getattr(e, name) for e in self.experts]) for name in "ab")
        self.shared = {name: _StandIn(width, generator) for name in block.shared}
        self.gate = None if block.gate is None else _StandIn(width, generator, is_gate=True)
        memo: dict[int, Any] = {id(block.child(block.experts)): nn.ModuleList(self.experts)}
        memo |= {id(block.child(name)): stand_in for name, stand_in in self.shared.items()}
        if block.gate is not None:
            memo[id(block.child(block.gate))] = self.gate
        configs = [owner.config for owner in (module, router) if hasattr(owner, "config")]
        memo |= {id(config): config for config in configs}
        kept: list[Tensor] = [*module.parameters(recurse=False), *router.parameters()]
        kept += [*module.buffers(recurse=False), *router.buffers()]
        for tensor in kept:
            if not tensor.is_floating_point():
                value = torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.cpu()
                memo[id(tensor)] = value.clone()
            else:
                value = torch.randn(tensor.shape, generator=generator)
                value = value / max(value.shape[-1], 1) ** 0.5 if value.dim() > 1 else value
                is_param = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(value) if is_param else value
        self.module: nn.Module = copy.deepcopy(module, memo)
        self.router = self.module.get_submodule(block.router)
        self.bias = None if block.bias is None else bias_of(self.module, block.bias)
        self._generator = generator
        self._take_tokens(torch.randn(BATCH * TOKENS, width, generator=generator))

    def reach_all(self) -> None:
        """Take tokens of which each expert gets one: it may be treated in another way than the others."""
        count = len(self.experts)
        matrix = next(p for p in self.router.parameters() if is_matrix_of(p, count)).detach()
        rows = torch.linalg.pinv(matrix @ matrix.t(), hermitian=True) @ matrix
        rows = rows / (rows * matrix).sum(1, keepdim=True)  # more experts than elements of a token
        rows = torch.cat((rows, rows[: count % BATCH])) * FAR
        self._take_tokens(rows + torch.randn(rows.shape, generator=self._generator))

    def _take_tokens(self, rows: Tensor) -> None:
        self.hidden = rows.view(BATCH, -1, self.width).clone().requires_grad_()
        self.weight = torch.randn(rows.shape, generator=self._generator)  # of the gradients

    def own(self, *, trains: bool) -> Any:
        """What the block itself computes.

        Raises:
            ValueError: it sets an attribute of its own, which other code may read.
        """
        self._begin(trains=trains)
        before = state_of(self.module)
        try:
            result = self.module(self.hidden)
        except (RuntimeError, ValueError, IndexError):  # it may want tokens in one dimension
            result = self.module(self.hidden.flatten(0, 1))
        after = state_of(self.module)
        written = [name for name in after if after[name] != before.get(name)]
        if written:
            raise ValueError(f"it sets self.{written[0]}, which other code may read")
        return result

    def routed(self, *, is_flat: bool, trains: bool) -> Any:
        """The output of the router, with the draws of `own`; None: it cannot be called so."""
        self._begin(trains=trains)
        try:
            return self.router(self.hidden.flatten(0, 1) if is_flat else self.hidden)
        except (RuntimeError, ValueError, IndexError):
            return None

    def _begin(self, *, trains: bool) -> None:
        self.module.train(trains)
        torch.manual_seed(0)  # a router may add noise in training

    def output(self, convention: Convention, router_output: Any) -> Tensor:
        """What the block computes by `convention` [T, H]."""
        x = self.hidden.flatten(0, 1)
        index, weights = convention.choose(router_output, self.bias)
        a, b = self._a[index], self._b[index]
        rows = x.unsqueeze(1)
        if convention.weighs_inputs:
            result = torch.tanh(rows * weights.unsqueeze(-1) * a + b).sum(1)
        else:
            result = (torch.tanh(rows * a + b) * weights.unsqueeze(-1)).sum(1)
        for shared in self.shared.values() if convention.has_shared else ():
            gate = self.gate(x).sigmoid() if convention.has_gate and self.gate is not None else 1.0
            result = result + gate * shared(x)
        return result

    def grad(self, output: Tensor) -> Tensor:
        weighed = (output.reshape(self.weight.shape) * self.weight).sum()
        return torch.autograd.grad(weighed, self.hidden, retain_graph=True)[0]


def find_convention(block: Block, section: ExpertParallel, model_config: Any) -> Convention:
    """The convention by which `block` computes what its own forward does: results, and gradients.

    Raises:
        UsageError: none of those that the config allows.
    """
    hints = _Hints(block, section, model_config)
    why = "none of the known ways to choose and weigh experts gives its output"
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
    ):
        try:
            clone = _Copy(block)
            own = clone.own(trains=True)
            for convention, output in _with_routers(clone, block, _tried(block, hints, section)):
                found = _fitted(clone, convention, output, own)
                if found is not None:
                    output = clone.routed(is_flat=found.is_flat, trains=False)
                    if _fitted(clone, convention, output, clone.own(trains=False)) != found:
                        why = "it computes something else in training than in evaluation"
                        continue
                    clone.reach_all()
                    output = clone.routed(is_flat=found.is_flat, trains=False)
                    if _fitted(clone, convention, output, clone.own(trains=False)) == found:
                        return found
                    why = "it computes some of its experts in another way"
                    break
        except Exception as error:
            why = f"its forward cannot be tried ({type(error).__name__}: {error})"
    raise UsageError(
        f"{section.setting}: {block.name} ({type(block.module).__name__}): {why}; give its module of experts a "
        "forward(hidden_states, top_k_index, top_k_weights), name its parts and its way by the keys of "
        "expert_parallel, or leave it out with expert_parallel.moe_layer_pattern"
    )


def _with_routers(
    clone: _Copy, block: Block, tried: Iterable[Convention]
) -> Iterator[tuple[Convention, Any]]:
    """Each convention with the output of the router, called in both ways, and with each set of others."""
    others = [(False, False)]
    if block.shared:
        others = [(True, block.gate is not None), (True, False), (False, False)]
    outputs = [(is_flat, clone.routed(is_flat=is_flat, trains=True)) for is_flat in (False, True)]
    for convention in tried:
        for is_flat, output in outputs:
            logits = logits_in(output)
            fits = logits is not None and logits.shape[-1] == block.num_experts
            if convention.is_softmax is None:
                fits = choices_in(output) is not None
            for has_shared, has_gate in dict.fromkeys(others) if fits else ():
                yield (
                    replace(convention, is_flat=is_flat, has_shared=has_shared, has_gate=has_gate),
                    output,
                )


def _fitted(
    clone: _Copy, convention: Convention, router_output: Any, own: Any
) -> Convention | None:
    """`convention`, with the form of the block's result `own`; None: it does not give it."""
    output = clone.output(convention, router_output)
    logits = logits_in(router_output)
    form = []
    for part in own if isinstance(own, tuple | list) else (own,):
        if not isinstance(part, Tensor) or not part.dim():
            return None
        rows = part.reshape(-1, part.shape[-1])
        if _equal(rows, output):
            if not _equal(clone.grad(part), clone.grad(output)):
                return None
            form.append(("output", part.dim()))
        elif logits is not None and _equal(rows, logits):
            form.append(("logits", part.dim()))
        else:
            return None
    return replace(convention, form=tuple(form) if isinstance(own, tuple | list) else None)


def state_of(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Which objects the attributes of `module` are, and how often tensors were written."""
    values = {**vars(module), **module._buffers}
    return {
        name: (id(value), value._version if isinstance(value, Tensor) else 0)
        for name, value in values.items()
    }


def _equal(one: Any, two: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(two, Tensor) and one.shape == two.shape):
        return False
    size = two.detach().abs().max().clamp(min=1e-30)
    return bool((one.detach() - two.detach()).abs().max() / size <= NEAR)


def bias_of(module: nn.Module, place: tuple[str, str]) -> Tensor:
    """See `Block.bias`."""
    found: Tensor = getattr(module.get_submodule(place[0]), place[1])
    return found


def _width_of(router: nn.Module, num_experts: int) -> int:
    """The elements of a token, which a router multiplies with a matrix [N, H]."""
    return next(p.shape[1] for p in router.parameters() if is_matrix_of(p, num_experts))


def is_matrix_of(param: Tensor, num_experts: int) -> bool:
    """It makes a number for each expert."""
    return param.dim() == 2 and param.shape[0] == num_experts


__all__ = [
    "Block",
    "Convention",
    "bias_of",
    "choices_in",
    "find_convention",
    "is_matrix_of",
    "logits_in",
    "state_of",
]
