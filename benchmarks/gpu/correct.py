"""Small trainings on one device against plain PyTorch, one group of cases a process.

python benchmarks/gpu/correct.py stages      # or another name of GROUPS
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from common import (
    DEVICE,
    IS_CUDA,
    IS_REHEARSED,
    IS_TINY,
    OPTIMIZERS,
    ROOT,
    Run,
    case,
    compare,
    config,
    trained,
)
from torch import nn

import xds
from xds.launcher.reporting.records import read_run

HOST: dict[str, Any] = {"device": "cpu"}
# fp16 is emulated on a CPU, value by value
PRECISIONS = (
    ("bf16", "fp32", "fp16") if IS_CUDA else ("fp32",) if IS_REHEARSED else ("bf16", "fp32")
)


def kernels() -> None:
    """The libraries of xds are built, load, compute what torch computes, and raise errors."""
    from xds.ops import libraries
    from xds.ops.kernels.adam import adam_, adam_reference

    for name in ("cuda_optimizers", "cuda_quantize", "cpu", "memory")[0 if IS_CUDA else 2 :]:
        with case(f"build and load {name}") as result:
            if name == "memory":
                libraries.open_plain(name)
            else:
                libraries.load(name, require=True)
            result(True)
    scalars = (None, None, 1e-3, 0.9, 0.95, 1e-8, 0.1, True, True)
    for where in dict.fromkeys((DEVICE, "cpu")):
        for precision in ("fp32", "bf16"):
            with case(f"Adam on {where}, {precision}") as result:
                found, wanted = _adam_tensors(where, precision), _adam_tensors(where, precision)
                adam_(*found, *scalars)
                adam_reference(*wanted, *scalars)
                gap = max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))
                is_loaded = libraries.is_loaded(libraries.optimizer_library(torch.device(where)))
                most = 1e-5 if precision == "fp32" else 1e-2
                result(is_loaded and gap < most, f"kernel loaded: {is_loaded}; {gap:.1e}", gap)
        with case(f"a wrong argument on {where} raises") as result:
            try:
                adam_(*_adam_tensors(where, "fp32"), *scalars, True)
            except RuntimeError as error:
                result("takes_edits" in str(error), str(error)[-100:])


def _adam_tensors(where: str, precision: str) -> tuple[torch.Tensor, ...]:
    """The same each time: master, gradient, two moments, the output, the number of the step."""
    torch.manual_seed(1)
    param, grad = (torch.randn(100_003, device=where) for _ in range(2))
    narrow = common.DTYPES[precision]
    moments = (torch.zeros_like(param), torch.zeros_like(param))
    return param, grad.to(narrow), *moments, param.to(narrow), torch.tensor(1.0, device=where)


class _Cases:
    """A plugin of pytest: each test that runs is a case."""

    num_passed = 0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        print(f"# {nodeid}", flush=True)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome == "failed":
            common.record(case=report.nodeid, ok=False, text=str(report.longrepr)[-300:])
        elif report.outcome == "passed" and report.when == "call":
            self.num_passed += 1
            common.record(case=report.nodeid, ok=True, text="")


def tests() -> None:
    """`pytest -m gpu`."""
    import pytest

    options = [
        "-o",
        "addopts=",
        "-m",
        "gpu",
        "-q",
        "--tb=short",
        "-p",
        "no:cacheprovider",
        "--maxfail=40",
    ]
    places = ("tests/ops", "tests/offload", "tests/rehearsal")
    os.chdir(ROOT)
    code = pytest.main([*options, *places], plugins=[plugin := _Cases()])
    with case("pytest runs") as result:
        is_right = code in (0, 1) and (plugin.num_passed or not IS_CUDA)
        result(is_right, f"code {int(code)}, {plugin.num_passed} passed")


def against_plain(
    name: str,
    precision: str,
    stage: int,
    count: int = 2,
    *,
    twin: str = "AdamW",
    tolerance: str = "",
    **sections: Any,
) -> Run | None:
    """A case: six steps of `count` micro-batches, compared with plain PyTorch and the optimizer `twin`."""
    with case(f"{precision} stage {stage}, {name}") as result:
        found = trained(config(precision, stage, count, **sections), count)
        compare(result, tolerance or precision, found, common.plain(precision, count, twin))
        return found
    return None


def stages() -> None:
    """Stages, precisions, accumulation and clipping; and all stages bit by bit."""
    for precision in PRECISIONS:
        for count in (1, 2):
            name = f"{count} micro-batches"
            runs = [against_plain(name, precision, stage, count) for stage in range(4)]
            with case(f"{precision}: all stages bit-equal, {name}") as result:
                params = [run.params for run in runs if run]
                pairs = [
                    pair for other in params[1:] for pair in zip(params[0], other, strict=True)
                ]
                result(len(params) == 4 and all(torch.equal(a, b) for a, b in pairs))


def offload() -> None:
    """Optimizer states and parameters on the host and in files."""
    disk = {"device": "nvme", "nvme_path": tempfile.mkdtemp()}
    ways: list[tuple[int, str, Any]] = [
        *((stage, "optimizer", {"offload_optimizer": HOST}) for stage in range(4)),
        (3, "parameters", {"offload_param": HOST}),
        (3, "all", {"offload_param": HOST, "offload_optimizer": HOST}),
        (3, "all on NVMe", {"offload_param": disk, "offload_optimizer": disk}),
        (2, "optimizer on NVMe", {"offload_optimizer": disk}),
        (3, "half", {"offload_optimizer": HOST | {"ratio": 0.5}}),
        (3, "super", {"offload_optimizer": HOST | {"super_offload": True}}),
        (2, "overlap", {"offload_optimizer": HOST | {"overlap_step": True}}),
        (3, "unpinned", {"offload_optimizer": HOST | {"pin_memory": False}}),
    ]
    for precision in PRECISIONS:
        for stage, name, zero in ways:
            against_plain(name, precision, stage, zero=zero)


def optimizers() -> None:
    """Optimizers that torch has against torch's; the others at each stage against their first stage."""
    known: dict[str, Any] = {
        "Adagrad": {"lr": 1e-2},
        "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        "Adam": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.01},
    }
    for name, params in known.items():
        for precision in ("fp32", "bf16"):
            for stage in (0, 2, 3):
                chosen = {"type": name, "params": params}
                against_plain(name, precision, stage, 1, twin=name, optimizer=chosen)
    own: dict[str, Any] = {"Lion": {"lr": 1e-4}, "Lamb": {"lr": 1e-3}, "Muon": {"lr": 2e-3}}
    own |= {name: {"lr": 1e-3, "freeze_step": 3} for name in ("OneBitAdam", "OneBitLamb")}
    for name, params in own.items():
        for precision in ("fp32", "bf16"):
            first: Run | None = None
            for stage in (0,) if "One" in name else range(4):
                with case(f"{precision} stage {stage}, {name}") as result:
                    settings = config(precision, stage, optimizer={"type": name, "params": params})
                    if "One" in name:
                        del settings["gradient_clipping"]
                    found = trained(settings)
                    first = first or found
                    gap = common.distance(found.losses, first.losses)
                    is_near = gap < (1e-5 if precision == "fp32" else 3e-2)
                    falls = found.losses[-1] < found.losses[0] + 0.05
                    text = (
                        f"{found.losses[0]:.4f} to {found.losses[-1]:.4f}, from stage 0 {gap:.1e}"
                    )
                    result(is_near and falls, text, gap)


def checkpoints() -> None:
    """Saved at one stage, loaded at others and with offload; saved in the background."""
    for precision in PRECISIONS:
        for stage in (0, 3) if IS_REHEARSED else range(4):
            folder = tempfile.mkdtemp()
            with case(f"{precision} saved at stage {stage}") as result:
                with _engine(config(precision, stage)) as engine:
                    whole = common.train(engine)
                with _engine(config(precision, stage)) as engine:
                    common.train(engine, steps=3)
                    engine.save_checkpoint(folder, client_state={"k": 3})
                saved = xds.get_fp32_state_dict(folder)
                result(len(saved) > 10 and all(v.device.type == "cpu" for v in saved.values()))
            for other in sorted({stage, 3 - stage}):
                for zero in ({}, {"offload_optimizer": HOST}):
                    where = "host" if zero else "device"
                    with case(f"{precision} stage {stage} to {other}, {where}") as result:
                        with _engine(config(precision, other, zero=zero), seed=9) as engine:
                            _, state = engine.load_checkpoint(folder)
                            run = common.train(engine, steps=3, first=3)
                        loss = common.distance(run.losses, whole.losses[3:])
                        param = common.param_distance(run.params, whole.params)
                        most = 2e-5 if zero else 1e-6  # the host rounds otherwise
                        is_near = loss < most and param < most or precision != "fp32"
                        is_near = is_near and loss < 1e-3 and param < 1e-3 and state == {"k": 3}
                        result(is_near, f"loss {loss:.1e} parameters {param:.1e}", loss)
        with case(f"{precision} saved in the background") as result:
            folder = tempfile.mkdtemp()
            settings = config(precision, 2, checkpoint={"async_save": True})
            with _engine(settings) as engine:
                wanted = common.train(engine, steps=3).params
                engine.save_checkpoint(folder)
                common.train(engine, steps=3)
                engine.wait_for_checkpoint()
            with _engine(config(precision, 3), seed=5) as engine:
                engine.load_checkpoint(folder)
                gap = common.param_distance(common.masters_of(engine), wanted)
            result(gap == 0, f"parameters {gap:.1e}", gap)


@contextlib.contextmanager
def _engine(settings: dict[str, Any], seed: int = 1) -> Iterator[Any]:
    engine = xds.initialize(common.model(seed), settings)
    try:
        yield engine
    finally:
        engine.destroy()


def compiled() -> None:
    """torch.compile, with and without recomputed blocks."""
    compiling = {"enabled": True} | ({} if IS_CUDA else {"backend": "eager"})
    for precision in ("bf16", "fp32"):
        for name, more in (("compiled", {}), ("recomputed", {"activation_checkpointing": {}})):
            for stage in (0, 3, 2):
                sections, tolerance = {"compile": compiling, **more}, f"compiled {precision}"
                against_plain(name, precision, stage, tolerance=tolerance, **sections)


def memory() -> None:
    """zero.Init, GatheredParameters, the plan of memory, and what `destroy` returns."""
    for stage in (2, 3):
        with case(f"zero.Init, stage {stage}") as result:
            settings = config("bf16", stage)
            with xds.zero.Init(settings):
                built = common.model()
            engine = xds.initialize(built, settings)
            losses = common.train(engine).losses
            engine.destroy()
            result(losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
    with case("GatheredParameters, edited at stage 3") as result:
        with _engine(config("bf16", 3)) as engine:
            common.train(engine, steps=2)
            param = next(p for n, p in engine.module.named_parameters() if n.endswith("up.weight"))
            with xds.zero.GatheredParameters(param, modifier_rank=0):
                shape = tuple(param.shape)
                param.data.zero_()
            left = float(xds.zero.safe_get_full_fp32_param(param).abs().max())
            common.train(engine, steps=2)
            result(shape == (4 * common.SMALL.width, common.SMALL.width) and left == 0, f"{left}")
    wide = common.SMALL if IS_TINY else common.Shape(4, 1024, 8, 128, 512)
    for zero in ({"stage": 0}, {"stage": 3}, {"stage": 2, "offload_optimizer": HOST}):
        name = f"stage {zero['stage']}{' with offload' if len(zero) > 1 else ''}"
        common.release()
        before = common.allocated()
        with case(f"the plan holds, and destroy frees, {name}") as result:
            built = common.model(shape=wide)
            engine = xds.initialize(built, config("bf16", 0, zero=zero))
            common.train(engine, steps=3)
            common.synchronize()
            held, plan = common.allocated() - before, engine.memory_plan()
            planned = sum(size for kind, size in plan.items() if kind not in ("host", "disk"))
            engine.destroy()
            common.synchronize()
            kept = common.allocated() - before
            own = 2 * sum(param.numel() for param in built.parameters())  # the model keeps them
            text = f"{held >> 20} MiB, plan {planned >> 20}; "
            text += f"after destroy {kept >> 20}, parameters {own >> 20}"
            is_right = held < 1.05 * planned + (1 << 20) and kept < 1.05 * own + (1 << 20)
            result(is_right, text)
            del engine, built


def features() -> None:
    """Recomputation, timers, profiler, logs, autocast, overflow, a stream of the script."""
    sections: dict[str, Any] = {
        "recomputed": {"activation_checkpointing": {}},
        "recomputed on the host": {"activation_checkpointing": {"cpu_checkpointing": True}},
        "timers": {"wall_clock_breakdown": True, "steps_per_print": 2},
        "flops profiler": {"flops_profiler": {"enabled": True, "profile_step": 2}},
        "log of collectives": {"comms_logger": {"enabled": True}},
        "log of memory": {"memory_breakdown": True, "steps_per_print": 2},
    }
    for precision in ("bf16", "fp32"):
        for name, section in sections.items():
            for stage in (0, 2, 3):
                against_plain(name, precision, stage, **section)
    for stage in range(4):
        with case(f"autocast, stage {stage}") as result:
            section = {"enabled": True, "dtype": "bfloat16"}
            found = trained(config("fp32", stage, torch_autocast=section))
            gap = common.distance(found.losses, _autocast_losses())
            result(gap < 5e-3, f"loss {gap:.1e}", gap)
    if IS_CUDA:
        with case("fp16 that overflows") as result:
            section = {"enabled": True, "initial_scale_power": 32, "hysteresis": 1}
            with _engine(config("fp16", 2, fp16=section)) as engine:
                losses = common.train(engine, steps=20).losses
                text = f"{losses[0]:.3f} to {losses[-1]:.3f}, {engine.skipped_steps} steps skipped"
                result(losses[-1] < losses[0] and engine.skipped_steps > 0, text)
        with case("a stream of the script, bf16 stage 3") as result:
            with torch.cuda.stream(torch.cuda.Stream()):
                found = trained(config("bf16", 3))
            compare(result, "bf16", found, common.plain("bf16"))


def _autocast_losses() -> list[float]:
    module = common.model().to(DEVICE)
    optimizer, losses = OPTIMIZERS["AdamW"](module.parameters()), []
    for tokens in common.batches(6):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = module(tokens.to(DEVICE))
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def readme() -> None:
    """The command of the README: a GPT learns."""
    with case("the README's first command") as result:
        command = [sys.executable, "-m", "xds.launcher.cli", "examples/gpt/train.py"]
        command += ["--config", "examples/gpt/zero3.json", "--out", (out := tempfile.mkdtemp())]
        if IS_TINY:
            command += ["--steps", "3", "--layers", "1", "--width", "32", "--heads", "2"]
        # the example imports a module beside it
        env = os.environ | {"PYTHONSAFEPATH": ""}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdin=subprocess.DEVNULL)
        losses = read_run(out).loss
        first, last = losses[0], losses[-1]
        text = f"{len(losses)} steps, loss {first:.2f} to {last:.2f}"
        result(IS_TINY or last < 0.6 * first, text)


GROUPS: dict[str, Callable[[], None]] = {
    **{"kernels": kernels, "tests": tests, "stages": stages, "offload": offload},
    **{"optimizers": optimizers, "checkpoints": checkpoints, "compile": compiled},
    **{"memory": memory, "features": features, "readme": readme},
}

if __name__ == "__main__":
    logging.getLogger("xds").setLevel(logging.ERROR)
    GROUPS[sys.argv[1]]()
    print(json.dumps({"group": sys.argv[1]}))
