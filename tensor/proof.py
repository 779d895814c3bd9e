"""Proves that sliced layers compute what the whole ones compute, with the inputs of the first forward.

    first forward of the first block of each kind, with copies of parameters and inputs in fp32, enlarged
        whole    a copy with gathered weights
        sliced   block(inputs)          outputs, gradients of inputs and parameters
    noise    the copy with values that are rounded otherwise: differences that rounding explains
    they differ by more -> UsageError that names the first module with another output

A plan that is wrong for a model trains without an error, with wrong numbers. So every plan is proven once.
Where a block cannot run in fp32, as with attention that is made for 16 bits, it is proven in its own dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..ops.boxes import Boxes, put, ranks_with_copies, taken
from ..ops.comm.collectives import Collectives, counting_as
from ..ops.device import keeping_draws
from ..ops.torch_internals import tree_leaves, tree_map
from ..utils.errors import UsageError
from .kinds import kind_of
from .plan import ParallelPlan, is_inside
from .proof_values import (
    as_proven,
    computed_in,
    enlarged,
    enlarged_input,
    exactly,
    rounded_otherwise,
    standing_in,
)
from .quiet_runs import Holding, alone, without_cache
from .regions import layers_in, regions
from .slicing import Sliced
from .tokens import Tokens, with_activations

KIND = "proof of slices"
ATTEMPTS = (1, 2, 8, 32)  # forwards in training
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
SMALL = 1e-2  # of the largest gradient of a block
NOISE = 8.0  # times what one rounding of all values changes

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
Forward = Callable[..., Any]  # (module, *args, **kwargs)


class _Run(NamedTuple):
    """What a run of a block gave. outputs: of its modules, by name, in the order in which they ended."""

    outputs: dict[str, list[Tensor]]
    inputs: list[Tensor | None]
    params: dict[str, Tensor | None]


class _Noise(NamedTuple):
    """The largest difference that other rounding makes, for the gradients of a run."""

    inputs: list[float]
    params: dict[str, float]


class _Scale(NamedTuple):
    """What is small beside the largest element of a gradient. small: relative to it; noise: absolute."""

    small: float = 0.0
    noise: float = 0.0


@final
class Proof:
    """Compares one block of each kind, and what is cut outside of blocks.

    Made before the layers are cut, and started after that.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[tuple[str, nn.Module]],
        styles: ParallelPlan,
        apart: Collection[str] = (),
        stand_ins: Mapping[str, Forward] | None = None,
    ) -> None:
        """
        Args:
            model: what this rank has of the model.
            blocks: name and module of its blocks.
            styles: the layers that will be cut.
            apart: modules that are not proven here.
            stand_ins: forwards that run without them, by the name of a module.
        """
        self._apart, self._stand_ins = apart, stand_ins or {}
        self._blocks: dict[str, tuple[nn.Module, nn.Module]] = {}  # name -> the block, its copy
        self._hooks: list[Any] = []
        region_names = regions(styles, [name for name, _ in blocks])
        self._regions = frozenset(region_names)
        kinds: set[Any] = set()
        for name, block in [
            *blocks,
            *((region, model.get_submodule(region)) for region in region_names),
        ]:
            layers = layers_in(name, styles)
            kind = kind_of(block, layers)
            if layers and kind not in kinds:
                kinds.add(kind)
                self._blocks[name] = block, _on_meta(block)

    def start(
        self, sliced: Sliced, group: Collectives, opened: Sequence[Collectives], holding: Holding
    ) -> None:
        """Run at the first forward of each block, after the hooks that gather its parameters.

        opened: all groups of this engine. holding: inside, all parameters of a module are there.
        """
        for name, (block, whole) in self._blocks.items():
            case = _Case(name, block, whole, sliced, group, opened)
            prefix = f"{name}." if name else ""
            inner = [n for n, _ in block.named_modules()]
            case.apart = [n for n in inner if prefix + n in self._apart]
            case.stand_ins = {
                n: self._stand_ins[prefix + n] for n in inner if prefix + n in self._stand_ins
            }
            if name in self._regions:
                case.is_region = True
                case.around = partial(alone, block, holding)
            if name not in sliced.tokens.names:
                case.tokens = None
            prove = partial(self._prove, case, len(self._hooks))
            self._hooks.append(block.register_forward_pre_hook(prove, with_kwargs=True))
        self._blocks = {}

    def _prove(
        self,
        case: _Case,
        hook_number: int,
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if not case.block.training or case.group.was_reopened:
            return
        case.num_forwards += 1
        if case.num_forwards in ATTEMPTS and (case.run(args, kwargs) or case.is_last_attempt):
            self._hooks[hook_number].remove()

    def stop(self) -> None:
        """Prove nothing any more."""
        for hook in self._hooks:
            hook.remove()


@final
class _Case:
    """One block, and its whole copy on the meta device."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        whole: nn.Module,
        sliced: Sliced,
        group: Collectives,
        opened: Sequence[Collectives],
    ) -> None:
        self.name = name
        self._called = name or "the model"
        self.block = block
        self._whole = whole
        self._sliced = sliced
        self.group = group
        self._opened = opened
        self.num_forwards = 0  # in training
        self.is_region = False
        self.apart: Collection[str] = ()
        self.stand_ins: Mapping[str, Forward] = {}
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self.tokens = sliced.tokens.tokens  # of a block whose activations are cut; else None

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the block is proven.

        It is not where outputs are not finite, or where a gradient is zero, as before a layer of zeros.

        Raises:
            UsageError: on all ranks of the group: a rank has found a difference.
        """
        with self.around(), counting_as(KIND, self._opened):
            return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        modes = {module: module.training for module in self.block.modules()}
        self.block.eval()  # no dropout: it draws other numbers where activations are cut
        self._whole.eval()
        try:
            with _having(self.block, self.stand_ins), _having(self._whole, self.stand_ins):
                with exactly(self.group.device):
                    done = self._compared(args, kwargs, as_proven)
                if done is None:
                    done = self._compared(args, kwargs, lambda value: value)
            assert done is not None
            return done
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _compared(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
    ) -> bool | None:
        """As `run`, with what `change` makes of the model's values; None: the block cannot run with that."""
        inputs: Inputs = tree_map(change, (args, dict(kwargs)))
        if self.tokens is not None:
            inputs = with_activations(self.name, inputs[0], inputs[1], self._all_tokens)
        inputs = tree_map(enlarged_input, inputs)
        params = {
            name: nn.Parameter(enlarged(change(self._gathered(param))), param.requires_grad)
            for name, param in self.block.named_parameters()
            if not is_inside(name, self.apart)
        }
        buffers = {name: change(buffer) for name, buffer in self.block.named_buffers()}
        with standing_in(self._whole, params, buffers):
            theirs = self._run_whole(inputs, can_fail=change is as_proven)
        if theirs is None:
            return None
        # on each rank: attention in it may send
        with standing_in(self._whole, params, buffers, rounded_otherwise):
            again = self._of_own_tokens(self._ran(self._whole, *inputs, rounds=True))
        with standing_in(self.block, self._own_parts(params), buffers):
            mine = self._run_sliced(*self._with_own_tokens(*inputs))
        return self._judge(mine, theirs, again)

    def _run_whole(self, inputs: Inputs, *, can_fail: bool) -> _Run | None:
        """can_fail: None on all ranks where it raises on one."""
        run = None
        try:
            run = self._of_own_tokens(self._ran(self._whole, *inputs))
        except Exception:  # any: it is raised again in the block's own dtype
            if not can_fail:
                raise
        if can_fail:
            said = torch.tensor([run is None], device=self.group.device).long()
            if self.group.gather_small(said, what="the proof of slices").any():
                return None
        return run

    def _judge(self, mine: _Run, theirs: _Run, again: _Run) -> bool:
        noise = _noise(theirs, again)
        difference = self._difference(mine, theirs, noise)
        is_finite = all(bool(out.isfinite().all()) for out in theirs.outputs[""])
        shows = all(grad is not None and bool(grad.any()) for grad in theirs.params.values())
        said = torch.tensor(
            [bool(difference) and is_finite, not (is_finite and shows)], device=self.group.device
        )
        table = self.group.gather_small(said.long(), what="the proof of slices")
        differs, is_open = table.any(0).tolist()
        if differs:
            raise UsageError(
                f"tensor_parallel: {self._called} computes something else in {self.group.world_size} slices "
                f"than whole: {difference or 'another rank says where'}; correct tensor_parallel.plan, or "
                "write one where the plan is the model's own"
            )
        return not is_open

    @property
    def is_last_attempt(self) -> bool:
        """There is no later one. Data ranks have to gather a region at the same time, so it has one attempt."""
        return self.is_region or self.num_forwards >= ATTEMPTS[-1]

    def _all_tokens(self, activations: Tensor) -> Tensor:
        """The activations of all ranks, for the whole copy."""
        assert self.tokens is not None
        whole = self.tokens.gathered(activations.detach(), f"the input of {self.name}")
        return whole.requires_grad_(activations.requires_grad)

    def _of_own_tokens(self, run: _Run) -> _Run:
        """What this rank should have found, from a run with all tokens."""
        if self.tokens is None:
            return run
        of_own = self.tokens.of_own
        outputs = run.outputs | {"": [of_own(tensor) for tensor in run.outputs[""]]}
        inputs = [
            tensor if tensor is None or tensor.dim() != 3 else of_own(tensor)
            for tensor in run.inputs
        ]
        return _Run(outputs, inputs, run.params)

    def _with_own_tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Arguments with all tokens -> those of this rank."""
        if self.tokens is None:
            return args, kwargs
        return with_activations(self.name, args, kwargs, self._own_tokens)

    def _own_tokens(self, whole: Tensor) -> Tensor:
        assert self.tokens is not None
        return self.tokens.of_own(whole.detach()).requires_grad_(whole.requires_grad)

    def _ran(
        self,
        block: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tokens: Tokens | None = None,
        *,
        rounds: bool = False,
    ) -> _Run:
        device = self.group.device
        # the router of a mixture may draw in evaluation mode too: each run draws the same numbers
        with keeping_draws(device):
            torch.manual_seed(0)
            return _run(block, args, kwargs, tokens, self.apart, rounds=rounds)

    def _run_sliced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Run:
        try:
            return self._ran(self.block, args, kwargs, self.tokens)
        except (RuntimeError, ValueError) as error:
            if type(error) not in (RuntimeError, ValueError):
                raise  # no shapes that do not fit
            line = str(error).partition("\n")[0]
            raise UsageError(
                f"tensor_parallel: {self._called} cannot run in {self.group.world_size} slices: {line}; "
                "correct tensor_parallel.plan, or write one where the plan is the model's own"
            ) from error

    # -- parameters of the whole copy -------------------------------------------------------------------

    @torch.no_grad()
    def _gathered(self, param: nn.Parameter) -> Tensor:
        boxes = self._sliced.slices.get(id(param))
        return param.data if boxes is None else self._assembled(param.data, boxes)

    def _own_parts(self, params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """The slices of this rank, of whole parameters."""
        sliced = dict(params)
        for name, param in self.block.named_parameters():
            boxes = self._sliced.slices.get(id(param))
            if boxes is not None:
                part = taken(params[name].data, boxes[self.group.rank])
                sliced[name] = nn.Parameter(part, param.requires_grad)
        return sliced

    def _assembled(self, mine: Tensor, boxes: Boxes) -> Tensor:
        """The whole tensor, from the slices of all ranks."""
        whole = mine.new_empty(boxes[0].whole)
        for box, values in zip(boxes, self._of_all(mine, boxes), strict=True):
            put(whole, box, values)
        return whole

    def _of_all(self, mine: Tensor, boxes: Boxes) -> list[Tensor]:
        """The slices of all ranks."""
        outs = [mine.new_empty(box.shape) for box in boxes]
        parts = [mine.contiguous()] * len(outs)
        self.group.all_to_all(outs, parts, what=f"slices of {self.name}", kind=KIND).wait()
        return outs

    def _of_copies(self, grad: Tensor, boxes: Boxes) -> Tensor:
        """The gradient of a slice: the sum over the ranks with copies of it."""
        if len(set(boxes)) == len(boxes):
            return grad
        grads = self._of_all(grad, boxes)
        return torch.stack([grads[rank] for rank in ranks_with_copies(boxes, self.group.rank)]).sum(
            0
        )

    # -- the comparison ---------------------------------------------------------------------------------

    def _difference(self, mine: _Run, theirs: _Run, noise: _Noise) -> str:
        """What differs, in words; "": nothing. Gradients are compared in any case: for all ranks."""
        others = self._differing_grad(mine, theirs, noise)
        for name, outputs in theirs.outputs.items():
            for a, b in zip(mine.outputs.get(name, ()), outputs, strict=False):
                if a.shape == b.shape and not _is_close(a, b):
                    return f"the output of {name or 'the block'} differs"
        for a, b in zip(mine.outputs[""], theirs.outputs[""], strict=False):
            if a.shape != b.shape:
                return f"its output is {list(a.shape)} and not {list(b.shape)}"
        for number, (grad, wanted) in enumerate(zip(mine.inputs, theirs.inputs, strict=True)):
            scale = _Scale(noise=noise.inputs[number])
            if grad is not None and wanted is not None and not _is_close(grad, wanted, scale):
                return f"the gradient of its input {number} differs"
        return others

    def _differing_grad(self, mine: _Run, theirs: _Run, noise: _Noise) -> str:
        """The first parameter whose gradient differs, in words; "": none. For all ranks."""
        params = dict(self.block.named_parameters())
        # a gradient may be zero but for rounding, as that of a bias of keys: the others say what is small
        grads = [
            float(b.abs().max()) for b in theirs.params.values() if b is not None and b.numel()
        ]
        small = SMALL * max(grads, default=0.0)
        difference = ""
        for name, wanted in theirs.params.items():
            if wanted is None:  # on all ranks
                continue
            own_grad = mine.params[name]
            grad = wanted.new_zeros(params[name].shape) if own_grad is None else own_grad
            scale = _Scale(small, noise.params[name])
            if not self._has_close_grad(params[name], grad, wanted, scale):
                difference = difference or f"the gradient of {name} differs"
        return difference

    def _has_close_grad(
        self, param: nn.Parameter, mine: Tensor, theirs: Tensor, scale: _Scale
    ) -> bool:
        boxes = self._sliced.slices.get(id(param))
        if boxes is not None:
            part = taken(theirs, boxes[self.group.rank])
            return _is_close(self._of_copies(mine, boxes), part, scale)
        if id(param) in self._sliced.partial:
            mine = mine.clone(memory_format=torch.contiguous_format)
            self.group.all_reduce(mine, what="a proven gradient", kind=KIND).wait()
        return _is_close(mine, theirs, scale)


def _on_meta(block: nn.Module) -> nn.Module:
    """A copy of `block` without values. It shares the model's config, which may change later."""
    memo: dict[int, Any] = {}
    for module in block.modules():
        config = module.__dict__.get("config")
        memo[id(config)] = config
    for tensor in (*block.parameters(), *block.buffers()):
        empty: Any = torch.empty_like(tensor, device="meta")
        is_param = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
    return copy.deepcopy(block, memo)


def _run(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    tokens: Tokens | None,
    apart: Collection[str],
    *,
    rounds: bool,
) -> _Run:
    """Forward and backward without the hooks of the block itself.

    tokens: its activations are cut. apart: modules whose parameters are left out. rounds: round its inputs
    otherwise.
    """
    leaves: list[Tensor] = []

    def fresh(value: Any) -> Any:
        value = without_cache(value)
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if not value.requires_grad:
            return value.detach()
        detached = value.detach()
        leaves.append((rounded_otherwise(detached) if rounds else detached).requires_grad_())
        return leaves[-1]

    modules = dict(block.named_modules())
    outputs: dict[str, list[Tensor]] = {name: [] for name in modules}
    hooks = [
        module.register_forward_hook(_keeping(outputs, name))
        for name, module in modules.items()
        if name
    ]
    try:
        with torch.enable_grad():
            result = block.forward(*tree_map(fresh, args), **tree_map(fresh, dict(kwargs)))
        del outputs[""]
        outputs[""] = _floats(result)
        params = {
            name: param
            for name, param in block.named_parameters()
            if param.requires_grad and not is_inside(name, apart)
        }
        seeds = _seeds(outputs[""], tokens)
        wanted = [*leaves, *params.values()]
        grads: Sequence[Tensor | None] = [None] * len(wanted)
        if any(out.requires_grad for out in outputs[""]):
            pairs = [(o, s) for o, s in zip(outputs[""], seeds, strict=True) if o.requires_grad]
            grads = torch.autograd.grad(
                [out for out, _ in pairs], wanted, [seed for _, seed in pairs], allow_unused=True
            )
    finally:
        for hook in hooks:  # after backward: a recomputed forward needs the same graph
            hook.remove()
    by_name = dict(zip(params, grads[len(leaves) :], strict=True))
    kept = {name: [out.detach() for out in outs] for name, outs in outputs.items()}
    return _Run(kept, list(grads[: len(leaves)]), by_name)


@contextmanager
def _having(block: nn.Module, forwards: Mapping[str, Forward]) -> Iterator[None]:
    """Inside, modules of `block` have these forwards."""
    before = []
    for name, forward in forwards.items():
        module = block.get_submodule(name)
        before.append((module, module.__dict__.get("forward")))
        module.forward = MethodType(forward, module)
    try:
        yield
    finally:
        for module, own in before:
            if own is None:
                module.__dict__.pop("forward")
            else:
                module.forward = own


def _seeds(outputs: Sequence[Tensor], tokens: Tokens | None) -> list[Tensor]:
    """The gradients of the outputs, the same numbers on every rank; of own tokens, where these are cut."""
    generator = torch.Generator().manual_seed(1)
    if tokens is None:
        return [torch.randn(out.shape, generator=generator).to(out) for out in outputs]
    seeds = []
    for out in outputs:
        shape = [len(out), out.shape[1] * tokens.num_ranks, *out.shape[2:]]
        seeds.append(tokens.of_own(torch.randn(shape, generator=generator).to(out)))
    return seeds


def _keeping(outputs: dict[str, list[Tensor]], name: str) -> Callable[..., None]:
    def keep(_: nn.Module, __: Any, result: Any) -> None:
        # whatever is there: a recomputed forward writes it again, by the same graph
        outputs.pop(name)  # in the order of the calls: the innermost difference is named
        outputs[name] = _floats(result)

    return keep


def _floats(value: Any) -> list[Tensor]:
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _tolerance(tensor: Tensor) -> float:
    return TOLERANCES.get(computed_in(tensor), 1e-1)


def _is_close(a: Tensor, b: Tensor, scale: _Scale | None = None) -> bool:
    """Equal but for rounding, in relation to the largest element, and to `scale`."""
    if not b.numel():
        return True
    scale = scale or _Scale()
    limit = _tolerance(b) * max(float(b.abs().max()), scale.small, 1e-30)
    return float((a - b).abs().max()) <= max(limit, NOISE * scale.noise)


def _noise(first: _Run, second: _Run) -> _Noise:
    """The largest difference of each gradient of two runs."""
    params = {name: _largest_difference(a, second.params[name]) for name, a in first.params.items()}
    pairs = zip(first.inputs, second.inputs, strict=True)
    return _Noise([_largest_difference(a, b) for a, b in pairs], params)


def _largest_difference(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None or not a.numel():
        return 0.0
    return float((a - b).abs().max())


__all__ = ["Proof"]
