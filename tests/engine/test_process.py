"""How long a rank waits for the others: the environment's word, or that of a group that exists."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers import run_new_ranks

from xds.engine.process.process import join
from xds.utils.errors import UsageError

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


@pytest.mark.parametrize(
    ("asked", "want"), [(None, 600.0), ("", 600.0), ("45", 45.0), ("0.5", 0.5)]
)
def test_the_environment_sets_the_timeout(asked: str | None, want: float) -> None:
    assert run_new_ranks(timeout_alone, 1, asked) == [want]


@pytest.mark.parametrize("asked", ["0", "-3", "ten", "nan", "inf", "1e9"])
def test_a_timeout_that_is_none_is_refused(asked: str) -> None:
    (said,) = run_new_ranks(timeout_alone, 1, asked)
    assert f'XDS_TIMEOUT_SECONDS = "{asked}": must be a number of seconds above 0' in said


def timeout_of_the_users_group() -> float:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDS_TIMEOUT_SECONDS", "45")
        join(CPU)
    return group_timeout_seconds()


def test_a_group_that_exists_keeps_its_timeout() -> None:
    assert run_new_ranks(timeout_of_the_users_group, 1, timeout_seconds=77) == [77.0]
