"""What the framework of a published run does in another way than xds, as changes of a plan and of a machine.

Each one is an algorithm of the run with its count of bytes or messages. Two have a number: `TENSOR_HIDDEN` and
`ROW_SECONDS`.

- fused attention with sinks: two products of a head as torch's fused kernel has them; a sliding window sees
  `window` keys. The column of sinks is left out.
- overlapped messages of tensor ranks (user buffers of Transformer Engine, async tensor parallel of torch): sums
  travel beside the products before them, gathers beside those after. At most `TENSOR_HIDDEN` of each is hidden.
- recomputation of whole blocks: torch ends it where the backward has what it needs.
- weights in 8 bits of Megatron's FSDP: they arrive as the layers multiply them. xds makes bf16 of them first,
  with `DECODING` kernels of torch.
- DeepEP and HybridEP: a token crosses once to each host that has one of its experts, and there by the fast
  link. The link carries as much as in a gather: 61 GB/s with tokens that stay, on 4 hosts of 400 Gb/s a device
  (DeepEP, README.md, 2026, github.com/deepseek-ai/DeepEP), so 46 GB/s without them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import comb
from typing import Any, TypeGuard

import torch
from torch import Tensor

from xds.engine.planning.activations import Activations
from xds.engine.planning.machine import ANY, Machine, Table
from xds.engine.planning.plan import Plan, RankPlan
from xds.engine.planning.work import ATTENTION, ATTENTION_BACKWARD, Kernel
from xds.ops.comm.fake import Message, Start, Wait

Change = Callable[[Sequence[object]], list[object]]  # of the events of a block

FUSED = "fused_with_sinks"
TENSOR_HIDDEN = 0.2
"""Share of a message of tensor ranks that travels beside products, in torch's async tensor parallel and in
Megatron's user buffers. Set from the former, in rows of the open half: Llama 70B in 8 bits had 829 tokens/s a
GPU without it and 876 with it (torchtitan, 2024-12), 5.4 % of a step, and the plan of 829 has 27 % in these
messages. 829 is an open row, 876 is none. docs/published-rows.md has what open rows of Megatron say of it."""
ROW_SECONDS = 1.2e-7
"""Of a plain exchange of Megatron-Core in container 25.11 on hosts of H100 and B200, for each row that a rank
sends, forward or backward. What takes it is not known. Set from rows of the open half: the mean of the four
C29-qwen3-30b-a3b-b200-mxfp8,
C29-qwen3-235b-a22b-b200-mxfp8, C29-gpt-oss-120b-b200-bf16 and C29-gpt-oss-120b-h100-bf16."""
DECODING = frozenset({"_to_copy", "div_", "mul_", "zero_"})
ROWS = "rows of an exchange"  # a kernel of the machine; its bytes are rows


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


def with_whole_recomputation(plan: Plan) -> Plan:
    """The plan where a recomputed block runs to its end, as in Megatron's and DeepSpeed's checkpoints."""
    seen = {key: replace(each, again=each.forward) for key, each in plan.observed.items()}
    return replace(plan, observed=seen)


def with_overlapped_sums(plan: Plan) -> Plan:
    """The plan where kernels run beside the messages of tensor ranks before them."""
    return _with_blocks(plan, _waits_later, _waits_later)


def _with_blocks(plan: Plan, forward: Change, backward: Change) -> Plan:
    """The plan with other events in its blocks."""

    def changed(seen: Activations) -> Activations:
        return replace(
            seen,
            forward={place: forward(events) for place, events in seen.forward.items()},
            backward={place: backward(events) for place, events in seen.backward.items()},
            again={place: forward(events) for place, events in seen.again.items()},
        )

    return replace(plan, observed={key: changed(seen) for key, seen in plan.observed.items()})


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


def with_hidden_share(machine: Machine, share: float) -> Machine:
    """The machine where at most `share` of a message inside of a host travels beside kernels."""
    near = {
        name: link.model_copy(update={"overlap": share})
        for name, link in machine.links["host"].items()
    }
    return machine.model_copy(update={"links": {**machine.links, "host": near}})


def with_rings(plan: Plan, num_elements: int) -> Plan:
    """The plan where sequence ranks send keys and values around.

    num_elements: of the queries of one rank, as many as of its keys and values for all heads.
    """

    def changed(events: Sequence[object], *, is_backward: bool) -> list[object]:
        sent = {e.number: e.message for e in events if _is_of_sequence(e)}
        found: list[object] = []
        for event in events:
            if isinstance(event, Counter) and _has_attention(event):
                message = next(iter(sent.values()))
                found += _ring(event, message, num_elements, is_backward=is_backward)
            elif not (isinstance(event, Start | Wait) and event.number in sent):
                found.append(event)
        return found

    return _with_blocks(
        plan, partial(changed, is_backward=False), partial(changed, is_backward=True)
    )


def _is_of_sequence(event: object) -> TypeGuard[Start]:
    return isinstance(event, Start) and event.message.axes == ("sequence",)


def _has_attention(kernels: Counter[Kernel]) -> bool:
    return any(kernel.kind in (ATTENTION, ATTENTION_BACKWARD) for kernel in kernels)


def _ring(
    kernels: Counter[Kernel], message: Message, num_elements: int, *, is_backward: bool
) -> Iterator[object]:
    """All kernels, and what a ring copies, adds and sends.

    Each part copies its keys and values into one tensor. Both are as large as the queries.
    """
    ranks = message.ranks
    both = 2 * num_elements
    copied = 2 * 2 * both
    if is_backward:  # both gradients are added in fp32, in a new tensor; then those of queries
        added = (4 + 2 + 4) * both + (4 + 2 + 4) * num_elements
    else:  # the sum until now, a part of it, and the new sum
        added = (4 + 2 + 4) * num_elements
    part = Kernel("other", "fused", "fp32", (), copied + added)
    yield kernels + Counter({part: ranks})
    gathered = message._replace(operation="all_gather", size_bytes=2 * both * (ranks - 1))
    turned = message._replace(operation="send", size_bytes=4 * both)
    for number, each in enumerate([gathered] + [turned] * ranks * is_backward):
        yield Start(-1 - number, each)
        yield Wait(-1 - number)


def with_gathers_in_float8(plan: Plan) -> Plan:
    """The plan whose gathered weights need no kernels."""

    def changed(event: object) -> object:
        if not isinstance(event, Counter):
            return event
        return Counter({each: count for each, count in event.items() if each.name not in DECODING})

    def of_rank(rank: RankPlan) -> RankPlan:
        trace = rank.share.trace
        kept = None if trace is None else tuple(map(changed, trace))
        return replace(rank, share=replace(rank.share, trace=kept))

    return replace(plan, ranks=tuple(map(of_rank, plan.ranks)))


def with_plain_exchanges(plan: Plan, more: float, rows: int, *, beside: bool) -> Plan:
    """The plan where tokens go once to each of their experts.

    more: how many times as many bytes these are. rows: of one exchange. beside: kernels of the block run then.
    """

    def changed(events: Sequence[object]) -> list[object]:
        sent = {e.number for e in events if isinstance(e, Start) and _is_of_experts(e.message)}
        if not sent:
            return list(events)
        found: list[object] = [Counter({Kernel("other", ROWS, "fp32", (), rows): 1})]
        early: list[object] = []
        late: list[object] = []
        for event in events:
            if isinstance(event, Start) and event.number in sent:
                message = event.message
                size_bytes = int(message.size_bytes * more)
                event = event._replace(message=message._replace(size_bytes=size_bytes))
                (early if beside else found).append(event)
            elif isinstance(event, Wait) and event.number in sent:
                (late if beside else found).append(event)
            else:
                found.append(event)
        return early + found + late

    return _with_blocks(plan, changed, changed)


def with_costs_of_rows(machine: Machine) -> Machine:
    """The machine with the seconds of `with_plain_exchanges`."""
    table = Table(points=((1.0, 1 / ROW_SECONDS),), source="ROW_SECONDS of as_run.py", error=0.5)
    return machine.model_copy(update={"kernels": {**machine.kernels, ROWS: table}})


def _is_of_experts(message: Message) -> bool:
    return message.operation == "all_to_all" and "data" in message.axes


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


__all__ = [
    "FUSED",
    "TENSOR_HIDDEN",
    "register",
    "with_costs_of_rows",
    "with_gathers_in_float8",
    "with_hidden_share",
    "with_overlapped_sums",
    "with_plain_exchanges",
    "with_rings",
    "with_tokens_once_a_host",
]
