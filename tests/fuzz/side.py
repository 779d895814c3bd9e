"""What a training script may do, whoever trains: plain PyTorch or an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from .case import Case
from .feature import Call
from .model import Net

LOSS_SCALE = 2.0**6  # of fp16, static
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Side(ABC):
    """One rank's trainer. `seen` is what gets compared: (what, value) in the order in which they came."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.dtype = DTYPES[case.precision]
        self.accumulation = case.accumulation
        self.seen: list[tuple[str, Any]] = []
        self.norms: list[float] = []
        self.net: Net
        self.hooked: list[float] = []
        self.reference: Callable[..., Tensor]

    def see(self, what: str, value: Any) -> None:
        """Keep a value to be compared."""
        if isinstance(value, Tensor):
            value = value.detach().cpu().double()
            value = value.item() if value.numel() == 1 else value
        self.seen.append((what, value))

    def forward(self, x: Tensor, call: Call) -> Tensor:
        """The model's forward, with its inputs as the case has them, and random numbers of this call's own."""
        self.seed(call)
        if self.case.has("KeywordInputs"):
            out: Tensor = self.run({"inputs": [x]}, call=call)
            return out
        out = self.run(x, call)
        return out

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or the engine around it."""

    @abstractmethod
    def backward(
        self,
        loss: Tensor,
        *,
        retain_graph: bool = False,
        bare: bool = False,
        weight: float | None = None,
    ) -> None:
        """Gradients of `loss`, averaged over micro-batches; `bare` is the loss's own method.

        With `weight` on all micro-batches the average is weighted.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[Any]:
        """Nothing is reduced inside."""

    @abstractmethod
    def count(self) -> None:
        """A micro-batch is over that does not end the step."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the gradients."""

    @abstractmethod
    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager[Any]:
        """Parameters may be edited inside, on every rank alike."""

    @abstractmethod
    def uneven(self) -> AbstractContextManager[Any]:
        """Ranks may run unequal numbers of forwards inside."""

    @abstractmethod
    def value_of(self, param: nn.Parameter) -> Tensor:
        """The parameter's value in full precision."""

    @abstractmethod
    def grad_of(self, param: nn.Parameter) -> Tensor:
        """The gradient that the step will use."""

    @abstractmethod
    def load(self, state: dict[str, Tensor], *, by_module: bool) -> None:
        """Overwrite the model's values."""

    @abstractmethod
    def is_trained(self, param: nn.Parameter) -> bool:
        """The optimizer has it."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """The optimizer's own method."""

    @abstractmethod
    def save_and_go_on(self, stage: int | None = None) -> None:
        """Save a checkpoint, forget everything, load it; at another ZeRO stage, where one is given."""

    @abstractmethod
    def go_elsewhere_and_back(self) -> None:
        """Send the states to host memory, and bring them back."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The whole model's state dict."""

    @abstractmethod
    def make_reference(self) -> None:
        """`reference` is a frozen model of the start's values."""

    @abstractmethod
    def write(self, param: nn.Parameter, value: Tensor) -> None:
        """Overwrite a parameter by name, through no context."""

    @abstractmethod
    def write_grad(self, param: nn.Parameter, value: Tensor) -> None:
        """Overwrite the gradient that the step will use."""

    @abstractmethod
    def set_accumulation(self, steps: int) -> None:
        """From the next step on."""

    @abstractmethod
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""

    def call(self, step: int, micro_step: int, part: int = 0, *, is_training: bool = True) -> Call:
        return Call(self.rank, step, micro_step, part, is_training)

    def seed(self, call: Call) -> None:
        """Dropout draws the same on both sides, whatever ran before."""
        torch.manual_seed(self._number(call) + 1)

    def _number(self, call: Call) -> int:
        number = self.case.seed
        for part in (call.step, call.micro_step, call.part, call.rank):
            number = number * 31 + part
        return number % (1 << 40)

    def batch(self, call: Call, samples: int | None = None) -> Tensor:
        """This forward's samples: [n, width], the same for the same arguments."""
        generator = torch.Generator().manual_seed(self._number(call))
        shape = (samples or self.case.samples, self.case.width)
        return torch.randn(*shape, generator=generator).to(self.dtype)
