"""Section --ranks: ranks that share the GPU over gloo equal one process; NCCL; hidden communication."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
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

    device = _start(rank, world_size, case, rendezvous)
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


def _start(rank: int, world_size: int, case: dict[str, Any], rendezvous: str) -> Any:
    """The device of this rank, and the group of the case's backend. `run_ranks` has started gloo."""
    import torch.distributed as dist
    from device import pick

    if case["backend"] == "gloo":  # all ranks on the first device; nobody has asked for devices yet
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        os.environ["CUDA_VISIBLE_DEVICES"] = first
        return pick(dry=case["dry"])
    device = pick(dry=case["dry"])
    dist.destroy_process_group()
    device.choose(rank)
    where = {"init_method": f"file://{rendezvous}", "rank": rank, "world_size": world_size}
    dist.init_process_group(case["backend"], **where)
    return device


def two_groups(
    rank: int, world_size: int, case: dict[str, Any], rendezvous: str
) -> list[tuple[float, float]]:
    """The largest error of sums of two groups that are in flight together, with products meanwhile."""
    import torch
    import torch.distributed as dist

    device = _start(rank, world_size, case, rendezvous)
    groups = [dist.new_group(), dist.new_group()]
    numel = 1 << (12 if case["small"] else 24)
    square = torch.ones(
        64 if case["small"] else 2048, dtype=torch.float32, device=device.torch_device
    )
    square = square.diag()
    worst = 0.0
    for turn in range(4):
        sent = [torch.full((numel,), float(rank + n), device=device.torch_device) for n in range(8)]
        works = []
        for n, tensor in enumerate(sent):
            works.append(dist.all_reduce(tensor, group=groups[(n + turn) % 2], async_op=True))
            square = square @ square
        for work in reversed(works):
            work.wait()
        for n, tensor in enumerate(sent):
            total = world_size * (world_size - 1) / 2 + n * world_size
            worst = max(worst, float((tensor - total).abs().max()))
    worst = max(worst, float((square.diag() - 1).abs().max()))
    return [(worst, 0.0)]


def _engine(case: dict[str, Any], device: Any, world_size: int) -> tuple[Any, list[Any]]:
    import torch
    from offload.model import build, draw

    import xds

    shape = shape_of(case["size"], small=case["small"])
    if case["size"] == "125M" and not case["small"]:  # gloo copies by the host
        shape = Shape(4, 512, 8, context=256, vocabulary=4096)
    model = build(shape, torch.device("cpu"), torch.float32)  # the same numbers on every device
    count = max(4, world_size)
    config = {
        "train_micro_batch_size_per_gpu": count // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": case["precision"] == "bf16"},
        "zero_optimization": {"stage": case["stage"], **case.get("zero", {})},
    }
    torch.manual_seed(7)
    batches = [draw(shape, count * shape.context, torch.device("cpu")) for _ in range(STEPS)]
    return xds.initialize(model, config), batches


def _hidden(engine: Any, batch: Any, device: Any, case: dict[str, Any], rank: int) -> float:
    """The share of NCCL's time during which other kernels run; -1 if there are no NCCL kernels."""
    import torch
    from profile_step import events_of, hidden_share

    batch = batch.to(engine.device)
    with torch.profiler.profile(activities=list(device.activities)) as profiler:
        engine.backward(engine(batch))
        engine.step()
        device.synchronize()
    file = Path(f"{case['trace']}-rank{rank}.json")
    profiler.export_chrome_trace(str(file))
    share = hidden_share(events_of(file))
    return -1.0 if share is None else share


class Section:
    """Starts the ranks, and compares them with one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        session.measure_rate()
        os.environ.update(session.env)  # the ranks inherit it
        self.count = 0

    def ranks(self, world_size: int, work: Callable[..., Any] = train, **case: Any) -> Any:
        """What each rank found, or the reason of a failure."""
        session = self.session
        if session.left < (3 if session.small else 25):
            return "time"
        self.count += 1
        rendezvous = str(scratch() / f"rendezvous-{os.getpid()}-{self.count}")
        full = {
            "dry": session.dry,
            "small": session.small,
            "size": "125M",
            "backend": "gloo",
        } | case
        try:
            return run_ranks(
                work, world_size, full, rendezvous, timeout_seconds=min(150.0, session.left)
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
        worst = math.inf if any(map(math.isnan, gaps)) else max(gaps)
        note = f"largest relative distance {worst:.1e}; last loss {found[0][-1][0]:.5f}"
        self.session.add(Row(name, worst, must=must, unit="", note=note))


def run(session: Session) -> None:
    """All rows."""
    section = Section(session)
    bases = {p: section.ranks(1, stage=0, precision=p) for p in ("fp32", "bf16")}
    worlds = (2,) if session.small else (2, 4)
    for world_size in worlds:
        for precision in ("fp32",) if session.small else ("fp32", "bf16"):
            for stage in (0, 3) if session.small else range(4):
                found = section.ranks(world_size, stage=stage, precision=precision)
                name = f"{world_size} ranks on one device, gloo, stage {stage}, {precision}"
                section.compare(name, precision, found, bases[precision])
    backend = "gloo" if session.dry else "nccl"
    for stage in (3,) if session.small else (0, 3):
        found = section.ranks(1, stage=stage, precision="fp32", backend=backend)
        section.compare(f"NCCL, 1 rank, stage {stage}, fp32", "fp32", found, bases["fp32"])
    from device import pick

    device = pick(dry=session.dry)
    _in_flight(section, device, bases["fp32"])
    _several(section, device)


def _in_flight(section: Section, device: Any, base: Any) -> None:
    """Several GPUs: messages of two groups at once, alone and in an engine with shard groups."""
    session = section.session
    name = "NCCL, two groups in flight"
    engine_name = f"{name}, stage 3 with mics_shard_size"
    if device.count < 2 and not session.dry:
        session.skip(f"{name}: error of sums", "one GPU", 0.0)
        session.skip(engine_name, "one GPU", TOLERANCE["fp32"])
        return
    case = {"stage": 3, "precision": "fp32", "backend": device.backend}
    found = section.ranks(_most_ranks(session, device), two_groups, **case)
    if isinstance(found, str):
        session.skip(f"{name}: error of sums", found, 0.0)
    else:
        worst = max(rank[0][0] for rank in found)
        session.add(Row(f"{name}: error of sums", worst, must=0.0, unit=""))
    if device.count < 4 and not session.dry:
        session.skip(engine_name, "it needs four GPUs", TOLERANCE["fp32"])
        return
    zero = {"mics_shard_size": 2, "stage3_param_persistence_threshold": 0, "unit_min_numel": 0}
    section.compare(engine_name, "fp32", section.ranks(4, **case, zero=zero), base)


def _most_ranks(session: Session, device: Any) -> int:
    return 2 if session.small else min(8, device.count)


def _several(section: Section, device: Any) -> None:
    """Several GPUs: how much of NCCL is hidden."""
    session = section.session
    name = "share of NCCL hidden behind kernels"
    if device.count < 2 and not session.dry:
        session.skip(f"{name}, stage 3", "one GPU")
        return
    world_size = _most_ranks(session, device)
    for stage in (3,) if session.small else (1, 2, 3):
        case = {"stage": stage, "precision": "bf16", "backend": device.backend}
        found = section.ranks(world_size, **case, size="350M", trace=str(scratch() / "nccl"))
        if isinstance(found, str) or found[0][0][0] < 0:
            reason = found if isinstance(found, str) else "the trace has no NCCL kernels"
            session.skip(f"{name}, stage {stage}", reason)
            continue
        worst = min(rank[0][0] for rank in found)
        session.add(Row(f"{name}, stage {stage}", worst, unit="", note=f"{world_size} GPUs"))
