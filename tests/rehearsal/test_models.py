"""Models, optimizers and loops on a CUDA device that is host memory: their numbers, and waits of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_ranks import ranks
from helpers import run_processes
from test_features import inputs_of
from test_rehearsal import config_of, waits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

STEPS, FIRST = 5, 2  # waits are counted after the first steps


class Odd(nn.Module):
    """A tied weight, a frozen block, an unused one, a counter, dropout, blocks that may be recomputed."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(24, 40), nn.Linear(24, 40)
        self.right.weight = self.left.weight
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        sizes = ((40, 40), (40, 40), (40, 40))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(*size), nn.GELU()) for size in sizes)
        self.drop, self.norm, self.head = nn.Dropout(0.1), nn.LayerNorm(40), nn.Linear(40, 7)
        self.register_buffer("calls", torch.zeros(()))
        self._recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        found = self.left(x) + self.right(x.flip(0))
        found = found + self.frozen(found)
        for block in self.blocks:
            found = found + self._run(block, found)
        return self.head(self.norm(found))  # type: ignore[no-any-return]

    def _run(self, block: nn.Module, x: Tensor) -> Any:
        def run(x: Tensor) -> Any:
            return self.drop(block(x))

        if not self._recompute:
            return run(x)
        return checkpoint(run, x, use_reentrant=self._recompute == "reentrant")


def trained(stage: int, precision: str, accumulation: int, case: dict[str, Any]) -> Any:
    """Losses and outputs of evaluations; norms, rates; the waits of micro-batches, steps and evaluations.

    case: keys of the config, and `recompute`, `groups`, `torch_optimizer`, `loop`.
    """
    case = dict(case)
    recompute, loop = case.pop("recompute", ""), case.pop("loop", "")
    engine = _engine(stage, precision, accumulation, Odd(recompute), case)
    losses, outputs, rates = [], [], []
    counts = dict.fromkeys(("micro_batch", "step", "eval"), 0)

    def count(name: str, before: int) -> None:
        counts[name] += sum(waits().values()) - before if step >= FIRST else 0

    for step in range(STEPS):
        for micro in range(accumulation):
            inputs = inputs_of(engine, step * accumulation + micro)
            before = sum(waits().values())
            losses.append(_micro_batch(engine, inputs, loop))
            count("micro_batch", before)
            before = sum(waits().values())
            if loop == "clip" and engine.is_gradient_accumulation_boundary():
                engine.clip_grad_norm(0.3)
            engine.step()
            count("step", before)
        rates += [*engine.get_lr(), engine.get_global_grad_norm() or 0.0]
        before = sum(waits().values())
        engine.eval()
        with torch.no_grad():
            outputs.append(engine(inputs))
        engine.train()
        count("eval", before)
    calls = engine.module.calls.item()
    engine.destroy()
    means = [output.float().abs().mean() for output in outputs]
    return [one.item() for one in losses + means], [*rates, calls], counts


def _engine(
    stage: int, precision: str, accumulation: int, model: nn.Module, case: dict[str, Any]
) -> Any:
    import xds

    torch.manual_seed(5)  # dropout
    given: dict[str, Any] = {}
    config = config_of(stage, precision, accumulation)
    params = [param for param in model.parameters() if param.requires_grad]
    if case.pop("groups", False):
        weights, others = ([p for p in params if (p.dim() > 1) is wide] for wide in (True, False))
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 2e-2}]
        given["model_parameters"] = groups
        section = {"warmup_num_steps": 3, "warmup_max_lr": [1e-2, 2e-2], "warmup_min_lr": [0, 0]}
        config["scheduler"] = {"type": "WarmupLR", "params": section}
    if name := case.pop("torch_optimizer", ""):
        del config["optimizer"]
        given["optimizer"] = getattr(torch.optim, name)(params, lr=1e-2)
    return xds.initialize(model, config | case, **given)


def _micro_batch(engine: Any, inputs: Tensor, loop: str) -> Tensor:
    loss = engine(inputs).float().square().mean()
    if loop == "no_sync" and not engine.is_gradient_accumulation_boundary():
        with engine.no_sync():
            engine.backward(loss)
    elif loop == "own":
        engine.scale(loss).backward()
    else:
        engine.backward(loss)
    return loss.detach()


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 1e-2, **params}}}


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bf16"}}
MUON = optimizer("Muon")  # it orthogonalizes in bf16
FAST = [(2, 3, "bf16", 3, {"recompute": "reentrant", "groups": True})]
SLOW = [
    (2, 1, "bf16", 3, {"recompute": "again", "loop": "no_sync"}),
    (2, 2, "fp32", 3, {"recompute": "again", "loop": "clip", "groups": True}),
    (2, 3, "fp16", 1, {"recompute": "again", "loop": "own"}),
    (2, 3, "bf16", 3, AUTOCAST),
    (2, 2, "bf16", 1, optimizer("Lamb", lr=1e-3)),
    (2, 3, "bf16", 1, MUON),
    (2, 0, "bf16", 1, {"torch_optimizer": "NAdam"}),
]


@pytest.mark.parametrize(
    ("world_size", "stage", "precision", "accumulation", "case"),
    [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_models_train_as_on_the_cpu_with_one_wait_a_step(
    world_size: int, stage: int, precision: str, accumulation: int, case: dict[str, Any]
) -> None:
    call = (stage, precision, accumulation, case | {"ops": {"native": True}})
    plain = run_processes(trained, world_size, *call)
    tolerance = 1e-4 if precision == "fp32" and case not in (AUTOCAST, MUON) else 5e-2
    for found, expected in zip(
        ranks(world_size, kernels=True).run(trained, *call), plain, strict=True
    ):
        for one, other in zip(found[:2], expected[:2], strict=True):
            assert one == pytest.approx(other, rel=tolerance, abs=tolerance / 10)
        assert found[2] == {"micro_batch": 0, "step": STEPS - FIRST, "eval": 0}


def on_own_stream(*call: Any) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        return trained(*call)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "precision"), [(3, "bf16")])
def test_a_script_initializes_and_trains_on_a_stream_of_its_own(stage: int, precision: str) -> None:
    call = (stage, precision, 2, {"recompute": "again", "ops": {"native": True}})
    here = ranks(2, kernels=True)
    assert here.run(on_own_stream, *call) == here.run(trained, *call)
