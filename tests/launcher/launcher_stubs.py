"""Test helper: replacements of ssh, srun, mpirun, mpiexec and pdsh that record their arguments.

Each runs the command on this machine, once per host, with the environment variables that the real one sets.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

_BEGIN = """#!{python}
import json, os, re, signal, subprocess, sys

def record(**more):
    with open({record!r}, "a") as file:
        file.write(json.dumps({{"argv": sys.argv, "environ": dict(os.environ), **more}}) + "\\n")

def value(name):
    for place, word in enumerate(sys.argv):
        if word == name:
            return sys.argv[place + 1]
        if word.startswith(name + "="):
            return word[len(name) + 1:]
    return ""

def run_all(commands, keep=None):
    # of the environment what `keep` names, all of it without
    base = {{key: os.environ[key] for key in (os.environ if keep is None else keep) if key in os.environ}}
    children = [
        subprocess.Popen(words, env=base | more, cwd="/", stdin=subprocess.DEVNULL)
        for words, more in commands
    ]
    def forward(number, frame):
        for child in children:
            child.send_signal(number)
    signal.signal(signal.SIGTERM, forward)
    signal.signal(signal.SIGINT, forward)
    codes = [child.wait() for child in children]
    sys.exit(max(code if code >= 0 else 128 - code for code in codes))

if sys.argv[1:] == ["--version"]:
    print({version!r})
    sys.exit(0)
record()
"""

_RUN = {
    # one line of text for the login shell there, as ssh joins it
    "ssh": """
words = sys.argv[1:]
while words and words[0].startswith("-") and words[0] != "--":
    words = words[2:] if words[0] in ("-o", "-p", "-l", "-F", "-i") else words[1:]
words = words[1:] if words[0] == "--" else words
os.chdir("/")
os.environ["SSH_CONNECTION"] = f"127.0.0.1 1 {words[0]} 22"
os.execv("/bin/sh", ["sh", "-c", " ".join(words[1:])])
""",
    # Slurm has an order of its own: here the reverse
    "srun": """
hosts = value("--nodelist").split(",") if value("--nodelist") else ["127.0.0.2", "127.0.0.3"]
words = sys.argv[sys.argv.index("/bin/sh"):]
run_all(
    [
        (words, {"SLURM_PROCID": str(place), "SLURMD_NODENAME": host, "SLURM_JOB_ID": "7",
                 "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(len(hosts)), "SLURM_LOCALID": "0",
                 "SLURM_NODEID": str(place), "SLURM_STEP_NODELIST": ",".join(reversed(hosts)),
                 "SLURM_STEP_TASKS_PER_NODE": f"1(x{len(hosts)})"})
        for place, host in enumerate(reversed(hosts))
    ],
    keep=[*value("--export").split(",")],
)
""",
    "mpirun": """
words = sys.argv[sys.argv.index("/bin/sh"):]
run_all([(words, {"OMPI_COMM_WORLD_RANK": str(place)}) for place in range(int(value("-n")))])
""",
    "mpiexec.hydra": """
words = sys.argv[sys.argv.index("/bin/sh"):]
run_all(
    [(words, {"PMI_RANK": str(place)}) for place in range(int(value("-n")))],
    keep=value("-genvlist").split(","),
)
""",
    "pdsh": """
hosts, line = value("-w").split(","), sys.argv[-1]
def filled(place, host):
    return re.sub("%[nh%]", lambda found: {"%n": str(place), "%h": host, "%%": "%"}[found[0]], line)
run_all([(["/bin/sh", "-c", filled(*item)], {}) for item in enumerate(hosts)])
""",
}
_VERSIONS = {"mpirun": "mpirun (Open MPI) 4.1.4", "mpiexec.hydra": "HYDRA build details:"}


def make_stub(folder: Path, name: str, version: str = "") -> Path:
    """Write the stub called `name` into `folder`; what it is given goes to the file that is returned."""
    record = folder / f"{name}.jsonl"
    path = folder / name
    path.write_text(
        _BEGIN.format(
            python=sys.executable, record=str(record), version=version or _VERSIONS.get(name, name)
        )
        + _RUN[name]
    )
    path.chmod(0o755)
    return record


def with_stub(folder: Path) -> dict[str, str]:
    """This process's environment, with the stubs in `folder` before everything else."""
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def calls(record: Path) -> list[dict[str, object]]:
    """What the stub was given, call by call."""
    return [json.loads(line) for line in record.read_text().splitlines()]
