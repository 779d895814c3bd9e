"""The order in which ranks start messages, in random products of features.

NCCL hangs, or mixes up messages, where two ranks start the calls of a communicator in two orders. Gloo hides
it. A product is wrong if

- two ranks of a communicator have started other calls, or in another order, also among all that both belong to;
- a call in a training step lets the host wait for the device;
- the stand-in finds a race.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import timeline
from device_ranks import ranks
from fuzz.products import Product, draw, other_messages, train

NOT_HERE = ("generated", "compile")  # ids on the host; no compiler for the stand-in
Calls = dict[tuple[int, ...], list[tuple[str, int]]]  # by the members of a communicator


def calls_of(product: Product, folder: str) -> tuple[str, Calls, list[Any], list[str]]:
    """On each rank: why it is refused, the calls it has started, those of the engine, and waits in steps."""
    import torch.distributed as dist
    from messages import DeviceGroup
    from stand_in import waits_of_host

    from xds.engine.engine import Engine

    by_group: dict[DeviceGroup, tuple[tuple[int, ...], list[tuple[str, int]]]] = {}
    members = dist.distributed_c10d._world.pg_group_ranks
    waits: list[str] = []
    is_in_step = False
    send, barrier, train_batch = DeviceGroup._send, DeviceGroup.barrier, Engine.train_batch

    def recorded(self: Any, name: str, reads: Any, writes: Any, run: Any, peer: Any = None) -> Any:
        calls = by_group.setdefault(self, (tuple(members[self]), []))[1]
        numel = sum(tensor.numel() for tensor in reads or writes)
        calls.append((name if peer is None else f"{name} {peer}", numel))
        before = waits_of_host()
        sent = send(self, name, reads, writes, run, peer)
        if waits_of_host() != before:
            waits.append(name)
        return sent

    def waited(self: Any, opts: Any = None) -> Any:
        if is_in_step:
            waits.append("barrier")
        return barrier(self, opts)

    def step(self: Any, *args: Any, **more: Any) -> Any:
        nonlocal is_in_step
        is_in_step = True
        try:
            return train_batch(self, *args, **more)
        finally:
            is_in_step = False

    DeviceGroup._send, DeviceGroup.barrier = recorded, waited  # type: ignore[method-assign]
    Engine.train_batch = step  # type: ignore[method-assign]
    try:
        _, refusal, messages = train(product, folder)
    finally:
        DeviceGroup._send, DeviceGroup.barrier = send, barrier  # type: ignore[method-assign]
        Engine.train_batch = train_batch  # type: ignore[method-assign]
    calls: Calls = {}
    for key, started in by_group.values():
        calls.setdefault(key, []).extend(started)
    return refusal, calls, messages, waits


def examined(seed: int) -> tuple[str, str]:
    """("ordered" | "refused" | "wrong" | "failed" | "skipped", what was said)."""
    product = draw(seed)
    product = replace(product, events=tuple(set(product.events) - {*NOT_HERE}))
    if "compile" in product.more or product.first.size == 1:
        return "skipped", ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = ranks(product.first.size, kernels=True).run(calls_of, product, folder)
        except AssertionError as error:
            return "failed", str(error)[-4500:]
    refusals = [refusal for refusal, *_ in found]
    if any(refusals):
        return ("refused" if all(refusals) else "wrong"), refusals[0]
    said = timeline.other_orders([calls for _, calls, *_ in found])
    said += other_messages(product, [messages for _, _, messages, _ in found], is_ordered=True)
    said += [f"rank {rank} waits in {one[3]}" for rank, one in enumerate(found) if one[3]]
    return ("wrong", "; ".join(said)[:1500]) if said else ("ordered", "")
