"""Stand-ins with the numbers of gloo: `DeviceGroup` for NCCL, `Gloo` for gloo with tensors of a device.

A message of a device has a stream of its own. It starts after what its caller's stream has launched. `wait`
lets the caller's stream wait, not the host. The work keeps its tensors until then.

Sends and receives between two ranks have a stream of their own in each group, as NCCL's have. They run in the
order of their start: a receive that is started early holds back a send. What is received is there after `wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

BACKEND, GLOO = "device", "device_gloo"
_ops = torch.ops.host_cuda


class _Sent(dist._Work):  # type: ignore[misc,name-defined]
    def __init__(
        self, event: Any, kept: list[Tensor], arrive: Callable[[], None] | None = None
    ) -> None:
        """arrive: gives `kept` the values that the device has at the end of the message."""
        super().__init__()
        self._event, self._kept, self._arrive = event, kept, arrive
        self.number = -1

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._arrive is not None:
            arrive, self._arrive = self._arrive, None
            arrive()
        if self._event is not None:
            _ops.note(f"take {self.number}")
            torch.cuda.current_stream().wait_event(self._event)
        self._kept = []
        return True

    def is_completed(self) -> bool:
        return True


class DeviceGroup(dist.ProcessGroup):
    """`started`: the names and sizes of the messages of this rank, in their order."""

    takes_host = False  # tensors of the CPU
    _count = 0
    _messages = 0

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        DeviceGroup._count += 1
        self._place, self._label = (rank, size), f"device{DeviceGroup._count}"
        self._store = store
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._streams: dict[int | None, Any] = {}  # by peer; None: of collectives
        self._pairs: dict[int, ThreadPoolExecutor] = {}  # by peer
        self.started: list[tuple[str, int]] = []

    def size(self) -> int:
        return self._place[1]

    def rank(self) -> int:
        return self._place[0]

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def group_name(self) -> str:
        return self._label

    def get_group_store(self) -> Any:
        return self._store

    def _send(
        self,
        name: str,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        run: Callable[[], Callable[[], None] | None],
        peer: int | None = None,
    ) -> _Sent:
        """run: returns what is left to do when the message has ended."""
        if not self.takes_host and not all(tensor.is_cuda for tensor in (*reads, *writes)):
            raise RuntimeError(f"{name}: No backend type associated with device type cpu")
        numel = sum(tensor.numel() for tensor in reads or writes)
        self.started.append((name if peer is None else f"{name} {peer}", numel))
        DeviceGroup._messages += 1
        number = DeviceGroup._messages
        _ops.note(f"start {number} {name} {numel}")
        if peer not in self._streams:
            self._streams[peer] = torch.cuda.Stream()
        stream = self._streams[peer]
        stream.wait_stream(torch.cuda.current_stream())
        with stream, _disable_current_modes():  # what counts ops sees none of a message
            _ops.begin(f"message {name}")
            for tensors, writes_them in ((reads, False), (writes, True)):
                for tensor in tensors:
                    if tensor.device.type != "cpu":  # copies on the host, which gloo sends
                        _ops.use(tensor, writes_them)
            arrive = run()
            event = torch.cuda.Event()
            event.record(stream)
        sent = _Sent(event, [*reads, *writes], arrive)
        sent.number = number
        return sent

    def _in_order(self, peer: int, run: Callable[[], Any]) -> Future[Any]:
        if peer not in self._pairs:
            self._pairs[peer] = ThreadPoolExecutor(1)
        return self._pairs[peer].submit(run)

    def barrier(self, opts: Any = None) -> Any:
        torch.cuda.current_stream().synchronize()  # NCCL's lets the host wait
        return self._gloo.barrier()

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Sent:
        def run() -> None:
            options = dist.AllreduceOptions() if opts is None else opts
            self._gloo.allreduce([_host(tensors[0])], options).wait()

        return self._send("all_reduce", tensors, tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> _Sent:
        is_mine = opts.rootRank == self.rank()
        reads, writes = (tensors, []) if is_mine else ([], tensors)

        def run() -> None:
            self._gloo.broadcast([_host(tensors[0])], opts).wait()

        return self._send("broadcast", reads, writes, run)

    def allgather(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> _Sent:
        def run() -> None:
            self._gloo.allgather([[_host(out) for out in outs[0]]], [_host(ins[0])]).wait()

        return self._send("all_gather", ins, outs[0], run)

    def all_gather_single(self, out: Tensor, own: Tensor, opts: Any = None) -> _Sent:
        def run() -> None:
            parts = list(_host(out).view(-1).chunk(self.size()))
            self._gloo.allgather([parts], [_host(own).reshape(-1)]).wait()

        return self._send("all_gather", [own], [out], run)

    def reduce_scatter_single(self, out: Tensor, flat: Tensor, opts: Any = None) -> _Sent:
        def run() -> None:
            total = _host(flat).clone().view(-1)
            self._gloo.allreduce([total]).wait()
            start = self.rank() * out.numel()
            _host(out).view(-1).copy_(total[start : start + out.numel()])

        return self._send("reduce_scatter", [flat], [out], run)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> _Sent:
        def run() -> None:
            works = []
            for peer, (out, own) in enumerate(zip(outs, ins, strict=True)):
                if peer == self.rank():
                    _host(out).copy_(_host(own))
                else:
                    works.append(self._gloo.send([_host(own).contiguous()], peer, 7))
                    works.append(self._gloo.recv([_host(out)], peer, 7))
            for work in works:
                work.wait()

        return self._send("all_to_all", ins, outs, run)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> _Sent:
        def run() -> None:
            sent = _host(tensors[0]).clone()
            self._in_order(peer, lambda: self._gloo.send([sent], peer, tag).wait())

        return self._send("send", tensors, [], run, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> _Sent:
        def run() -> Callable[[], None]:
            target = _host(tensors[0])
            found = torch.empty_like(target)
            done = self._in_order(peer, lambda: self._gloo.recv([found], peer, tag).wait())

            def arrive() -> None:
                done.result()
                target.copy_(found)

            return arrive

        return self._send("receive", [], tensors, run, peer)


class Gloo(DeviceGroup):
    """gloo. From rank to rank it sends memory of the host alone; in torch 2.11 all_to_all takes no lists."""

    takes_host = True

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        raise RuntimeError("Backend gloo does not support alltoall")

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._refuse(tensors, "writev")
        return self._gloo.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        self._refuse(tensors, "readv")
        return self._gloo.recv(tensors, peer, tag)

    def _refuse(self, tensors: list[Tensor], call: str) -> None:
        if any(tensor.is_cuda for tensor in tensors):
            raise RuntimeError(f"{call}: Bad address")


def _host(tensor: Tensor) -> Tensor:
    """The same memory as a tensor of the CPU."""
    return _ops.alias(tensor) if tensor.is_cuda else tensor


dist.Backend.register_backend(BACKEND, DeviceGroup, devices=["cpu", "cuda"])
dist.Backend.register_backend(GLOO, Gloo, devices=["cpu", "cuda"])
_backend_of = dist.get_backend


def _get_backend(group: Any = None) -> str:
    """The name that the engine sees."""
    found = str(_backend_of(group))
    return "gloo" if found == GLOO else found


dist.get_backend = _get_backend
