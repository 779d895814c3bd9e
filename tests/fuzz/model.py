"""The model: a root with an input and an output layer, and blocks of many kinds in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .case import BlockPlan, Case
from .feature import Call


class Block(nn.Module):
    """A residual MLP. Subclasses differ in what they hold, or in what they return."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        # of two or three elements: with a small eps their order would decide, and roundings with it
        self.norm = nn.LayerNorm(width, eps=0.5)
        self.a = nn.Linear(width, hidden)
        self.b = nn.Linear(hidden, width)

        self.__dict__["helper"] = (
            None  # another block, whose layers this one uses: BlockUsesAnother
        )

    def change(self, x: Tensor) -> Tensor:
        out = self.b(torch.tanh(self.a(self.norm(x))))
        return out if self.helper is None else out + 0.3 * self.helper.change(x)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x)

    def merge(self, x: Tensor, out: Any) -> Tensor:
        """What the model makes of the block's input and output."""
        return out


class TupleBlock(Block):
    def forward(self, x: Tensor, call: Call) -> Any:
        return self.change(x), None, [x.detach()]

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out[0]


class DictBlock(Block):
    def forward(self, x: Tensor, call: Call) -> Any:
        return {"hidden": {"new": self.change(x)}, "number": 3}

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out["hidden"]["new"]


@dataclass
class Output:
    hidden: Tensor
    extra: Tensor | None = None


class DataclassBlock(Block):
    def forward(self, x: Tensor, call: Call) -> Any:
        return Output(self.change(x))

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out.hidden


class NoneBlock(Block):
    """Returns nothing: the result is left on the module, as auxiliary losses often are."""

    def forward(self, x: Tensor, call: Call) -> Any:
        self.left = x + self.change(x)

    def merge(self, x: Tensor, out: Any) -> Tensor:
        left, self.left = self.left, None
        return left


class ViewBlock(Block):
    """Returns a view of one of its parameters beside its result."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.position = nn.Parameter(torch.randn(1, width) * 0.1)

    def forward(self, x: Tensor, call: Call) -> Any:
        return self.change(x), self.position.expand(len(x), -1)

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out[0] + out[1]


class OnlyViewBlock(Block):
    """Returns nothing but a view of a parameter: positions, learned queries."""

    def __init__(self, width: int, hidden: int) -> None:
        nn.Module.__init__(self)
        self.table = nn.Parameter(torch.randn(hidden + 1, width) * 0.1)

    def forward(self, x: Tensor, call: Call) -> Any:
        return self.table[1]

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out


class ParameterBlock(OnlyViewBlock):
    """Returns the parameter itself."""

    def forward(self, x: Tensor, call: Call) -> Any:
        return self.table

    def merge(self, x: Tensor, out: Any) -> Tensor:
        return x + out.mean(0)


class NormBlock(Block):
    """Has buffers that forward writes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.batch_norm = nn.BatchNorm1d(
            width, eps=0.5
        )  # of two samples: near 0 any rounding would be large

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(self.batch_norm(x))


class DropoutBlock(Block):
    def forward(self, x: Tensor, call: Call) -> Any:
        return x + nn.functional.dropout(self.change(x), 0.3, self.training)


class ScalarBlock(Block):
    """Has parameters of no dimension and of one element."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.gain * self.change(x) + self.shift


class EmptyBlock(Block):
    """Has a layer without inputs."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.empty = nn.Linear(0, width)
        nn.init.constant_(self.empty.bias, 0.1)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x) + self.empty(x[:, :0])


class FrozenNumbersBlock(Block):
    """Has frozen parameters that are whole numbers and truth values, as quantized layers do."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.code = nn.Parameter(torch.arange(width, dtype=torch.int8) % 3, requires_grad=False)
        self.mask = nn.Parameter(torch.arange(width) % 4 != 1, requires_grad=False)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x) * self.mask + 0.1 * self.code.to(x.dtype)


class FrozenBlock(Block):
    """LoRA: big frozen matrices, small trained ones."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.requires_grad_(False)
        self.low = nn.Parameter(torch.randn(width, 2) * 0.3)
        self.high = nn.Parameter(torch.randn(2, width) * 0.3)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x) + x @ self.low @ self.high


class WeightNormBlock(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        parametrizations.weight_norm(self.b)


class EmbeddingBlock(Block):
    """Its forward writes to its weight: `max_norm` renormalises the rows that are looked up."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.embedding = nn.Embedding(5, width, max_norm=0.9)

    def forward(self, x: Tensor, call: Call) -> Any:
        rows = (torch.arange(len(x), device=x.device) + call.step) % 5
        return x + self.change(x) + self.embedding(rows)


class ConvBlock(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x) + self.conv(x[:, None, :])[:, 0, :]


class _Twice(torch.autograd.Function):
    """A product with a hand-written backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum(0)


class FunctionBlock(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, call: Call) -> Any:
        return _Twice.apply(x + self.change(x), self.gain)


class AttentionBlock(Block):
    """torch's own attention uses the weights of its output layer without calling the layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.attention = nn.MultiheadAttention(width, 1, batch_first=True)

    def forward(self, x: Tensor, call: Call) -> Any:
        h = self.norm(x)[None]
        return x + self.attention(h, h, h, need_weights=False)[0][0] + self.change(x)


class RecurrentBlock(Block):
    """Keeps a list of its own parameters, and hands it to a fused kernel."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.lstm = nn.LSTM(width, 3)
        self.last = nn.Linear(3, width)

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.last(self.lstm(x[:, None])[0][:, 0]) + self.change(x)


class DoubleBlock(Block):
    """Has a parameter of another dtype than the rest."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.gain = nn.Parameter(torch.ones(width, dtype=torch.float64))

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.change(x) * self.gain.to(x.dtype)


class NestedBlock(Block):
    """Has blocks of its own in a list, as a stage of a network."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.inner = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])

    def forward(self, x: Tensor, call: Call) -> Any:
        for layer in self.inner:
            x = x + 0.3 * torch.tanh(layer(x))
        return x + self.change(x)


class SpectralNormBlock(Block):
    """Its forward writes to buffers that its weight is made with."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        parametrizations.spectral_norm(self.b)


class InnerCheckpointBlock(Block):
    """Recomputes a part of itself."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.last = nn.Linear(width, width)
        self.is_reentrant = hidden % 2 == 0

    def forward(self, x: Tensor, call: Call) -> Any:
        return x + self.last(checkpoint(self.change, x, use_reentrant=self.is_reentrant))


class UnusedBlock(Block):
    """Holds a layer that no forward uses."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__(width, hidden)
        self.spare = nn.Linear(hidden, width)


KINDS: dict[str, type[Block]] = {
    "plain": Block,
    **{
        kind.__name__: kind
        for kind in (
            *(TupleBlock, DictBlock, DataclassBlock, NoneBlock, ViewBlock, OnlyViewBlock),
            *(ParameterBlock, NormBlock, DropoutBlock, ScalarBlock, EmptyBlock),
            *(FrozenNumbersBlock, FrozenBlock, WeightNormBlock, EmbeddingBlock, ConvBlock),
            *(FunctionBlock, AttentionBlock, RecurrentBlock, DoubleBlock, NestedBlock, UnusedBlock),
            *(SpectralNormBlock, InnerCheckpointBlock),
        )
    },
}
# no gradient of their own gradient
DOUBLE_BACKWARD = set(KINDS) - {
    *("FunctionBlock", "RecurrentBlock", "AttentionBlock", "InnerCheckpointBlock")
}
# these return one tensor that is no parameter's
SIMPLE = {
    *("plain", "NormBlock", "DropoutBlock", "ScalarBlock", "EmptyBlock", "FrozenNumbersBlock"),
    *("FrozenBlock", "WeightNormBlock", "ConvBlock", "DoubleBlock", "NestedBlock", "UnusedBlock"),
    *("AttentionBlock", "RecurrentBlock", "SpectralNormBlock", "InnerCheckpointBlock"),
}


class Net(nn.Module):
    """Maps x [n, width] to [n, 1]; the case's features change what happens on the way."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.inp = nn.Linear(case.width, case.width)
        self.blocks = nn.ModuleList([_block(case.width, plan) for plan in case.blocks])
        self.out = nn.Linear(case.width, 1)
        for feature in case.features:
            feature.build(self)

    def forward(self, x: Any, call: Call) -> Tensor:
        x = x["inputs"][0] if isinstance(x, dict) else x
        features = self.case.features
        for feature in features:
            x = feature.enter(self, x, call)
        h = self.inp(x)
        route = list(range(len(self.blocks)))
        for feature in features:
            route = feature.route(route, call)
        for number in route:
            h = self._through(number, h, call)
        self.inner_loss = h.float().square().mean()  # what AuxiliaryBackward and InnerLoss take
        for feature in features:
            h = feature.leave(self, h, call)
        return self.out(h)

    def _through(self, number: int, h: Tensor, call: Call) -> Tensor:
        block = self.blocks[number]

        def run(x: Tensor) -> Any:
            return block(x, call)

        for feature in self.case.features:
            run = feature.wrap(self, number, run, call)
        return block.merge(h, run(h))


def _block(width: int, plan: BlockPlan) -> Block:
    return KINDS[plan.kind](width, plan.hidden)


def build(case: Case) -> Net:
    """The model, the same values on every call."""
    torch.manual_seed(case.seed % (1 << 31))
    return Net(case)
