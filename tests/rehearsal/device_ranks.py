"""Ranks that have the device of stand_in.py: processes of their own, forked from one that has imported xds.

tests ── a set of ranks ──> template of "cuda"  ─┬─ leader, rank 0 ── rank 1
                                                 └─ leader, rank 0 ── rank 1 ── ...
                            template of "xsim"  ─── leader, rank 0 ── rank 1
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from helpers import TIMEOUT_SECONDS

HERE = Path(__file__).parent


def skip_without_device() -> None:
    """Skip the test where the stand-in cannot be."""
    import torch

    if sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("the device's stand-in needs Linux and g++")
    if torch.backends.cuda.is_built():
        pytest.skip("the device's stand-in needs the CPU build of torch")


class DeviceRanks:
    """`run` calls a module-level function on all ranks. A fault of the device is an error of that call."""

    def __init__(self, world_size: int, *, kernels: bool, gloo: bool, device: str) -> None:
        skip_without_device()
        self._folder = tempfile.TemporaryDirectory()
        ends = [Pipe() for _ in range(world_size)]
        self._pipes = [here for here, _ in ends]
        numbers = [there.fileno() for _, there in ends]
        named = {"folder": self._folder.name, "kernels": kernels, "gloo": gloo, "device": device}
        self._leader = _template("cuda" if device == "cuda" else "xsim").fork(numbers, named)
        for _, there in ends:
            there.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results by rank."""
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args)))
        answers = _answers(self._pipes)
        failures = [text for ok, text in answers if not ok]
        if failures:
            if len(self._pipes) > 1:  # the others may still wait for a message
                for key in [key for key, ranks in _started.items() if ranks is self]:
                    del _started[key]
                self.stop()
            raise AssertionError(failures[0])
        return [value for _, value in answers]

    def stop(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        until = time.monotonic() + 5
        with suppress(ProcessLookupError):  # the template waits for none
            while time.monotonic() < until:
                os.killpg(self._leader, 0)
                time.sleep(0.01)
            os.killpg(self._leader, signal.SIGKILL)
        self._folder.cleanup()


class Template:
    """A process that has imported xds and has a device. It forks sets of ranks until `end`."""

    def __init__(self, device: str) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = f"import device_ranks; device_ranks.fork_sets({there.fileno()}, {device!r})"
        paths = [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[there.fileno()],
            env=environment,
            start_new_session=True,
        )
        there.close()

    def fork(self, numbers: list[int], named: dict[str, Any]) -> int:
        """Start a set of ranks with these pipes. Returns the number of its first process and of its group."""
        socket.send_fds(self._socket, [pickle.dumps(named)], numbers)
        answer = self._socket.recv(64)
        assert answer, "the process that forks ranks has ended"
        return int(answer)

    def end(self) -> None:
        """Sets that run stay."""
        self._socket.close()
        self._process.wait()


def fork_sets(number: int, device: str) -> None:
    """The program of a template."""
    import stand_in

    stand_in.load(stand_in.compiled(), device)
    import torch._dynamo  # noqa: F401  (the first optimizer imports it)

    import xds.engine.initialize  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nothing is left of sets that end
    server = socket.socket(fileno=number)
    while True:
        text, numbers, _, _ = socket.recv_fds(server, 1 << 16, 64)
        if not text:
            os._exit(0)
        leader = os.fork()
        if leader == 0:
            server.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            serve(list(numbers), **pickle.loads(text))
        for one in numbers:
            os.close(one)
        server.send(str(leader).encode())


def _answers(pipes: list[Connection]) -> list[tuple[bool, Any]]:
    """Those of all ranks, or of the first that fail: others may wait for these."""
    found: dict[Connection, tuple[bool, Any]] = {}
    while len(found) < len(pipes) and all(ok for ok, _ in found.values()):
        ready = wait([pipe for pipe in pipes if pipe not in found], TIMEOUT_SECONDS)
        if not ready:
            return [(False, "a rank gave no answer")]
        found |= {pipe: _answer(pipe) for pipe in ready}  # type: ignore[misc]
    return [found[pipe] for pipe in pipes if pipe in found]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        answer: tuple[bool, Any] = pickle.loads(pipe.recv_bytes())
        return answer
    except EOFError:
        return False, "a rank died"


_started: dict[tuple[int, bool, bool, str], DeviceRanks] = {}
_templates: dict[str, Template] = {}


def _template(device: str) -> Template:
    if device not in _templates:
        _templates[device] = Template(device)
    return _templates[device]


def ranks(
    world_size: int, *, kernels: bool = False, gloo: bool = False, device: str = "cuda"
) -> DeviceRanks:
    """The same ranks for every test, until `stop_ranks`.

    kernels: see `stand_in.use_host_kernels`. gloo: its messages instead of NCCL's, as of ranks on one GPU.
    device: see stand_in.py; other devices than CUDA have the messages of gloo itself.
    """
    key = (world_size, kernels, gloo, device)
    if key not in _started:
        _started[key] = DeviceRanks(world_size, kernels=kernels, gloo=gloo, device=device)
    return _started[key]


def stop_ranks(above: int = 0) -> None:
    """End the processes of all sets of more than `above` ranks; with the last one what has forked them."""
    for key in [key for key in _started if key[0] > above]:
        _started.pop(key).stop()
    while not above and _templates:
        _templates.popitem()[1].end()


def serve(numbers: list[int], folder: str, *, kernels: bool, gloo: bool, device: str) -> None:
    """The program of the ranks of a set."""
    import stand_in
    import torch
    from helpers import SMALL_NUMEL

    from xds.zero.core import grad_bucket

    if device == "plain":
        stand_in.be_plain()
    if kernels:
        stand_in.use_host_kernels()
    grad_bucket.SMALL_NUMEL = SMALL_NUMEL  # as in the ranks of helpers.py
    rank = next((rank for rank in range(1, len(numbers)) if os.fork() == 0), 0)
    # after the last fork: threads of autograd that start at once race for the first pool of a fork
    torch.set_num_threads(1)
    pipes = [Connection(number) for number in numbers]
    pipe = pipes[rank]
    for other in pipes:
        if other is not pipe:
            other.close()
    world_size = len(numbers)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if device != "cuda":
        torch.ops.host_cuda.set_index(rank)
    where = f"file://{folder}/rendezvous"
    _join(where, rank, world_size, gloo=gloo, device=device)
    while True:
        try:
            function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)
        pipe.send_bytes(pickle.dumps(_called(function, args)))


def _join(where: str, rank: int, world_size: int, *, gloo: bool, device: str) -> None:
    """Open the process group, and the streams that all calls share: two of one number would hide a race."""
    import torch
    import torch.distributed as dist

    from xds.engine.data.batches import copier_for
    from xds.ops import device as devices

    backend = "gloo"
    if device == "cuda":
        import messages

        backend = messages.GLOO if gloo else messages.BACKEND
    elif device == "plain":
        devices.KINDS["xsim"] = devices.Kind(  # type: ignore[index]
            "gloo", has_streams=False, pins_memory=False, has_fp64=False
        )
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=world_size)
    if device != "plain":
        if device == "cuda":
            dist.all_reduce(torch.zeros(1, device="cuda"))
        copier_for(torch.accelerator.current_accelerator())
        torch.ops.host_cuda.keep_streams()


def _called(function: Callable[..., Any], args: Any) -> tuple[bool, Any]:
    import gc

    import torch

    ops = torch.ops.host_cuda
    torch.manual_seed(0)
    ops.forget_streams()
    try:
        result = function(*args)
        gc.collect()
        faults = sorted(set(ops.take_faults()))
        return (False, "\n".join(faults)) if faults else (True, result)
    except BaseException:
        faults = ops.take_faults()
        return False, "\n".join([traceback.format_exc(), *faults])
