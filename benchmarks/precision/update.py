"""The time of one update with masters and states of few bits, beside fp32 and other libraries, on one thread.

    python benchmarks/precision/update.py [--millions 40] [--steps 5] [--libraries bitsandbytes torchao]

Prints nanoseconds for each element, the least of the steps in time of the processor. Gradients are bf16.
Masters are fp32, with bf16 parameters beside them or as halves, or bf16.
Other libraries have bf16 parameters alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xds.ops.coded import new_codes
from xds.ops.kernels.adam import adam_
from xds.ops.libraries import load
from xds.ops.rounding import draw_rows

CONSTANTS = (1e-4, 0.9, 0.999, 1e-8, 0.1, True, True)
Step = Callable[[int], object]


def own_steps(param: Tensor, grad: Tensor) -> Iterator[tuple[str, Step]]:
    rows, numel = draw_rows([(0, len(param), 0, "w")], 0), len(param)
    narrow = param.to(torch.bfloat16)
    codes = [new_codes(numel, param.device, of_squares=squares) for squares in (False, True)]
    states = [torch.zeros(numel) for _ in range(2)]

    def step_of(
        master: Tensor,
        states: list[Tensor],
        out: Tensor | None,
        draws: Tensor | None,
        low: Tensor | None = None,
    ) -> Step:
        return lambda step: adam_(
            master,
            grad,
            *states,
            out,
            torch.tensor(float(step)),
            None,
            None,
            *CONSTANTS,
            draws=draws,
            low=low,
        )

    yield "fp32 states", step_of(param, states, narrow, None)
    wide = [torch.zeros(numel) for _ in range(2)]
    halves = [torch.zeros(numel, dtype=torch.bfloat16) for _ in range(2)]
    rest = torch.zeros(numel, dtype=torch.int16)
    yield "fp32 masters in halves", step_of(narrow.clone(), wide, None, None, rest)
    yield "bf16 masters", step_of(narrow.clone(), wide, None, rows)
    yield "bf16 masters to nearest", step_of(narrow.clone(), wide, None, None)
    yield "bf16 masters and states", step_of(narrow.clone(), halves, None, rows)
    yield "int8 states", step_of(param, codes, narrow, rows)
    yield "int8 states to nearest", step_of(param, codes, narrow, None)
    yield "int8 states, bf16 masters", step_of(narrow, codes, None, rows)


def step_of_library(name: str, param: Tensor, grad: Tensor) -> Step:
    weight = torch.nn.Parameter(param.to(torch.bfloat16))
    weight.grad = grad
    if name == "bitsandbytes":
        import bitsandbytes

        optimizer = bitsandbytes.optim.AdamW8bit([weight], lr=1e-4, weight_decay=0.1)
    else:
        from torchao.optim import AdamW8bit

        optimizer = AdamW8bit([weight], lr=1e-4, weight_decay=0.1)
    return lambda _: optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--millions", type=int, default=40)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--libraries", nargs="*", choices=("bitsandbytes", "torchao"), default=[])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    load("cpu", require=True)
    numel = asked.millions * 10**6 // 256 * 256
    param, grad = torch.randn(numel) * 0.02, (torch.randn(numel) * 1e-3).to(torch.bfloat16)
    base = 0.0
    steps = dict(own_steps(param, grad))
    steps |= {name: step_of_library(name, param, grad) for name in asked.libraries}
    for name, run in steps.items():
        seconds = []
        for step in range(1, asked.steps + 2):  # the first one makes states, and may compile
            begin = time.process_time()
            run(step)
            seconds.append(time.process_time() - begin)
        found = min(seconds[1:]) / numel * 1e9
        base = base or found
        print(json.dumps({"update": name, "ns": round(found, 3), "ratio": round(found / base, 2)}))


if __name__ == "__main__":
    main()
