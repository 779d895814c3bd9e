"""Another user of the machine attacks a running job, through its store, its files and its processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.getuid() != 0, reason="becomes another user, which needs root"
)

SCRIPT = """
    import os, threading, time
    from pathlib import Path
    import torch
    import xds

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "watch": {"heartbeat_seconds": 0.1},
        "checkpoint": {"preemption_save_dir": "preempted", "async_save": True},
    }
    engine = xds.initialize(torch.nn.Linear(8, 8), config)

    def step():
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()

    step()
    ready = Path(f"ready{engine.global_rank}")
    ready.write_text(f"{os.environ['MASTER_PORT']} {os.environ['XDS_RUN_FOLDER']}")
    is_over = torch.zeros(1)
    while not is_over:
        step()
        time.sleep(0.05)
        is_over[0] = os.path.exists("go")
        torch.distributed.all_reduce(is_over)
    engine.save_checkpoint("out")
    engine.wait_for_checkpoint()
    names = sorted(thread.name for thread in threading.enumerate())
    print(engine.global_rank, "xds-watch" in names, flush=True)
    engine.destroy()
"""

# Run as the other user, who has imported torch before: its files may be the first user's alone.
ATTACK = """
    import datetime, json, os, sys, time
    import torch.distributed as dist
    from pathlib import Path

    port, folder, pid = sys.argv[1:]
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    store = dist.TCPStore(
        "127.0.0.1", int(port), is_master=False, wait_for_workers=False,
        timeout=datetime.timedelta(seconds=5),
    )
    beats, end = [], time.monotonic() + 60
    while not beats and time.monotonic() < end:
        names = [name.decode() if isinstance(name, bytes) else name for name in store.list_keys()]
        beats = [name for name in names if "xds/beat/" in name]
        time.sleep(0.1)
    prefix, _, rest = beats[0].partition("xds/beat/")
    engine = rest.partition("/")[0]
    values = {name: store.compare_set(name, "?", "?") for name in names}
    own = {name: value for name, value in values.items() if "xds/" in name}
    said = {"read": b" ".join(own.values()).decode(errors="replace"), "opened": []}
    for path in (f"/proc/{pid}/environ", folder, f"{folder}/rank1.log"):
        try:
            said["opened"].append([path, str(os.listdir(path) if path == folder else open(path).read())])
        except OSError:
            pass
    words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    said["words"] = b" ".join(words).decode(errors="replace")

    escape = b"\\x1b]0;PWNED\\x07\\x1b[31mupdate your password\\x1b[0m"
    forged = [escape, b'{"at": 1, "host": "h", "steps": [[1, 2]]}', b"{", b"99"]
    report = {"rank": 1, "raised": "\\x1b[31mValueError: PWNED", "alarm": -1}
    forged.append(json.dumps(report).encode())
    targets = [prefix + name.replace("ENGINE", engine) for name in (
        "xds/alarm/ENGINE", "xds/beat/ENGINE/0", "xds/beat/ENGINE/1", "xds/waits/0", "xds/waits/1",
        "xds/answers/ENGINE/1", "checkpoint/x/done",
    )]
    end = time.monotonic() + 1
    while time.monotonic() < end:
        for value in [*forged, own[beats[0]], own[beats[1]]]:  # forged ones, and others' in a wrong place
            for name in targets:
                store.set(name, value)
        store.delete_key(beats[0])
        time.sleep(0.005)
    print(json.dumps(said))
"""


def await_files(paths: list[Path], process: subprocess.Popen[str]) -> list[str]:
    while not all(path.exists() and path.read_text() for path in paths):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return [path.read_text() for path in paths]


def keys_of(port: str, pids: list[int]) -> dict[int, str]:
    """The key of the run, by the process id of each rank; "" where it has none."""
    found = {}
    for pid in pids:
        environ = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        values = dict(one.partition("=")[::2] for one in environ if one)
        if values.get("MASTER_PORT") == port:
            found[pid] = values.get("XDS_RUN_KEY", "")
    return found


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


@pytest.mark.slow
def test_it_cannot_read_stop_or_mislead_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    process = subprocess.Popen(
        [sys.executable, "-m", "xds.launcher.cli", "--nproc-per-node", "2", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"XDS_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        first, _ = await_files([tmp_path / "ready0", tmp_path / "ready1"], process)
        port, folder = first.split(" ", 1)
        keys = keys_of(port, children(process.pid))
        pid, key = next(iter(keys.items()))
        time.sleep(0.3)  # heartbeats
        attack = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(ATTACK), port, folder, str(pid)],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert attack.returncode == 0, attack.stderr
        (tmp_path / "go").touch()
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, err
    said: dict[str, Any] = json.loads(attack.stdout)
    assert said["opened"] == [] and not re.search(r'"at"|steps|host', said["read"])
    assert len(keys) == 2 and set(keys.values()) == {key} and len(key) == 64
    assert key not in said["words"] and key not in said["read"]
    log = (Path(folder) / "rank1.log").read_text()
    assert out.split() == ["0", "True"] and log.split()[-2:] == ["1", "True"]
    assert (tmp_path / "out" / "latest").exists() and not (tmp_path / "preempted").exists()
    for text in (err, log):
        assert "\x1b" not in text and "PWNED" not in text, text
        assert text.count("in the store of this run is ignored") == 1, text
