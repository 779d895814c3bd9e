"""The rendezvous is detected from the environment, and unrelated variables of a shell are ignored."""

from __future__ import annotations

import pytest

from xds.launcher.command_line.cluster_environment import find_rendezvous, in_slurm_allocation
from xds.launcher.job import Host, Rendezvous
from xds.utils.errors import UsageError

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "train-0.train"}
NODES = {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "4000", "NNODES": "3", "NODE_RANK": "2"}
STEP = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2"}
STEP |= {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
STEP |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
OMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "PMIX_NAMESPACE": "9/1"}


def meeting(endpoint: str, num_nodes: int, node_rank: int, run_id: str = "xds") -> Rendezvous:
    return Rendezvous("static", endpoint, run_id, num_nodes, num_nodes, node_rank)


@pytest.mark.parametrize(
    "environ, expected",
    [
        (NODES, meeting("10.1.1.1:4000", 3, 2)),
        (NODES | {"MASTER_ADDR": "fd00::1"}, meeting("[fd00::1]:4000", 3, 2)),
        ({"MASTER_ADDR": "a", "NNODES": "2", "GROUP_RANK": "1"}, meeting("a:29500", 2, 1)),
        (POD | {"NNODES": "4", "JOB_COMPLETION_INDEX": "3"}, meeting("train-0.train:29500", 4, 3)),
        (POD | {"NNODES": "4", "HOSTNAME": "train-1"}, meeting("train-0.train:29500", 4, 1)),
        # Kubeflow's PyTorchJob counts pods as ranks
        (POD | {"WORLD_SIZE": "2", "RANK": "1"}, meeting("train-0.train:29500", 2, 1)),
    ],
)
def test_a_cluster_that_starts_every_machine_says_where_they_meet(
    environ: dict[str, str], expected: Rendezvous
) -> None:
    assert find_rendezvous(environ) == expected


def test_one_xds_a_task_of_srun_meets_the_others_on_the_first_machine() -> None:
    here = find_rendezvous(STEP)
    assert here is not None
    assert here == meeting(here.endpoint, 2, 1, "77.3")
    assert here.endpoint.startswith("n1:")
    first = find_rendezvous(STEP | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert first is not None and first.endpoint == here.endpoint
    told = find_rendezvous(STEP | {"MASTER_ADDR": "ib1", "MASTER_PORT": "5"})
    assert told == meeting("ib1:5", 2, 1, "77.3")


def test_one_xds_a_machine_of_mpirun_needs_the_first_one_s_address() -> None:
    with pytest.raises(UsageError, match="MASTER_ADDR is not set: mpirun does not set"):
        find_rendezvous(OMPI)
    told = find_rendezvous(OMPI | {"MASTER_ADDR": "a", "MASTER_PORT": "5"})
    assert told == meeting("a:5", 2, 1, "9_1")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"NNODES": "1", "MASTER_ADDR": "a", "NODE_RANK": "0"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "4000", "NODE_RANK": "1"},  # how many is not said
        {"WORLD_SIZE": "8", "RANK": "3", "MASTER_ADDR": "a"},  # no pod: of a script started by hand
        POD | {"WORLD_SIZE": "8", "RANK": "3", "LOCAL_RANK": "3"},  # inside a rank
        NODES | {"TORCHELASTIC_RUN_ID": "x"},
        POD,
        {key: value for key, value in STEP.items() if key != "SLURM_STEP_ID"},  # sbatch's script
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        OMPI | {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_what_says_nothing_about_other_machines_is_this_one_alone(environ: dict[str, str]) -> None:
    assert find_rendezvous(environ) is None


@pytest.mark.parametrize(
    "environ, said",
    [
        ({"NNODES": "2"}, "NNODES = 2, but MASTER_ADDR and NODE_RANK are not set"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "but MASTER_ADDR is not set"),
        ({"NNODES": "2", "MASTER_ADDR": "a"}, "but NODE_RANK is not set"),
        (NODES | {"NODE_RANK": "3"}, "NODE_RANK = 3, but NNODES = 3: must be from 0 to 2"),
        (NODES | {"NNODES": "two"}, "NNODES = 'two': must be a number"),
        (NODES | {"MASTER_PORT": "70000"}, "MASTER_PORT = 70000"),
        (STEP | {"SLURM_STEP_NUM_TASKS": "8"}, r"once on each \(`srun --ntasks-per-node=1"),
        (OMPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "mpirun --map-by ppr:1:node xds"),
    ],
)
def test_contradictions_and_gaps_are_told(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        find_rendezvous(environ)


def test_an_allocation_of_slurm_gives_hosts_and_their_slots() -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[08-10]"}
    slots = {
        (): 2,
        (("SLURM_GPUS_ON_NODE", "8"),): 8,
        (("SLURM_GPUS_PER_NODE", "a100:4"),): 4,
        (("SLURM_NTASKS_PER_NODE", "3"),): 3,
    }
    for more, count in slots.items():
        hosts = [Host(name, tuple(range(count))) for name in ("n08", "n09", "n10")]
        assert in_slurm_allocation(job | dict(more)) == hosts
    shell = job | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n08"}
    assert len(in_slurm_allocation(shell)) == 3, "a shell of srun --pty holds the whole allocation"
    assert in_slurm_allocation({}) == []
    assert in_slurm_allocation(job | {"TORCHELASTIC_RUN_ID": "x"}) == []
