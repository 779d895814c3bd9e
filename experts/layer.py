"""The forward of an experts module whose experts are on several ranks.

A module of experts is called as transformers 5 calls its own: (hidden_states [T, H], top_k_index [T, K],
top_k_weights [T, K]) -> [T, H]. The module's own forward computes the experts of this rank, with each pair of a
token and an expert as a token that has one expert, of weight 1. So activations, gates, biases and kernels stay
those of the model. Router and shared experts are other modules, and are not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor, nn

from ..ops.comm.collectives import Collectives
from ..ops.device import keeping_draws
from ..ops.recomputation import FirstCalls
from ..ops.torch_internals import outside_of_graphs
from ..utils.errors import UsageError
from .conventions import state_of
from .cut import Found
from .exchange import Share, Trip, plan_trips, travel
from .turns import Turns

Forward = Callable[..., Any]  # (module, *args, **kwargs)
Compute = Callable[[Tensor, Tensor], Tensor]
PROOF_TOKENS, CROWD = 4, 64
NEAR, NEAR_16_BITS = 1e-4, 3e-2  # relative differences of the proof


@final
class ExpertLayer:
    """One module of experts: its exchange, its proof, and the tokens of each expert."""

    def __init__(
        self,
        found: Found,
        number: int,
        group: Collectives,
        turns: Turns,
        setting: str,
        together: Collectives | None = None,
        num_chunks: int = 1,
    ) -> None:
        """
        Args:
            number: of the layer in the model.
            group: the ranks that share the experts.
            turns: of all layers of the engine.
            setting: the key and value that asks for it, in messages.
            together: ranks that are called with the same tokens, such as tensor ranks; None: there are none.
            num_chunks: in which the tokens of a call travel.
        """
        self.name, self.num_experts = found.name, found.num_experts
        self.num_local = found.num_experts // group.world_size
        first = group.rank * self.num_local
        self._experts = found.experts
        self._children = list(found.experts or ())[first : first + self.num_local]
        # an expert gets its tokens times their weights
        self._weighs_inputs = found.convention is not None and found.convention.weighs_inputs
        self._number, self._turns = number, turns
        self._group, self._setting, self._together = group, setting, together
        self._num_chunks = num_chunks
        self._trips = FirstCalls[list[Trip]]()
        self._is_proven = False
        self.rows_sent = 0  # for other ranks, since the begin
        self._counts: Tensor | None = None
        self._num_dropped = 0

    def rerouted(self, forward: Forward) -> Forward:
        """A forward in place of the module's own."""

        names = list(inspect.signature(forward).parameters)[1:4]

        def sent(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            hidden_states, top_k_index, top_k_weights = self._inputs(names, args, kwargs)
            self._turns.take(self._number, hidden_states, top_k_weights)
            if not (self._is_proven or self._group.was_reopened):  # others prove nothing then
                list(stacked_values(module))  # PEFT keeps what is read first; a proof has no graph
                self._prove(module, forward, hidden_states, top_k_weights)
                self._is_proven = True

            def compute(pairs: Tensor, experts: Tensor) -> Tensor:
                return self._own(module, forward, pairs, experts)

            counts = module.training and torch.is_grad_enabled()
            if self._together is None:
                return self._sent(hidden_states, top_k_index, top_k_weights, compute, counts)
            share = Share(self._together, self.name, len(hidden_states))
            hidden, weights = share.cut(hidden_states), share.cut(top_k_weights)
            index = share.of_own(top_k_index)
            return share.join(self._sent(hidden, index, weights, compute, counts))

        return outside_of_graphs(sent)  # a graph has no messages of unknown sizes

    def _sent(
        self, hidden: Tensor, index: Tensor, weights: Tensor, compute: Compute, counts: bool
    ) -> Tensor:
        """The outputs of own tokens [T, H]. A recomputation has the routing of the forward."""

        def plan() -> list[Trip]:
            return plan_trips(
                self._group, self.name, index, self.num_local, self._number, self._num_chunks
            )

        trips, is_first = self._trips.value(plan)
        result = travel(trips, hidden, weights, compute, self._weighs_inputs)
        self.rows_sent += sum(trip.rows_sent for trip in trips)
        if counts and is_first:
            self._count(trips, index.numel())
        return result

    def _own(self, module: nn.Module, forward: Forward, pairs: Tensor, experts: Tensor) -> Tensor:
        """The outputs of this rank's experts [P, H]; experts [P]: the number of one for each input."""
        num_pairs = len(pairs)
        if not num_pairs:  # one token, so that parameters get a gradient, of zeros
            pairs, experts = pairs.new_zeros(1, pairs.shape[1]), experts.new_zeros(1)
        if torch.are_deterministic_algorithms_enabled():
            return self._one_by_one(module, forward, pairs, experts)[:num_pairs]
        weights = pairs.new_ones(len(pairs), 1)
        with self._having(module):
            outputs: Tensor = forward(module, pairs, experts.unsqueeze(1), weights)
        return outputs[:num_pairs]

    @contextmanager
    def _having(
        self,
        module: nn.Module,
        numbers: Sequence[int] | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Iterator[None]:
        """Inside, `module` has the experts of this rank alone; or of them `numbers`, with `weights`."""
        numbers = range(self.num_local) if numbers is None else numbers
        if self._experts is None:
            with having(module, len(numbers), weights):
                yield
            return
        children = [self._children[number] for number in numbers]
        with having(module, len(children)) if hasattr(module, "num_experts") else nullcontext():
            every = self._experts._modules
            self._experts._modules = {str(at): child for at, child in enumerate(children)}
            try:
                yield
            finally:
                self._experts._modules = every

    def _one_by_one(
        self, module: nn.Module, forward: Forward, pairs: Tensor, experts: Tensor
    ) -> Tensor:
        """The same, with a call for each expert: no bit depends on the other experts of this rank.

        A module may sort pairs by expert, and torch's sort puts equal ones in any order.
        """
        order = torch.argsort(experts, stable=True)
        counts = torch.bincount(experts, minlength=self.num_local).tolist()
        weights = {}
        if self._experts is None:
            weights = {name: torch.split(value, 1) for name, value in stacked_values(module)}
        outputs = []
        for number, inputs in enumerate(torch.split(pairs[order], counts)):
            if len(inputs):
                one = {name: parts[number] for name, parts in weights.items()}
                index = experts.new_zeros(len(inputs), 1)
                with self._having(module, [number], one):
                    outputs.append(forward(module, inputs, index, inputs.new_ones(len(inputs), 1)))
        return torch.cat(outputs)[torch.argsort(order)]

    def _count(self, trips: Sequence[Trip], num_pairs: int) -> None:
        """Add the tokens of own experts, and those of the `num_pairs` of own tokens that go nowhere."""
        if self._counts is None:
            self._counts = trips[0].experts.new_zeros(self.num_experts + 1)
        for trip in trips:
            places = trip.experts + self._group.rank * self.num_local
            self._counts.index_add_(0, places, torch.ones_like(places))
        self._num_dropped += num_pairs - sum(trip.num_pairs for trip in trips)

    def take_counts(self) -> Tensor:
        """Tokens by expert that this rank has computed since the last call, and dropped pairs [E + 1]."""
        counts, self._counts = self._counts, None
        if counts is None:
            counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=self._group.device)
        counts[-1], self._num_dropped = self._num_dropped, 0
        return counts

    def _inputs(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors of a call: hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K].

        names: of these arguments in the module's own forward.

        Raises:
            UsageError: the module is called otherwise.
        """
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        hidden, index, weights = (given.pop(name, None) for name in names)
        has_more = len(args) > len(names) or any(value is not None for value in given.values())
        if not has_more and all(isinstance(one, Tensor) for one in (hidden, index, weights)):
            if hidden.dim() == 2 == index.dim() and index.shape == weights.shape:
                return hidden, index, weights
        parts = [*args, *kwargs.values()]
        shapes = [
            list(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in parts
        ]
        raise UsageError(
            f"{self._setting}: {self.name} is called with {', '.join(map(str, shapes))}, and needs tensors "
            "hidden_states [T, H], top_k_index [T, K], top_k_weights [T, K]; leave this module out with "
            "expert_parallel.expert_pattern"
        )

    @torch.no_grad()
    def _prove(self, module: nn.Module, forward: Forward, hidden: Tensor, weights: Tensor) -> None:
        """Compare the module's forward on a few tokens with the sum over single experts. For all ranks.

        Raises:
            UsageError: on every rank of the group: the module does something else with its experts.
        """
        num_choices = min(self.num_local, weights.shape[1])
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randn(PROOF_TOKENS, hidden.shape[1], generator=generator).to(hidden)
        index = torch.rand(PROOF_TOKENS, self.num_local, generator=generator).argsort(1)
        index = index[:, :num_choices].to(hidden.device)
        scale = torch.rand(PROOF_TOKENS, num_choices, generator=generator).to(weights)
        error: Exception | None = None
        difference = torch.zeros((), dtype=torch.float64)
        try:
            pairs = tokens.repeat_interleave(num_choices, 0)
            with evaluating(module):  # dropout draws other numbers for each call
                with self._having(module):
                    whole = forward(module, tokens, index, scale)
                # one at a time: each depends on its own weights alone, not on its number
                outputs = self._one_by_one(module, forward, pairs, index.reshape(-1))
                alone, crowd = self._alone_and_in_a_crowd(module, forward, tokens)
            parts = (outputs * scale.reshape(-1, 1)).view(PROOF_TOKENS, num_choices, -1).sum(1)
            difference = torch.maximum(_difference(whole, parts), _difference(alone, crowd)).cpu()
            self._check_state(module, forward, pairs, index.reshape(-1))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as raised:
            error, difference = raised, difference.fill_(torch.inf)
        flag = difference.view(1).to(self._group.device)
        most = float(self._group.gather_small(flag, what=f"the proof of {self.name}").max())
        is_short = hidden.dtype.itemsize <= 2 or torch.is_autocast_enabled(hidden.device.type)
        near = NEAR_16_BITS if is_short else NEAR
        if not most <= near:
            why = f" ({type(error).__name__}: {error})" if error is not None else ""
            raise UsageError(
                f"{self._setting}: {self.name} ({type(module).__name__}) is not the weighted sum of its "
                f"experts: one at a time they differ by {most:.1e} of the largest output{why}; leave this "
                "module out with expert_parallel.expert_pattern"
            ) from error

    def _alone_and_in_a_crowd(
        self, module: nn.Module, forward: Forward, tokens: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first expert's outputs [C, H]: of single tokens, and of many tokens when it is the second of two.

        They differ where an expert has a capacity, depends on its other tokens, or on its number.
        """
        one, two = {}, {}
        if self._experts is None:
            one = {name: value[:1] for name, value in stacked_values(module)}
            two = {name: torch.cat([value, value]) for name, value in one.items()}
        crowd = tokens.repeat(CROWD // len(tokens), 1)
        index = torch.zeros(len(crowd), 1, dtype=torch.int64, device=tokens.device)
        weights = crowd.new_ones(len(crowd), 1)
        with self._having(module, [0], one):
            alone = [forward(module, t, index[:1], weights[:1]) for t in torch.split(tokens, 1)]
        with self._having(module, [0, 0], two):
            together = forward(module, crowd, index + 1, weights)
        return torch.cat(alone).repeat(CROWD // len(tokens), 1), together

    def _check_state(
        self, module: nn.Module, forward: Forward, pairs: Tensor, experts: Tensor
    ) -> None:
        """
        Raises:
            ValueError: the forward keeps something, which other ranks would not have.
        """
        values = [(buffer, buffer.clone()) for buffer in module.buffers()]
        with keeping_draws(pairs.device), evaluating(module), self._having(module):
            module.train()
            held = [dict(vars(m)) for m in module.modules()]  # no new value gets their ids
            before = {m: state_of(m) for m in module.modules()}
            forward(module, pairs, experts.unsqueeze(1), pairs.new_ones(len(pairs), 1))
            after = {m: state_of(m) for m in before}
            held.clear()
        for buffer, value in values:
            buffer.copy_(value)
        for each, state in after.items():
            changed = [name for name in state if state[name] != before[each].get(name)]
            if changed:
                raise ValueError(f"its forward writes self.{changed[0]} of {type(each).__name__}")


def _difference(one: Tensor, two: Tensor) -> Tensor:
    """The largest, over the largest of `one`."""
    size = one.double().abs().max().clamp(min=1e-30)
    return (one.double() - two.double()).abs().max() / size


def stacked_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The weights of all experts of `module`, as its forward reads them. PEFT computes some of them."""
    names = [*module._parameters, *getattr(module, "parametrizations", ())]
    for name in names:
        value = getattr(module, name)
        if value is not None:
            yield name, value


def stand_in(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """A forward in place of experts [T, H], which reads no expert. It is smooth where the choice changes."""
    places = torch.arange(1, top_k_weights.shape[1] + 1, device=top_k_weights.device)
    return hidden_states * (top_k_weights * places).sum(1, keepdim=True).to(hidden_states.dtype)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Inside, `module` is in evaluation mode."""
    modes = [(each, each.training) for each in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


@contextmanager
def having(
    module: nn.Module, num_experts: int, weights: Mapping[str, Tensor] | None = None
) -> Iterator[None]:
    """Inside, `module` has so many experts, as its forward reads it. weights: in place of its own."""
    before, params, kind = module.num_experts, dict(module._parameters), type(module)
    module.num_experts = num_experts  # type: ignore[assignment]
    if weights:
        if hasattr(module, "parametrizations"):  # its class reads computed weights
            module.__class__ = kind.__mro__[1]
        module._parameters.update(weights)  # type: ignore[arg-type]
    try:
        yield
    finally:
        module.num_experts = before
        if weights:
            module.__class__ = kind
            module._parameters.clear()
            module._parameters.update(params)


__all__ = ["ExpertLayer", "having", "stand_in"]
