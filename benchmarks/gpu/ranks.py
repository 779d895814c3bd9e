"""Section --ranks: ranks that share the GPU over gloo equal one process; NCCL; hidden communication."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from scale import Shape, shape_of
from session import Session, scratch

from harness import RankFailed, Row, run_ranks  # isort: skip

TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
STEPS = 4


def train(
    rank: int, world_size: int, case: dict[str, Any], rendezvous: str
) -> list[tuple[float, float]]:
    """Loss and norm of some steps, means over all ranks. The ranks share a batch of four sequences."""
    import torch
    import torch.distributed as dist
    from device import pick

    device = pick(dry=case["dry"])
    if case["backend"] != "gloo":  # `run_ranks` has started gloo
        dist.destroy_process_group()
        device.choose(rank)
        where = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": world_size}
        dist.init_process_group(case["backend"], **where)
    engine, batches = _engine(case, device, world_size)
    found = []
    for batch in batches:
        mine = batch.chunk(world_size)[rank].to(engine.device)
        loss = engine(mine)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().reshape(1).clone()
        if world_size > 1:
            dist.all_reduce(mean)
        found.append((float(mean) / world_size, float(engine.get_global_grad_norm() or 0.0)))
    if case.get("trace"):
        found = [(_hidden(engine, batches[0].chunk(world_size)[rank], device, case, rank), 0.0)]
    engine.destroy()
    torch.set_grad_enabled(True)
    return found


def _engine(case: dict[str, Any], device: Any, world_size: int) -> tuple[Any, list[Any]]:
    import torch
    from offload.model import build, draw

    import xds

    shape = shape_of(case["size"], dry=case["dry"])
    if (
        case["size"] == "125M" and not case["dry"]
    ):  # small enough for gloo, which copies by the host
        shape = Shape(4, 512, 8, context=256, vocabulary=4096)
    model = build(shape, torch.device("cpu"), torch.float32)  # the same numbers on every device
    count = max(4, world_size)
    config = {
        "train_micro_batch_size_per_gpu": count // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": case["precision"] == "bf16"},
        "zero_optimization": {"stage": case["stage"]},
    }
    torch.manual_seed(7)
    batches = [draw(shape, count * shape.context, torch.device("cpu")) for _ in range(STEPS)]
    return xds.initialize(model, config), batches


def _hidden(engine: Any, batch: Any, device: Any, case: dict[str, Any], rank: int) -> float:
    """The share of NCCL's time during which other kernels run; -1 if there are no NCCL kernels."""
    import json

    import torch
    from profile_step import hidden_share

    batch = batch.to(engine.device)
    with torch.profiler.profile(activities=list(device.activities)) as profiler:
        engine.backward(engine(batch))
        engine.step()
        device.synchronize()
    file = Path(f"{case['trace']}-rank{rank}.json")
    profiler.export_chrome_trace(str(file))
    share = hidden_share(json.loads(file.read_text())["traceEvents"])
    return -1.0 if share is None else share


class Section:
    """Starts the ranks, and compares them with one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.measure_rate()
        os.environ.update(session.env)  # the ranks inherit it
        self.count = 0

    def ranks(self, world_size: int, **case: Any) -> Any:
        """What each rank found, or the reason of a failure."""
        session = self.session
        if session.left < (3 if session.dry else 25):
            return "time"
        self.count += 1
        rendezvous = str(scratch() / f"rendezvous-{os.getpid()}-{self.count}")
        full = {"dry": session.dry, "size": "125M", "backend": "gloo"} | case
        try:
            return run_ranks(
                train, world_size, full, rendezvous, timeout_seconds=min(150.0, session.left)
            )
        except RankFailed as error:
            print(str(error)[-3000:], flush=True)
            return str(error).strip().splitlines()[-1][:160]
        finally:
            Path(rendezvous).unlink(missing_ok=True)

    def compare(self, name: str, precision: str, found: Any, base: Any) -> None:
        """The largest relative distance of losses and norms."""
        must = TOLERANCE[precision]
        for reason in (found, base):
            if isinstance(reason, str):
                self.session.skip(name, reason, must)
                return
        gaps = [
            abs(a - b) / max(abs(b), 1e-12)
            for ours, theirs in zip(found[0], base[0], strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        note = f"largest relative distance {max(gaps):.1e}; last loss {found[0][-1][0]:.5f}"
        self.session.add(Row(name, max(gaps), must=must, unit="", note=note))


def run(session: Session) -> None:
    """All rows."""
    section = Section(session)
    bases = {p: section.ranks(1, stage=0, precision=p) for p in ("fp32", "bf16")}
    worlds = (2,) if session.dry else (2, 4)
    for world_size in worlds:
        for precision in ("fp32",) if session.dry else ("fp32", "bf16"):
            for stage in range(4):
                found = section.ranks(world_size, stage=stage, precision=precision)
                name = f"{world_size} ranks on one device, gloo, stage {stage}, {precision}"
                section.compare(name, precision, found, bases[precision])
    backend = "gloo" if session.dry else "nccl"
    for stage in (3,) if session.dry else (0, 3):
        found = section.ranks(1, stage=stage, precision="fp32", backend=backend)
        section.compare(f"NCCL, 1 rank, stage {stage}, fp32", "fp32", found, bases["fp32"])
    _several(section)


def _several(section: Section) -> None:
    """Several GPUs: NCCL equals one process, and how much of it is hidden."""
    from device import pick

    session = section.session
    device = pick(dry=session.dry)
    name = "share of NCCL hidden behind kernels"
    if device.count < 2 and not session.dry:
        session.skip(f"{name}, stage 3", "one GPU")
        return
    world_size = min(8, max(2, device.count))
    for stage in (3,) if session.dry else (1, 2, 3):
        case = {"stage": stage, "precision": "bf16", "backend": device.backend}
        found = section.ranks(world_size, **case, size="350M", trace=str(scratch() / "nccl"))
        if isinstance(found, str) or found[0][0][0] < 0:
            reason = found if isinstance(found, str) else "the trace has no NCCL kernels"
            session.skip(f"{name}, stage {stage}", reason)
            continue
        worst = min(rank[0][0] for rank in found)
        session.add(Row(f"{name}, stage {stage}", worst, unit="", note=f"{world_size} GPUs"))
