"""A script that srun or mpirun starts once for each rank finds its place by their variables."""

from __future__ import annotations

import pytest

from xds.engine.process.foreign_launcher import (
    expand_nodes,
    fill,
    place,
    slurm_nodes,
    tasks_per_node,
)
from xds.engine.process.process import local_rank
from xds.utils.errors import UsageError

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "gpu[09-10]",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2)",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1234",
}
HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def filled(environ: dict[str, str]) -> dict[str, str]:
    after = dict(environ)
    fill(after)
    return {key: value for key, value in after.items() if environ.get(key) != value}


def test_srun_tells_each_task_its_rank_and_all_the_same_meeting_place() -> None:
    mine = filled(SLURM)
    assert mine | {"MASTER_PORT": ""} == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "gpu09",
        "MASTER_PORT": "",
    }
    other = filled(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (other["MASTER_ADDR"], other["MASTER_PORT"]) == ("gpu09", mine["MASTER_PORT"])
    assert filled(SLURM | {"SLURM_STEP_ID": "4"})["MASTER_PORT"] != mine["MASTER_PORT"]
    assert 1024 < int(mine["MASTER_PORT"]) < 32768
    exported = filled(SLURM | {"WORLD_SIZE": "6"})  # by the batch script, for all of its steps
    assert exported == {key: value for key, value in mine.items() if key != "WORLD_SIZE"}


def test_mpirun_tells_each_process_its_rank() -> None:
    mine = filled(OMPI)
    assert (mine["RANK"], mine["WORLD_SIZE"], mine["LOCAL_RANK"]) == ("3", "4", "1")
    assert mine["MASTER_ADDR"] == "127.0.0.1"
    mine = filled(HYDRA | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1111"})
    assert (mine["RANK"], mine["LOCAL_RANK"], mine["LOCAL_WORLD_SIZE"]) == ("3", "1", "2")
    assert "MASTER_PORT" not in mine, "what is set stays"


def test_mpirun_on_several_machines_needs_the_address_of_the_first() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR is not set: mpirun does not provide"):
        fill(dict(HYDRA))


@pytest.mark.parametrize(
    "environ",
    [
        {},
        OMPI | {"RANK": "0", "WORLD_SIZE": "1"},  # under xds or torchrun, whatever started those
        OMPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        {
            key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"
        },  # sbatch's own script
        SLURM | {"SLURM_STEP_ID": "4294967291"},  # the same, where an older Slurm says so
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"SLURM_JOB_ID": "77", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
    ],
)
def test_a_process_alone_is_not_mistaken_for_one_of_many(environ: dict[str, str]) -> None:
    assert place(environ) is None
    assert filled(environ) == {}


@pytest.mark.parametrize(
    "environ, said",
    [
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "OMPI_COMM_WORLD_RANK is not set: .*; without mpirun unset",
        ),
        (OMPI | {"OMPI_COMM_WORLD_RANK": "4"}, "contradict"),
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "four"}, "must be a number"),
        (SLURM | {"WORLD_SIZE": "8"}, "WORLD_SIZE = 8, but SLURM_STEP_NUM_TASKS = 6: .*; unset"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is not set"),
        (SLURM | {"SLURM_PROCID": "6"}, "contradict"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-"}, "cannot be read"),
    ],
)
def test_what_is_not_whole_is_an_error_that_names_it(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        place(environ)


def test_slurm_s_lists_are_read_as_slurm_means_them() -> None:
    assert expand_nodes("n[009-011,7],login,r[1-2]s[0-1]-x") == [
        *("n009", "n010", "n011", "n7", "login"),
        *("r1s0-x", "r1s1-x", "r2s0-x", "r2s1-x"),
    ]
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert slurm_nodes({"SLURM_JOB_NODELIST": "a,b", "SLURM_STEP_NODELIST": "b"}) == ["a", "b"]
    assert slurm_nodes(SLURM) == ["gpu09", "gpu10"]
    for wrong in ("n[1-", "a,,b", "n[3-1]", "n[1]]", "]", "n[0-999999999]", "n[]"):
        with pytest.raises(UsageError, match="cannot be read"):
            expand_nodes(wrong)
    with pytest.raises(UsageError, match="cannot be read"):
        tasks_per_node("2(x")


def test_the_local_rank_is_srun_s_where_nothing_else_says_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(key, raising=False)
    assert local_rank() == 0
    for key, value in SLURM.items():
        monkeypatch.setenv(key, value)
    assert local_rank() == 1
    monkeypatch.setenv("SLURM_STEP_NODELIST", "[")
    assert local_rank() == 0, "join tells what is wrong"
