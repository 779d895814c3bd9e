"""What the framework of a published run does in another way than xds, as changes of a plan and of a machine.

None has a number that a row decides: each one is an algorithm of the run with its count of bytes or messages.

- fused attention with sinks: two products of a head as torch's fused kernel has them; a sliding window sees
  `window` keys. The column of sinks is left out.
- overlapped messages of tensor ranks (user buffers of Transformer Engine, async tensor parallel of torch): sums
  travel beside the products before them, gathers beside those after.
- DeepEP and HybridEP: a token crosses once to each host that has one of its experts, and there by the fast
  link. The link carries as much as in a gather: 61 GB/s with tokens that stay, on 4 hosts of 400 Gb/s a device
  (DeepEP, README.md, 2026, github.com/deepseek-ai/DeepEP), so 46 GB/s without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from typing import Any

import torch
from torch import Tensor

from xds.engine.planning.activations import Activations
from xds.engine.planning.machine import ANY, Machine, Table
from xds.engine.planning.plan import Plan
from xds.ops.comm.fake import Start, Wait

FUSED = "fused_with_sinks"


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any
) -> tuple[Tensor, None]:
    """An attention function of transformers: [B, heads, tokens, width] -> [B, tokens, heads, width]."""
    window = more.get("sliding_window") or 0
    tokens, groups = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    if 0 < window < tokens and tokens % window == 0:
        query, key, value = (
            each.unflatten(2, (-1, window)).flatten(1, 2) for each in (query, key, value)
        )
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        out = out.unflatten(1, (-1, tokens // window)).flatten(2, 3)
    else:
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return out.transpose(1, 2).contiguous(), None


def register() -> None:
    """Transformers knows the function."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(FUSED, attend)
    AttentionMaskInterface.register(FUSED, lambda *_, **__: None)


def with_overlapped_sums(plan: Plan) -> Plan:
    """The plan where kernels run beside the messages of tensor ranks before them."""
    return replace(plan, observed={key: _later(seen) for key, seen in plan.observed.items()})


def _later(seen: Activations) -> Activations:
    def moved(by_place: dict[int, list[object]]) -> dict[int, list[object]]:
        return {place: _waits_later(events) for place, events in by_place.items()}

    return replace(seen, forward=moved(seen.forward), backward=moved(seen.backward))


def _waits_later(events: Sequence[object]) -> list[object]:
    """Each message travels beside the kernels before or after it: those with more products."""
    sums = {e.number for e in events if isinstance(e, Start) and e.message.axes == ("tensor",)}
    found: list[object] = []
    held: list[object] = []
    early: set[int] = set()
    for place, event in enumerate(events):
        if isinstance(event, Start) and event.number in sums:
            last = max(
                (n for n, each in enumerate(found) if isinstance(each, Counter)), default=None
            )
            following = (each for each in events[place + 1 :] if isinstance(each, Counter))
            if last is not None and _flops(found[last]) > _flops(next(following, Counter())):
                found.insert(last, event)
                early.add(event.number)
            else:
                found.append(event)
        elif isinstance(event, Wait) and event.number in sums - early:
            held.append(event)
        else:
            found.append(event)
            if isinstance(event, Counter):
                found += held
                held = []
    return found + held


def _flops(kernels: object) -> int:
    assert isinstance(kernels, Counter)
    return sum(kernel.flops * count for kernel, count in kernels.items())


def with_tokens_once_a_host(
    machine: Machine, ranks: int, host: int, experts: int, choices: int
) -> Machine:
    """The machine where exchanges between hosts are as much faster as their tokens are fewer.

    ranks: that share `experts`. host: ranks of a host. choices: experts of a token, evenly chosen.
    """
    hosts = ranks // host
    if hosts < 2:
        return machine

    def chosen(parts: int) -> float:
        """Of `parts` equal parts of the experts, those that a token needs."""
        return parts * (1 - comb(experts - experts // parts, choices) / comb(experts, choices))

    far_ranks = chosen(ranks) * (ranks - host) / ranks
    far_hosts = chosen(hosts) * (hosts - 1) / hosts
    links = dict(machine.links["hosts"])
    link = links[ANY]
    faster = far_ranks / far_hosts
    points = tuple((*point[:-1], point[-1] * faster) for point in link.rate.points)
    rate = Table(
        points=points, source=f"{link.rate.source}; tokens once a host", error=link.rate.error
    )
    links["all_to_all"] = link.model_copy(update={"rate": rate})
    return machine.model_copy(update={"links": {**machine.links, "hosts": links}})


__all__ = ["FUSED", "register", "with_overlapped_sums", "with_tokens_once_a_host"]
