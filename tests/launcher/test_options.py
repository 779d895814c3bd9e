"""The options of deepspeed and torchrun: how they are parsed, and where they make a job run."""

import os
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xds.launcher.command_line import where as place
from xds.launcher.command_line.option_docs import page
from xds.launcher.command_line.option_table import GROUPS, OPTIONS
from xds.launcher.command_line.options import check_options, help_text, read
from xds.launcher.command_line.where import Hosts, Local, where_to_run
from xds.launcher.job import Rendezvous, Restarts
from xds.utils.errors import UsageError, XdsError

HERE = socket.gethostname()
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_GPUS_ON_NODE": "4",
}

# `deepspeed --help` and `torchrun --help`, the names alone
DEEPSPEED = """-H --hostfile -i --include -e --exclude --num_nodes --min_elastic_nodes --max_elastic_nodes
--num_gpus --num_accelerators --master_port --master_addr --node_rank --launcher --launcher_args --module
--no_python --no_local_rank --no_ssh --no_ssh_check --force_multi --save_pid --enable_each_rank_log
--autotuning --elastic_training --bind_cores_to_rank --bind_core_list --ssh_port --venv_script --log_level
-q --quiet -h --help"""
TORCHRUN = """-h --help --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf
--standalone --max-restarts --monitor-interval --start-method --event-log-handler --role -m --module
--no-python --run-path --log-dir -r --redirects -t --tee --local-ranks-filter --duplicate-stdout-filters
--duplicate-stderr-filters --node-rank --master-addr --master-port --local-addr --logs-specs --numa-binding
--signals-to-handle --shutdown-timeout --virtual-local-rank"""


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("hosts").write_text("worker-0 slots=4\nworker-1 slots=2\nworker-2 slots=4\n")
    Path("here").write_text("localhost slots=3\n")
    Path("spare").write_text("worker-0 slots=4\nworker-1 slots=2 spare\n")
    return tmp_path


def where(line, environ=None, default_hostfile="no such file"):
    return where_to_run(read([*line.split(), "t.py"]), environ or {}, default_hostfile)


def slots(found):
    assert isinstance(found, Hosts)
    return {host.name: list(host.slots) for host in found.hosts}


def meeting(found):
    assert isinstance(found, Local)
    return found.rendezvous


# -- reading --------------------------------------------------------------------------------------------


def test_every_option_of_deepspeed_and_torchrun_is_known_in_both_spellings():
    for name in (DEEPSPEED + " " + TORCHRUN).split():
        for spelling in {
            name,
            "--" + name[2:].replace("-", "_"),
            "--" + name[2:].replace("_", "-"),
        }:
            if spelling.startswith("--") == name.startswith("--"):
                option = next(each for each in OPTIONS if spelling in place_names(each))
                value = [option.choices[0] if option.choices else "1"] if option.value else []
                assert read([spelling, *value, "t.py", "--x"]).command == ("t.py", "--x"), name


def place_names(option):
    names = {option.name, *option.aliases}
    return names | {"--" + name[2:].replace("-", "_") for name in names if name.startswith("--")}


def test_the_table_is_sound():
    spelled = [name for option in OPTIONS for name in place_names(option)]
    assert len(spelled) == len(set(spelled))
    for option in OPTIONS:
        assert option.group in GROUPS
        assert not (option.refusal and option.help) and not (option.refusal and option.note)
        assert not option.help.endswith(".") and "  " not in option.help + option.refusal
        assert option.name in help_text() or not option.help


def test_words_are_taken_apart():
    for words, given_options, command in (
        (["-t3", "-r=3", "t"], {"tee": "3", "redirects": "3"}, ("t",)),
        (["--rdzv_conf=a=b,c=d", "t"], {"rdzv_conf": "a=b,c=d"}, ("t",)),
        (["--launcher_args", "--x -p y", "t"], {"launcher_args": "--x -p y"}, ("t",)),
        (["--launcher_args", "-m", "t"], {"launcher_args": "-m"}, ("t",)),
        (["--num_nodes", "-1", "t"], {"num_nodes": "-1"}, ("t",)),
        (["--num_gpus", "1", "--num_gpus", "2", "t"], {"nproc_per_node": "2"}, ("t",)),
        (["--include=", "t"], {"include": ""}, ("t",)),
        (["-", "x"], {}, ("-", "x")),
        (["--module"], {"module": "1"}, ()),
    ):
        asked = read(words)
        assert (asked.given, asked.command) == (given_options, command), words
    for words in (["--hostfile"], ["--hostfile", "--include", "x"], ["-i"]):
        with pytest.raises(UsageError, match="needs a value"):
            read(words)


@given(
    words=st.lists(st.sampled_from([*map(lambda o: o.name, OPTIONS), "1", "x", "--", "-H", "-x3"]))
)
def test_any_words_are_read_or_refused(words):
    try:
        asked = read(words)
    except UsageError:
        return
    assert list(asked.command) == words[len(words) - len(asked.command) :]


VALUES = ["", *"0 1 2 1:2 -1 x hosts here worker-1:0 a=b c10d ssh slurm '".split()]
ENVIRONMENTS = [
    {},
    SLURM,
    {"PET_NNODES": "2", "PET_RDZV_BACKEND": "c10d"},
    {"NNODES": "2", "MASTER_ADDR": "a", "NODE_RANK": "1"},
]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    max_examples=150,
)
@given(
    asked=st.lists(st.tuples(st.sampled_from(OPTIONS), st.sampled_from(VALUES)), max_size=5),
    environ=st.sampled_from(ENVIRONMENTS),
)
def test_any_options_are_decided_or_refused(asked, environ):
    words = [f"{each.name}={value}" if each.value else each.name for each, value in asked]
    line = read([*words, "t.py"])
    try:
        check_options(line)
        found = where_to_run(line, environ, "no such file")
    except XdsError:
        return
    assert found.job.target == "t.py"
    if isinstance(found, Hosts):
        assert found.hosts and all(host.slots for host in found.hosts)
    else:
        assert 1 <= found.rendezvous.min_nodes <= found.rendezvous.max_nodes


REFUSED = """
--start-method thread | must be one of spawn, fork, forkserver
--numa-binding node | set --bind-cores-to-rank
--virtual_local_rank | every rank sees all GPUs
--logs_specs x | --logs_specs = x: xds writes the ranks' files itself
--duplicate-stdout-filters a | search the ranks' files
"""


def rows(table):
    return [line.split(" | ") for line in table.strip().splitlines()]


def test_what_is_refused_has_a_reason():
    for line, told in rows(REFUSED):
        with pytest.raises(UsageError) as error:
            check_options(read([*line.split(), "t.py"]))
        assert told in str(error.value)


def test_torchruns_variables_stand_in_for_its_flags():
    environ = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_NPROC_PER_NODE": "3",
        "PET_MODULE": "0",
    }
    environ |= {"PET_MASTER_ADDR": "10.0.0.1", "PET_MASTER_PORT": "1234", "PET_MAX_RESTARTS": "5"}
    found = where("", environ)
    assert meeting(found) == Rendezvous("static", "10.0.0.1:1234", "none", 2, 2, 1)
    assert (found.job.num_ranks, found.job.kind) == (3, "script")
    assert found.restarts.max_restarts == 5
    assert where("--nproc-per-node 1 --max-restarts 0", environ).job.num_ranks == 1
    assert slots(where("--hostfile hosts", environ))["worker-1"] == [0, 1]  # flags win
    assert where("", environ | {"TORCHELASTIC_RUN_ID": "x"}).rendezvous == Rendezvous()
    with pytest.raises(UsageError, match=r"PET_NNODES \(environment\) = x: must be"):
        where("", {"PET_NNODES": "x"})
    with pytest.raises(
        UsageError, match=r"PET_VIRTUAL_LOCAL_RANK \(environment\): every rank sees"
    ):
        where("", {"PET_VIRTUAL_LOCAL_RANK": "1"})


def test_the_page_of_options_is_current():
    file = Path(__file__).parents[2] / "docs" / "options.md"
    assert file.read_text() == page(), (
        "run: python -m xds.launcher.command_line.option_docs > docs/options.md"
    )
    assert all(f"`{option.name}" in page() for option in OPTIONS)


# -- this machine ---------------------------------------------------------------------------------------


def test_one_machine_uses_the_port_that_was_asked_for():
    lines = ["", "--standalone", "--nnodes 1", "--nnodes=1:1 --standalone", "--launcher local"]
    for line in (*lines, "--num_nodes 1"):
        assert where(line, {"HOME": "/"}) == Local(where("").job), line
    found = meeting(where("--master_port 1234"))
    assert found == Rendezvous("static", "127.0.0.1:1234", "none", 1, 1, 0)
    assert meeting(where("--nnodes 1 --node_rank 0 --master_addr ::1")).endpoint == "[::1]:29500"


def test_the_own_flags_reach_the_job():
    line = "-m --backend gloo --enable_each_rank_log logs"
    job = where(line + " --bind_cores_to_rank --bind_core_list 0-3").job
    assert (job.kind, job.backend) == ("module", "gloo")
    assert (job.log_dir, job.bind_cores, job.core_list) == ("logs", True, "0-3")
    assert where("--enable_each_rank_log None").job.log_dir == ""


def test_devices_of_this_machine_by_number(monkeypatch):
    monkeypatch.setattr(place, "num_devices_of_driver", lambda: 4)
    found = where("--include localhost:1,3")
    assert (found.devices, found.job.num_ranks) == ((1, 3), 2)
    assert where(f"--exclude {HERE}:0").devices == (1, 2, 3)
    assert where("--include localhost").devices is None
    with pytest.raises(UsageError, match="no slot 4 on host 'localhost'; it has 0-3"):
        where("--include localhost:4")
    with pytest.raises(UsageError, match="unknown host 'worker-1'.*this machine is the only one"):
        where("--include worker-1")
    monkeypatch.setattr(place, "num_devices_of_driver", lambda: 0)
    assert where("--include localhost:0,5").devices == (0, 5)
    with pytest.raises(UsageError, match="has no known GPU to exclude"):
        where("--exclude localhost:0")


def test_a_hostfile_of_this_machine_alone_runs_here():
    found = where("-H here")
    assert isinstance(found, Local) and found.job.num_ranks == 3 and found.devices is None
    assert where("-H here --include localhost:1-2").devices == (1, 2)
    assert where("-H here --num_gpus 2").job.num_ranks == 2
    assert slots(where("-H here --force_multi")) == {"localhost": [0, 1, 2]}
    assert where("-H here --launcher local").job.num_ranks == "auto"


# -- hosts ----------------------------------------------------------------------------------------------


def test_hosts_of_a_hostfile():
    found = where("--hostfile hosts --num_gpus 2 --ssh_port 2222 --venv_script /v/activate")
    assert slots(found) == {f"worker-{number}": [0, 1] for number in range(3)}
    assert found.launcher == "ssh" and found.job.num_ranks == "auto"
    remote = found.remote
    assert (remote.ssh_port, remote.venv_script) == (2222, "/v/activate")
    assert remote.python == sys.executable
    assert remote.folder == os.getcwd() and not remote.is_numbered
    assert (remote.master_addr, remote.master_port) == ("", None)


def test_hosts_of_a_run_with_recovery():
    found = where("-H spare --recover --spares 2")
    assert [host.is_spare for host in found.hosts] == [False, True]
    assert found.job.recovers and found.job.num_spares == 2 and found.launcher == "ssh"


def test_which_hosts_and_further_words_for_them():
    names = ["worker-0", "worker-1", "worker-2"]
    for line, expected in (
        ("--num_nodes 1", names[:1]),
        ("--include worker-2@worker-1", names[1:]),
        ("-e worker-1", names[::2]),
        ("--num_nodes -1 --num_gpus -1", names),
        ("--launcher PDSH", names),
    ):
        assert list(slots(where(f"--hostfile hosts {line}"))) == expected
    words = ["-H", "hosts", "-i", "worker-1:1", "--launcher_args", "-o 'A B' -v"]
    words += ["--master_addr", "10.0.0.1", "--master_port", "1234", "t.py"]
    remote = where_to_run(read(words), {}).remote
    assert remote.launcher_args == ("-o", "A B", "-v")
    assert (remote.master_addr, remote.master_port, remote.is_numbered) == ("10.0.0.1", 1234, True)


def test_a_default_hostfile_counts_only_where_it_is_there():
    assert list(slots(where("", default_hostfile="hosts")))[0] == "worker-0"
    assert slots(where("--include worker-1:0", default_hostfile="hosts")) == {"worker-1": [0]}
    assert isinstance(where("--launcher local", default_hostfile="hosts"), Local)
    assert isinstance(where("", default_hostfile="here"), Local)
    assert isinstance(where("--standalone", default_hostfile="hosts"), Local)


def test_a_default_hostfile_that_another_user_may_change_is_ignored(capfd):
    Path("hosts").chmod(0o666)
    assert isinstance(where("", default_hostfile="hosts"), Local)
    assert "hosts is ignored: every user may write to" in capfd.readouterr().err
    assert "worker-0" in slots(where("--hostfile hosts"))  # it is named


def test_no_ssh_is_this_machines_part():
    found = where("--hostfile hosts --no_ssh --node_rank 1 --master_port 1234")
    assert meeting(found) == Rendezvous("static", "worker-0:1234", "none", 3, 3, 1)
    assert found.job.num_ranks == 2
    found = where("--hostfile hosts --no_ssh --node_rank 0 --master_addr 10.1.1.1")
    assert meeting(found).endpoint == "10.1.1.1:29500"


IMPOSSIBLE = """
--hostfile gone | --hostfile = gone: no such file; correct the path
--launcher pdsh | --launcher: no hosts are named
--launcher slurm | start xds by `srun --nodes=N
--launcher mvapich -H hosts | mvapich
-H hosts --launcher x | --launcher = x: must be one of ssh
-H hosts --num_nodes 4 | there are only 3 hosts
-H hosts --num_gpus 3 | host 'worker-1' has 2 slots
-H hosts --nproc-per-node gpu | the hostfile defines the slots of the hosts
-H hosts --include a --num_nodes 1 | --include and --num_nodes cannot be combined
-H hosts --exclude a --num_gpus 1 | --exclude and --num_gpus cannot be combined
-H hosts --include a --exclude b | --include and --exclude cannot be combined
-H hosts --standalone | -H and --standalone cannot be combined
-H hosts --rdzv_backend c10d | -H and --rdzv_backend cannot be combined
-H hosts --node_rank 1 | -H and --node_rank cannot be combined
-H hosts --no_ssh | --no-ssh: needs --node-rank
-H hosts --no_ssh --node_rank 3 | --node_rank = 3: must be a number from 0 to 2
--no_ssh --node_rank 0 | --no_ssh: no hosts are named
-H hosts --launcher_args ' | close the quotes
-H hosts --ssh_port 99999 | --ssh_port = 99999: must be a number from 1 to 65535
-H hosts --master_port 0 | --master_port = 0: must be a number from 1
--num_nodes 2 | --num_nodes = 2: no other hosts are named
--nnodes 0 | --nnodes = 0: must be a number of machines
--nnodes 2 | --nnodes = 2: the machines have no rendezvous endpoint
--nnodes 3:2 | must be a number of machines from 1, or MIN:MAX
--nnodes 2 --standalone | --standalone: means one machine
-H hosts --nnodes 2 | of named hosts choose with --num-nodes
--max-restarts many | --max-restarts = many: must be a number from 0
-H hosts --min_elastic_nodes 3 --max_elastic_nodes 2 | swap them
--nnodes 2 --rdzv-backend c10d | need --rdzv-endpoint HOST:PORT
--nnodes 2:4 --node-rank 0 --master-addr a | needs --rdzv-backend c10d
--nnodes 2 --node-rank 2 --master-addr a | --node-rank = 2: must be a number from 0 to 1
--rdzv-backend c10d --rdzv-endpoint a:99999 | the port must be a number up to 65535
--rdzv-backend c10d --rdzv-endpoint a:b | must be HOST:PORT
--rdzv-backend c10d --rdzv-conf a | must be KEY=VALUE
-H hosts --recover --launcher openmpi | --launcher openmpi: it takes no orders after the start
-H hosts --recover --elastic-training | --recover and --elastic-training cannot be combined
-H hosts --recover --node-rank 1 | cannot be combined
-H spare | host worker-1 is marked `spare`, which needs --recover
-H spare --recover --include worker-1 | all hosts are marked `spare`
"""


def test_what_cannot_be():
    for line, told in rows(IMPOSSIBLE):
        with pytest.raises(UsageError) as error:
            where(line)
        assert told in str(error.value), line


# -- machines that are started one by one ---------------------------------------------------------------


MEETINGS = {
    "--nnodes 2 --node-rank 1 --master-addr a": ("static", "a:29500", "none", 2, 2, 1),
    "--nnodes 2 --node_rank 0 --master_addr a --master_port 1": ("static", "a:1", "none", 2, 2, 0),
    "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a --rdzv-id me": (
        "c10d",
        "a:29400",
        "me",
        2,
        2,
    ),
    "--rdzv-backend c10d": ("c10d", "127.0.0.1:0", "none", 1, 1),
    "--nnodes 2 --rdzv-backend etcd-v2 --rdzv-endpoint a:2379": ("etcd-v2", "a:2379", "none", 2, 2),
    "--nnodes 2 --node-rank 1 --rdzv-endpoint a:5 --master-addr b": (
        "static",
        "a:5",
        "none",
        2,
        2,
        1,
    ),
}


def test_torchruns_rendezvous():
    for line, expected in MEETINGS.items():
        assert meeting(where(line)) == Rendezvous(*expected), line
    options = "--nnodes 2:4 --rdzv_backend=c10d --rdzv_endpoint=[fe80::1]:7 --local-addr b"
    found = meeting(where(options + " --rdzv-conf timeout=9,is_host=1"))
    settings = {"timeout": "9", "is_host": "1"}
    expected = Rendezvous("c10d", "[fe80::1]:7", "none", 2, 4, local_addr="b", settings=settings)
    assert found == expected
    assert meeting(where("--nnodes 2 --master-addr a")).max_nodes == 2


# -- surroundings ---------------------------------------------------------------------------------------


def test_an_allocation_of_slurm():
    found = where("--max-restarts 2", SLURM)
    assert slots(found) == {f"n{number}": [0, 1, 2, 3] for number in (1, 2, 3)}
    assert found.launcher == "slurm" and found.restarts.max_restarts == 2
    assert slots(where("--num_nodes 2 --num_gpus 1", SLURM)) == {"n1": [0], "n2": [0]}
    assert where("--launcher ssh", SLURM).launcher == "ssh"
    assert where("--hostfile hosts", SLURM).launcher == "ssh"
    assert isinstance(where("--launcher local", SLURM), Local)
    assert isinstance(where("--standalone", SLURM), Local)
    one = SLURM | {"SLURM_JOB_NODELIST": "n1", "SLURM_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    assert isinstance(where("", one), Local)


def test_a_step_of_slurms_is_this_machine_or_meets_the_others():
    step = SLURM | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2", "SLURM_STEP_NUM_TASKS": "1"}
    assert meeting(where("", step)) == Rendezvous()
    assert slots(where("", step | {"SLURM_PTY_PORT": "1"}))  # a shell, from which all are started


def test_a_cluster_that_starts_xds_on_each_machine():
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7", "NNODES": "2", "NODE_RANK": "1"}
    found = meeting(where("--nproc-per-node 3", environ))
    assert (found.kind, found.endpoint) == ("static", "10.0.0.1:7")
    assert (found.max_nodes, found.node_rank) == (2, 1)
    assert meeting(where("--standalone", environ)) == Rendezvous()
    assert slots(where("--hostfile hosts", environ))


# -- restarts -------------------------------------------------------------------------------------------


def test_restarts_and_spare_hosts():
    for line, expected in {
        "": (),
        "--max-restarts 3": (3,),
        "--elastic_training": (100, 1),
        "--elastic_training --max_restarts 7 --min_elastic_nodes 2": (7, 2),
        "--max-restarts 2 --min_elastic_nodes 2 --max_elastic_nodes 3": (2, 2, 3),
        "--max-restarts 2 --max_elastic_nodes 2": (2, 2, 2),
        "--max-restarts 2 --max_elastic_nodes 9": (2, 3, 9),
    }.items():
        found = where(f"--hostfile hosts {line}")
        assert found.restarts == Restarts(*expected) and len(found.hosts) == 3, line
    assert len(where("-H hosts --num_nodes 2 --max_restarts 1").hosts) == 2


def test_which_numbers_of_ranks_fit(folder):
    (folder / "config.json").write_text(
        '{"elasticity": {"enabled": true, "max_train_batch_size": 12, "micro_batch_sizes": [2, 3],'
        ' "min_gpus": 1, "max_gpus": 12, "version": 0.1}}'
    )
    fits = where("--hostfile hosts --elastic-config config.json").restarts.fits
    assert fits is not None and fits(4) and not fits(5)
    assert where("").restarts.fits is None
