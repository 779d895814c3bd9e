"""Ranks that share one GPU over gloo, or have one each over NCCL, against one process in plain PyTorch.

    python benchmarks/gpu/ranks.py 2           # two ranks on the first device
    python benchmarks/gpu/ranks.py 8 nccl      # eight devices

The first rank keeps the records. A case that raises ends the ranks; new ones go on with the next case.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist

HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
ALL_ON_HOST = HOST | {"offload_param": {"device": "cpu"}}
RAISED = 3  # the code of a rank whose case raised, which is a record already
ONE_BIT = {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 3}}

Case = tuple[str, Callable[..., Any], dict[str, Any]]


def start(world_size: int, backend: str) -> None:
    """Run all cases. Where a rank raises or dies, all are ended, and new ranks go on with the next case."""
    folder, first = tempfile.mkdtemp(), 0
    while first < len(cases(world_size)):
        variables = {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "XDS_TIMEOUT_SECONDS": "30"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(world_size), backend, folder, str(first)],
                env=os.environ | variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]
        while any(rank.poll() is None for rank in ranks) and not any(r.poll() for r in ranks):
            time.sleep(0.1)
        codes = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
        if not any(codes):
            return
        begun = len(list(Path(folder).glob("begun-*")))
        if code := next((code for code in codes if code not in (None, 0, RAISED)), 0):
            common.record(case=f"{world_size} ranks, case {begun}", ok=False, text=f"code {code}")
        if begun == first:
            raise SystemExit("the ranks do not start")
        first = begun


def cases(world_size: int) -> list[Case]:
    """Most valuable first: stages, the host, then what sends from rank to rank."""
    found: list[Case] = []
    for same in ({"precision": "bf16"}, {"precision": "fp32"}):
        found += [(f"stage {stage}", data, same | {"stage": stage}) for stage in range(4)]
        found += [("stage 2, host", data, same | {"stage": 2, "zero": HOST})]
        found += [("stage 3, all on host", data, same | {"stage": 3, "zero": ALL_ON_HOST})]
    bf16: dict[str, Any] = {"precision": "bf16"}
    if world_size % 2 == 0:
        half = {"mics_shard_size": world_size // 2}
        found += [("pipeline, stage 1", pipeline, bf16 | {"stage": 1})]
        found += [("MiCS", data, bf16 | {"stage": 3, "zero": half})]
    if world_size != 2:
        return found
    found += [("slices, stage 1", slices, bf16 | {"stage": 1})]
    found += [("sequences, stage 3", sequences, {"stage": 3})]
    weights = {"zero_quantized_weights": True, "stage3_param_persistence_threshold": 0}
    gradients = {"zero_quantized_gradients": True}
    found += [
        ("1-bit Adam", data, bf16 | {"stage": 0, "most": 0.3, "optimizer": ONE_BIT}),
        ("ZeRO++ weights", data, bf16 | {"stage": 3, "most": 0.1, "zero": weights}),
        ("ZeRO++ gradients", data, bf16 | {"stage": 2, "most": 0.1, "zero": gradients}),
        ("recomputed", data, bf16 | {"stage": 3, "activation_checkpointing": {}}),
        *((f"pipeline, stage {stage}", pipeline, {"stage": stage}) for stage in (0, 1, 2)),
        *((f"slices, stage {stage}", slices, {"stage": stage}) for stage in (0, 3)),
        ("pipeline, gpipe", pipeline, {"stage": 1, "schedule": "gpipe"}),
    ]
    if common.IS_REHEARSED:  # the last of each kind
        return list(
            {(run, *settings): (name, run, settings) for name, run, settings in found}.values()
        )
    return found


def data(
    result: Any, precision: str, stage: int, zero: Any = None, most: float = 0.0, **more: Any
) -> None:
    """Data-parallel ranks; each trains on its part of every batch. most: the distance of a lossy way."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    settings = common.config(precision, stage, 2, zero=zero, **more)
    settings["train_micro_batch_size_per_gpu"] = common.SEQUENCES // world_size
    if "optimizer" in more:
        del settings["gradient_clipping"]

    losses: list[float] = []  # of this rank's micro-batches
    norms: list[float] = []
    engine = xds.initialize(common.model(), settings)
    for at, tokens in enumerate(common.batches(12)):
        loss = engine(tokens.chunk(world_size)[rank].to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()) / 2)
        if at % 2:
            norms.append(float(engine.get_global_grad_norm() or 0.0))
    params = common.masters_of(engine)
    total = torch.tensor(losses, device=engine.device)
    engine.destroy()
    dist.all_reduce(total)
    means = (total.view(-1, 2).sum(1) / world_size).tolist()
    found, wanted = common.Run(means, norms, params), common.plain(precision, 2)
    if most:
        gap = abs(found.losses[-1] - wanted.losses[-1])
        result(gap < most, f"last loss {found.losses[-1]:.4f}, plain {wanted.losses[-1]:.4f}", gap)
    else:
        common.compare(result, precision, found, wanted)


def pipeline(result: Any, stage: int, precision: str = "fp32", schedule: str = "auto") -> None:
    """Two stages, four micro-batches."""
    world_size = dist.get_world_size()
    count = common.SEQUENCES // (world_size // 2)
    section = {"stages": 2, "schedule": schedule}
    settings = common.config(precision, stage, 4, pipeline=section)
    engine = xds.initialize(common.model(), settings | {"train_micro_batch_size_per_gpu": count})
    mine = iter([tokens.split(count)[engine.dp_rank] for tokens in common.batches(24)])
    losses, norms = [], []
    for _ in range(6):
        losses.append(float(engine.train_batch(mine)))
        norms.append(float(engine.get_global_grad_norm() or 0.0))
    engine.destroy()
    common.compare(result, precision, common.Run(losses, norms, []), common.plain(precision, 4))


def slices(result: Any, stage: int, precision: str = "fp32") -> None:
    """All ranks share the layers, and train on the same batches."""
    settings = common.config(precision, stage, tensor_parallel={"tp_size": dist.get_world_size()})
    found = common.trained(settings)
    common.compare(
        result, precision, common.Run(found.losses, found.norms, []), common.plain(precision)
    )


def sequences(result: Any, stage: int) -> None:
    """All ranks share the tokens of a Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": common.SMALL.vocabulary}
    torch.manual_seed(1)
    llama = LlamaForCausalLM(LlamaConfig(**shape, **sizes, attn_implementation="sdpa"))
    twin = copy.deepcopy(llama).to(common.DEVICE)
    optimizer, wanted, found = common.OPTIMIZERS["AdamW"](twin.parameters()), [], []
    settings = common.config("fp32", stage, sequence_parallel_size=dist.get_world_size())
    engine = xds.initialize(llama, settings)
    for tokens in common.batches(4):
        tokens = tokens[:, :-1].to(engine.device)
        loss = twin(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(float(loss.detach()))
    engine.destroy()
    gap = common.distance(found, wanted)
    result(gap < 2e-5, f"loss {gap:.1e}", gap)


def main(world_size: int, backend: str, folder: str, first: int) -> None:
    """One rank: the cases from number `first` on. The first rank keeps records, others those that are wrong."""
    rank = int(os.environ["RANK"])
    where = {"init_method": f"file://{folder}/{first}", "rank": rank, "world_size": world_size}
    dist.init_process_group(backend, timeout=timedelta(seconds=30), **where)
    for number, (name, run, settings) in enumerate(cases(world_size)):
        if number < first:
            continue
        Path(folder, f"begun-{number}").touch()
        name = f"{world_size} ranks, {settings.get('precision', 'fp32')} {name}"
        if rank:
            name += f", rank {rank}"
        with common.case(name, keeps_right=rank == 0, ends_with=RAISED) as result:
            run(result, **settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    chosen = [*sys.argv[1:], "gloo"]
    if "RANK" not in os.environ:
        start(int(chosen[0]), chosen[1])
        raise SystemExit
    import xds

    logging.getLogger("xds").setLevel(logging.ERROR)
    if common.IS_CUDA:
        torch.cuda.set_device(int(os.environ["RANK"]) if chosen[1] == "nccl" else 0)
    main(int(chosen[0]), chosen[1], sys.argv[3], int(sys.argv[4]))
