"""Groups of xds beside the DiLoCo of torchft: loss, bytes and the time of a step.

    python -m venv ft; ft/bin/pip install torchft-nightly xds-engine
    ft/bin/python benchmarks/outer/torchft_diloco.py [--steps 120] [--every 30] [--rounds 3]

Two groups of one rank train the GPT of loss.py, from its trained model, on the same windows, with the same
optimizers. Each run has a network namespace of its own (needs root), and `bytes` are all that its loopback has
carried after the first step: meetings, heartbeats and stores. Runs alternate. A step: the median over the
rounds of the mean wall and processor time, without the first five; the slower rank counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE)]
WAYS: dict[str, dict[str, Any] | None] = {
    "torchft": None,
    "xds": {},
    "xds, 8 bits": {"bits": 8},
    "xds, 4 bits": {"bits": 4},
    "xds, recovery": {},
}
GROUPS, LR, WARM = 2, 1.0, 5
LIGHTHOUSE_PORT, STORE_PORT = 29710, 29720


def train(way: str, rank: int, options: argparse.Namespace) -> None:
    """A rank. Prints what it has found."""
    import torch
    from loss import CLIP, RATES, Batches, adam, rate_of, trained_before
    from torch import nn
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model, batches = trained_before("1M", 0, options.before), Batches(options.seed)
    peak, steps = RATES["1M"], options.steps
    if WAYS[way] is None:
        manager, optimizer, loop = _torchft(model, rank, adam(model, peak), options)

        def step(rate: float, tokens: Any, targets: Any) -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

        loop.__enter__()
    else:
        engine = _xds(model, way, options)

        def step(rate: float, tokens: Any, targets: Any) -> None:
            for group in engine.optimizer.param_groups:
                group["lr"] = rate
            engine.backward(F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten()))
            engine.step()

    begin: tuple[float, float, int] = (0.0, 0.0, 0)
    for number in range(steps):
        if number == WARM:
            begin = time.perf_counter(), time.process_time(), _carried()
        step(rate_of(number, steps, peak), *batches.next(GROUPS)[rank])
    found = {
        "wall": (time.perf_counter() - begin[0]) / (steps - WARM),
        "cpu": (time.process_time() - begin[1]) / (steps - WARM),
        "bytes": _carried() - begin[2],
    }
    print(json.dumps(found | {"loss": batches.loss(model.eval())}), flush=True)
    if WAYS[way] is None:
        manager.shutdown()
    else:
        engine.destroy()


def _torchft(model: Any, rank: int, inner: Any, options: argparse.Namespace) -> Any:
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    port = STORE_PORT + rank
    _torchft.store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=120)),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=GROUPS,
        use_async_quorum=False,
        timeout=timedelta(seconds=120),
        quorum_timeout=timedelta(seconds=120),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=port,
        lighthouse_addr=f"http://localhost:{LIGHTHOUSE_PORT}",
        replica_id=f"group{rank}",
        hostname="localhost",
    )
    outer = torch.optim.SGD(model.parameters(), lr=LR)
    return manager, inner, DiLoCo(manager, [model], inner, outer, sync_every=options.every)


def _xds(model: Any, way: str, options: argparse.Namespace) -> Any:
    from loss import BATCH, CLIP, DECAY, RATES

    import xds

    params = {"lr": RATES["1M"], "weight_decay": DECAY}
    optimizer = {"type": "Nesterov", "params": {"lr": LR, "momentum": 0.0}}
    outer = {"groups": GROUPS, "steps": options.every, "optimizer": optimizer}
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": params},
        "gradient_clipping": CLIP,
        "outer": outer | (WAYS[way] or {}),
        "recovery": {"enabled": "recovery" in way},
        "log_level": "warning",
    }
    return xds.initialize(model, config)


def _carried() -> int:
    """Bytes that the loopback of this namespace has carried."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def start_ranks(way: str, words: list[str]) -> None:
    """Start the ranks in this namespace, and print what the slower one has found."""
    script = [str(Path(__file__).resolve()), "--rank", way, *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if "recovery" in way:
        command = [
            sys.executable,
            "-m",
            "xds",
            "--recover",
            "--nproc-per-node",
            str(GROUPS),
            *script,
        ]
        text = subprocess.run(
            command, env=environ, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        texts = [text]
    else:
        lighthouse = None
        if WAYS[way] is None:
            from torchft.coordination import LighthouseServer

            lighthouse = LighthouseServer(
                bind=f"[::]:{LIGHTHOUSE_PORT}", min_replicas=GROUPS, join_timeout_ms=1000
            )
        ranks = []
        for rank in range(GROUPS):
            place = {"RANK": str(rank), "WORLD_SIZE": str(GROUPS), "LOCAL_RANK": "0"}
            place |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29700"}
            command = [sys.executable, *script]
            ranks.append(
                subprocess.Popen(command, env=environ | place, stdout=subprocess.PIPE, text=True)
            )
        texts = [process.communicate()[0] for process in ranks]
        if lighthouse is not None:
            lighthouse.shutdown()
    lines = [line[line.index("{") :] for text in texts for line in text.splitlines() if "{" in line]
    found = [json.loads(line) for line in lines]
    print(json.dumps({key: max(each[key] for each in found) for key in found[0]}), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=30, help="steps between two meetings")
    parser.add_argument("--before", type=int, default=1000, help="steps without groups")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--inside", choices=WAYS, help="in the namespace: start ranks")
    parser.add_argument("--rank", choices=WAYS, help="a rank")
    options = parser.parse_args()
    words = [f"--{key}={getattr(options, key)}" for key in ("steps", "every", "before", "seed")]
    if options.rank:
        train(options.rank, int(os.environ["RANK"]), options)
        return 0
    if options.inside:
        start_ranks(options.inside, words)
        return 0
    from loss import trained_before

    trained_before("1M", 0, options.before)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for turn in range(options.rounds):
        for way in options.ways if turn % 2 == 0 else reversed(options.ways):
            inside = [sys.executable, str(Path(__file__).resolve()), "--inside", way, *words]
            command = ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inside]
            text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[way].append(json.loads(text.splitlines()[-1]))
    for way, runs in found.items():
        middle = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(json.dumps({"way": way} | middle), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
