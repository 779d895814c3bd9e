"""The group of all ranks: how long a rank waits for the others, and how NCCL is started."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks

from xds.engine.deepspeed.library import comm
from xds.engine.process.process import join
from xds.ops.comm.backend import Backend
from xds.utils.errors import PeerError, UsageError

CPU = torch.device("cpu")


def group_timeout_seconds() -> float:
    group = dist.group.WORLD
    assert group is not None
    return group._get_backend(CPU).options._timeout.total_seconds()


def timeout_alone(asked: str | None) -> float | str:
    """What a fresh process gets for XDS_TIMEOUT_SECONDS = `asked`."""
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as environment:
        for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "XDS_TIMEOUT_SECONDS"):
            environment.delenv(key, raising=False)
        if asked is not None:
            environment.setenv("XDS_TIMEOUT_SECONDS", asked)
        try:
            join(CPU)
        except UsageError as error:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            return str(error)
    return group_timeout_seconds()


TIMEOUTS = {None: 600.0, "": 600.0, "45": 45.0, "0.5": 0.5}
NO_TIMEOUTS = ("0", "-3", "ten", "nan", "inf", "1e9")


def timeouts(asked: list[str | None]) -> list[float | str]:
    return [timeout_alone(each) for each in asked]


def test_the_environment_sets_the_timeout() -> None:
    (found,) = run_new_ranks(timeouts, 1, [*TIMEOUTS, *NO_TIMEOUTS])
    assert found[: len(TIMEOUTS)] == [*TIMEOUTS.values()]
    for asked, said in zip(NO_TIMEOUTS, found[len(TIMEOUTS) :], strict=True):
        assert f'XDS_TIMEOUT_SECONDS = "{asked}": must be a number of seconds above 0' in said


def timeout_of_the_users_group() -> float:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDS_TIMEOUT_SECONDS", "45")
        join(CPU)
    return group_timeout_seconds()


def test_a_group_that_exists_keeps_its_timeout() -> None:
    assert run_new_ranks(timeout_of_the_users_group, 1, timeout_seconds=77) == [77.0]


def spied(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], Any]:
    """What init_process_group gets, and the group that it makes."""
    asked: list[dict[str, Any]] = []
    world = SimpleNamespace(bound_device_id=None)

    def start(backend: str, **options: Any) -> None:
        asked.append(options)
        world.bound_device_id = options.get("device_id")

    monkeypatch.setattr(dist, "init_process_group", start)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    return asked, world


def test_ranks_that_do_not_meet_end_with_a_sentence_and_wait_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise RuntimeError("listen failed. port: 1, name: EADDRINUSE\nframe #0")

    spied(monkeypatch)
    monkeypatch.setattr(dist, "init_process_group", start)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets it
        port = str(taken.getsockname()[1])
        environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for key, value in {**environ, "XDS_TIMEOUT_SECONDS": "0.3", "XDS_BACKEND": "gloo"}.items():
            monkeypatch.setenv(key, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        said = f"^rank 1 of 2 waits for the others at 127.0.0.1:{port}, .*: .*refused; start every"
        with pytest.raises(PeerError, match=said):
            join(CPU)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=f"^MASTER_PORT = {port}: in use .*; set another port"):
        join(CPU)


@pytest.mark.parametrize(
    ("device", "backend", "world_size", "binds"),
    [
        ("cuda:1", "nccl", 2, True),
        ("cuda:1", "nccl", 1, False),  # it has nobody to connect to
        ("cuda:1", "gloo", 2, False),
        ("cpu", "gloo", 2, False),
    ],
)
def test_nccl_connects_on_the_device_and_later_groups_do_not_split(
    device: str, backend: str, world_size: int, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, world = spied(monkeypatch)
    environment = {"RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for key, value in {**environment, "XDS_BACKEND": backend}.items():
        monkeypatch.setenv(key, str(value))
    join(torch.device(device))
    (options,) = asked
    assert options.get("device_id") == (torch.device(device) if binds else None)
    # torch builds each later group by a split, for which all ranks have to come, while this is set
    assert world.bound_device_id is None


@pytest.mark.parametrize(("backend", "binds"), [("nccl", True), ("gloo", False)])
def test_init_distributed_starts_nccl_in_the_same_way(
    backend: str, binds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, world = spied(monkeypatch)
    device = torch.device("cuda:1")
    monkeypatch.setattr(comm, "pick_device", lambda: device)
    monkeypatch.setattr(comm, "tell_accelerate", lambda: None)
    comm.init_distributed(backend, init_method="tcp://x:1", rank=0, world_size=2)
    (options,) = asked
    assert options.get("device_id") == (device if binds else None)
    assert (options["rank"], options["world_size"]) == (0, 2)
    assert world.bound_device_id is None


@pytest.mark.parametrize(
    ("device", "backend", "ids"),
    [("cuda:1", "nccl", [1]), ("cuda:1", "gloo", None), ("cpu", "gloo", None)],
)
def test_a_barrier_of_nccl_is_on_the_rank_s_device(
    device: str, backend: str, ids: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(dist, "barrier", lambda _, device_ids: asked.append(device_ids))
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    group: Any = SimpleNamespace(device=torch.device(device), group=None)
    Backend.barrier(group)
    assert asked == [ids]
