"""Features of the model: which blocks run, how often, with whose parameters, checkpointed or not."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .case import Case
from .feature import BlockCall, Call, Feature
from .model import SIMPLE, Net

if TYPE_CHECKING:
    from .side import Side


class ReusedBlocks(Feature):
    """A block is called two or three times in a forward."""

    share = 0.2

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.number = draw.randrange(len(case.blocks))
        self.times = draw.choice((2, 2, 3))
        self.at_end = draw.random() < 0.5

    def route(self, route: list[int], call: Call) -> list[int]:
        if self.at_end:
            return route + [self.number] * (self.times - 1)
        return [n for n in route for _ in range(self.times if n == self.number else 1)]


class Stochastic(Feature):
    """Blocks are left out at random, the same ones on every rank."""

    share = 0.1

    def route(self, route: list[int], call: Call) -> list[int]:
        pick = call.random(self.case)
        return [number for number in route if pick.random() < 0.7]


class Divergent(Feature):
    """Blocks are left out at random, other ones on each rank."""

    excludes = ("EmbeddingBlock",)  # what one rank alone writes in forward is nobody else's

    share = 0.15

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.is_sharded or bool(case.zero.get("divergent_graphs"))

    def route(self, route: list[int], call: Call) -> list[int]:
        pick = call.random(self.case, by_rank=True)
        return [number for number in route if pick.random() < 0.7]


class _Checkpointed(Feature):
    """Blocks run again in backward."""

    share = 0.15
    excludes: tuple[str, ...] = (
        *(
            "NoneBlock",
            "DataclassBlock",
            "DictBlock",
            "TupleBlock",
        ),  # reentrant ones lose their graph
        *(
            "NormBlock",
            "EmbeddingBlock",
        ),  # running twice, they write twice, in an order of their own
    )

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        every = [n for n in range(len(case.blocks)) if draw.random() < 0.7]
        self.numbers = every or [draw.randrange(len(case.blocks))]

    def is_reentrant(self, call: Call) -> bool:
        raise NotImplementedError

    def wrap(self, net: Net, number: int, block: BlockCall, call: Call) -> BlockCall:
        if number not in self.numbers or not torch.is_grad_enabled():
            return block
        reentrant = self.is_reentrant(call)
        return lambda x: checkpoint(block, x, use_reentrant=reentrant)


class Checkpointed(_Checkpointed):
    """Recomputed in the same graph."""

    excludes = ("NormBlock", "EmbeddingBlock", "SpectralNormBlock", "NoneBlock")

    def is_reentrant(self, call: Call) -> bool:
        return False


class Reentrant(_Checkpointed):
    """Recomputed in a graph of its own."""

    excludes = (
        *(*_Checkpointed.excludes, "Checkpointed", "GradientPenalty"),
        "ParameterBlock",  # torch makes the parameter itself an output of the checkpoint, and never returns
    )

    def is_reentrant(self, call: Call) -> bool:
        return True


class OneReentrant(_Checkpointed):
    """Rank 0 recomputes in a graph of its own, the others in the same graph."""

    share = 0.05
    excludes = (*Reentrant.excludes, "Reentrant")

    @classmethod
    def fits(cls, case: Case) -> bool:
        return not case.is_sharded or bool(case.zero.get("divergent_graphs"))

    def is_reentrant(self, call: Call) -> bool:
        return call.rank == 0


def matrix_of(net: Net, number: int) -> nn.Parameter:
    """A parameter of this block with `width` columns."""
    block = net.blocks[number]
    return block.a.weight if hasattr(block, "a") else block.table


class OutsideUse(Feature):
    """The root uses a block's weight itself: before the block, after it, or both."""

    share = 0.15

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.number = draw.randrange(len(case.blocks))
        self.where = draw.choice(("before", "after", "both"))

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        return x if self.where == "after" else self._use(net, x)

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        return h if self.where == "before" else self._use(net, h)

    def _use(self, net: Net, x: Tensor) -> Tensor:
        return x + 0.2 * torch.tanh(x @ matrix_of(net, self.number).t()).mean(1, keepdim=True)


class TiedBlocks(Feature):
    """Two blocks share a weight."""

    share = 0.12

    @classmethod
    def fits(cls, case: Case) -> bool:
        return len(_twins(case)) > 0

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.pair = draw.choice(_twins(case))

    def build(self, net: Net) -> None:
        one, two = (net.blocks[number] for number in self.pair)
        two.a.weight = one.a.weight


def _twins(case: Case) -> list[tuple[int, int]]:
    plans = list(enumerate(case.blocks))
    return [
        (i, j)
        for i, one in plans
        for j, two in plans
        if i < j
        and one.hidden == two.hidden
        and not {"OnlyViewBlock", "ParameterBlock", "FrozenBlock"} & {one.kind, two.kind}
    ]


class TiedRoot(Feature):
    """A block's weight is the root's, too, through another module."""

    share = 0.08

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.number = draw.randrange(len(case.blocks))

    def build(self, net: Net) -> None:
        net.tied = nn.Module()
        net.tied.weight = matrix_of(net, self.number)

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        return h + 0.1 * (h @ net.tied.weight.t()).tanh().mean(1, keepdim=True)


class RootParameterIntoBlocks(Feature):
    """The root has a parameter that goes into the blocks as an input."""

    share = 0.1

    def build(self, net: Net) -> None:
        net.query = nn.Parameter(torch.randn(1, self.case.width) * 0.3)

    def wrap(self, net: Net, number: int, block: BlockCall, call: Call) -> BlockCall:
        if number:
            return block
        merge = net.blocks[number].merge
        return lambda x: block(x + merge(net.query, block(net.query)) * 0.1)

    excludes = (
        "NormBlock",
        "EmbeddingBlock",
        "NoneBlock",
        "Checkpointed",
        "Reentrant",
        "OneReentrant",
    )


class FrozenFromTheStart(Feature):
    """Some parameters do not train; every block has a gradient to hand on, or a checkpoint refuses."""

    share = 0.15

    def build(self, net: Net) -> None:
        pick = random.Random(self.case.seed)
        for name, param in net.named_parameters():
            is_wanted = name.startswith(("out", "inp")) or name.endswith("table")
            if pick.random() < 0.3 and not is_wanted and param.is_floating_point():
                param.requires_grad_(False)


class AuxiliaryLoss(Feature):
    """A loss of an inner activation is added to the result, past the head."""

    share = 0.08

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        return h + 0.1 * h.float().square().mean().to(h.dtype)


class _AroundOneBlock(Feature):
    """Something happens around one block's calls."""

    share = 0.06

    @classmethod
    def fits(cls, case: Case) -> bool:
        return any(plan.kind in SIMPLE for plan in case.blocks)

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.number = draw.choice([n for n, b in enumerate(case.blocks) if b.kind in SIMPLE])

    def wrap(self, net: Net, number: int, block: BlockCall, call: Call) -> BlockCall:
        return (lambda x: self.around(block, x)) if number == self.number else block

    def around(self, block: BlockCall, x: Tensor) -> Tensor:
        raise NotImplementedError


class DetachedOutput(_AroundOneBlock):
    """Nothing flows back through the block."""

    def around(self, block: BlockCall, x: Tensor) -> Tensor:
        return x + block(x).detach()


class WithoutGradient(_AroundOneBlock):
    """The block runs under no_grad, as a frozen backbone does."""

    def around(self, block: BlockCall, x: Tensor) -> Tensor:
        with torch.no_grad():
            out = block(x)
        return x + out


class OutputWritten(_AroundOneBlock):
    """The block's output is changed in place."""

    excludes = ("UserHooks",)  # torch refuses it where the module has a full backward hook

    def around(self, block: BlockCall, x: Tensor) -> Tensor:
        return block(x).mul_(0.9)


class InputKept(_AroundOneBlock):
    """The block is called on a part of its input, and on the rest."""

    excludes = ("NormBlock",)

    def around(self, block: BlockCall, x: Tensor) -> Tensor:
        return torch.cat([block(x[:1]), block(x[1:])])


class KeptView(Feature):
    """The root takes a view of a block's weight before the block runs, and uses it after the last block."""

    share = 0.06

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.number = draw.randrange(len(case.blocks))

    def enter(self, net: Net, x: Tensor, call: Call) -> Tensor:
        net.kept = matrix_of(net, self.number).t()
        return x

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        view, net.kept = net.kept, None
        return h + 0.1 * (h @ view).tanh().mean(1, keepdim=True)


class BlockUsesAnother(Feature):
    """A block's forward calls the layers of another block."""

    share = 0.08

    @classmethod
    def fits(cls, case: Case) -> bool:
        return len(_with_layers(case)) > 1

    def __init__(self, case: Case, draw: random.Random) -> None:
        super().__init__(case, draw)
        self.pair = draw.sample(_with_layers(case), 2)

    def build(self, net: Net) -> None:
        one, two = (net.blocks[number] for number in self.pair)
        one.__dict__["helper"] = two  # not a submodule: it has one place in the tree


def _with_layers(case: Case) -> list[int]:
    without = ("OnlyViewBlock", "ParameterBlock")
    return [number for number, plan in enumerate(case.blocks) if plan.kind not in without]


class KeywordInputs(Feature):
    """The model is called with a dict and keywords instead of tensors."""

    share = 0.1


class UserHooks(Feature):
    """The script has hooks of its own on modules and activations."""

    share = 0.1

    def build(self, net: Net) -> None:
        net.blocks[0].register_forward_hook(lambda module, inputs, output: None)
        net.blocks[-1].register_forward_pre_hook(lambda module, inputs: None)
        net.out.register_forward_hook(lambda module, inputs, output: output * 0.9)
        net.inp.register_full_backward_hook(lambda module, grad_in, grad_out: None)
        if self.case.blocks[0].kind in SIMPLE and not self.case.has("GradientPenalty"):
            net.blocks[0].register_full_backward_hook(lambda module, grad_in, grad_out: None)

    def leave(self, net: Net, h: Tensor, call: Call) -> Tensor:
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.8)
        return h


class GradientHooks(Feature):
    """Hooks on parameters: one halves a gradient, one reads `.grad` when it is complete."""

    share = 0.12

    def initialized(self, side: Side) -> None:
        def read(param: nn.Parameter) -> None:
            assert param.grad is not None, "a hook after accumulation sees no gradient"
            side.hooked.append(param.grad.cpu().double().norm().item())

        for number, (_, param) in enumerate(side.net.named_parameters()):
            if param.requires_grad and param.numel():
                if number % 3 == 0:
                    param.register_hook(lambda grad: grad * 0.5)
                if number % 4 == 0:
                    param.register_post_accumulate_grad_hook(read)

    def after_backward(self, side: Side, call: Call) -> None:
        if not self._is_scaled() and not self._comes_often():
            side.see("gradients in hooks", math.hypot(*side.hooked))
        side.hooked.clear()

    def _is_scaled(self) -> bool:
        """Of a loss times the loss scale, or not divided by the accumulation steps yet."""
        return self.case.precision == "fp16" or self.case.has("BareBackward")

    def _comes_often(self) -> bool:
        """How often a hook is called by reentrant checkpoints is torch's own affair."""
        return self.case.has("Reentrant", "OneReentrant") or self.case.uses("InnerCheckpointBlock")
