"""Kills ranks of trainings with each feature, and compares their numbers with those of runs without kills.

    python benchmarks/recovery/features.py [--with "ZeRO 2"] [--only tensor,pipeline] [--out found.jsonl]

The features are those of docs/combinations.md and of `MORE`, each with a ZeRO stage, on a small Llama of
transformers. Where all ranks hold one copy of the states the numbers have the same bits. Where units are
replicas they differ by rounding alone, and not at all in what a feature draws. A line of the output is a
feature: equal, different, refused with a sentence, or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[2] / "tests"))
STEPS, LIMIT_SECONDS = 6, 240.0
NEAR = 1e-4  # where the units that are left run the samples of others: sums have another order
DEATHS = ((1, 3, "norm"), (0, 4, "forward"))  # rank, steps before, where
MORE: dict[str, dict[str, Any]] = {  # settings that change when states are complete
    "overlap_step": {
        "zero_optimization": {"offload_optimizer": {"device": "cpu", "overlap_step": True}}
    },
}


def train() -> None:
    import torch
    from feature_pairs import in_folder, model_of, samples
    from tensor_cases import build

    import xds
    from xds.zero.model.update import Updater

    out, rank = Path(os.environ["OUT"]), int(os.environ["RANK"])
    names = tuple(json.loads(os.environ["NAMES"]))
    deaths = [tuple(death) for death in json.loads(os.environ["DEATHS"])]
    engine: Any = None

    def die(where: str) -> None:
        done = out / f"died.{rank}"
        if (
            engine is not None
            and (rank, engine.global_steps, where) in deaths
            and not done.exists()
        ):
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    update = Updater.step

    def step(self: Any, *args: Any, **kwargs: Any) -> bool:
        die("norm")
        return update(self, *args, **kwargs)

    Updater.step = step  # type: ignore[method-assign]
    torch.set_num_threads(1)
    model = build(model_of(names))
    embedding = next(m for m in model.modules() if isinstance(m, torch.nn.Embedding))
    embedding.register_forward_pre_hook(lambda *_: die("forward"))
    config = in_folder(json.loads(os.environ["CONFIG"]), str(out))
    engine = xds.initialize(model, config, training_data=samples(names))
    with open(out / f"rank{rank}.jsonl", "a") as file:
        while engine.global_steps < STEPS:
            engine.train_batch()
            row = {"step": engine.global_steps, "loss": engine.mean_loss()}
            file.write(json.dumps({**row, "norm": engine.get_global_grad_norm()}) + "\n")
            file.flush()
        state = engine.full_state_dict(rank0_only=False)
        sums = {name: value.double().sum().item() for name, value in state.items()}
        file.write(json.dumps({"step": "end", "sums": sums}) + "\n")


def run(names: tuple[str, ...], deaths: Any, out: Path) -> tuple[str, dict[Any, Any]]:
    """How the run failed, or "", and what each rank has found, by rank and step."""
    from feature_pairs import config_of, first_token, merged, ranks_of, samples

    from xds.engine.data.analyzer import Metric, analyze

    out.mkdir()
    if "curriculum" in names:
        analyze(samples(names), [Metric("first", first_token)], str(out))
    config = config_of(tuple(name for name in names if name not in MORE))
    for name in names:
        config = merged(config, MORE.get(name, {}))
    config |= {"recovery": {"enabled": True}, "log_level": "error"}
    ranks, _ = ranks_of(config)
    environ = {**os.environ, "OUT": str(out), "NAMES": json.dumps(names), "OMP_NUM_THREADS": "1"}
    environ |= {"CONFIG": json.dumps(config), "DEATHS": json.dumps(deaths)}
    environ |= {"TRAIN": "1", "XDS_TIMEOUT_SECONDS": "60"}
    command = [
        str(Path(sys.executable).with_name("xds")),
        "--recover",
        "--nproc-per-node",
        str(ranks),
    ]
    command += ["--log-dir", str(out / "logs"), str(HERE)]
    with open(out / "output.txt", "w") as output:
        try:
            process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, start_new_session=True
            )
            code = process.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return "hangs", {}
    if code:
        lines = (out / "output.txt").read_text().splitlines()
        errors = [line for line in lines if "Error:" in line]
        return (errors or lines or [f"exit code {code}"])[0], {}
    found: dict[Any, Any] = {}
    for rank in range(ranks):
        for line in (out / f"rank{rank}.jsonl").read_text().splitlines():
            row = json.loads(line)
            found[rank, row["step"]] = row
    return "", found


def compared(names: tuple[str, ...]) -> dict[str, Any]:
    """What came of a run with kills beside one without."""
    with tempfile.TemporaryDirectory() as folder:
        failure, wanted = run(names, [], Path(folder) / "whole")
        if failure:
            is_refused = failure.startswith(("ConfigError", "UsageError"))
            return {"names": names, "is": "refused" if is_refused else "failed", "why": failure}
        failure, found = run(names, DEATHS, Path(folder) / "killed")
        num_deaths = len(list((Path(folder) / "killed").glob("died.*")))
    if failure:
        return {"names": names, "is": "failed", "why": failure}
    result = {"names": names, "is": "equal", "deaths": num_deaths, "ranks": len(found)}
    near = NEAR if "MiCS" in names or not names[0].startswith("ZeRO") else 0.0
    for key, row in found.items():
        if not are_near(row, wanted[key], near):
            result |= {"is": "different", "where": key, "found": row, "wanted": wanted[key]}
            if key[1] != "end":
                break
    return result


def are_near(found: Any, wanted: Any, near: float) -> bool:
    """All numbers of the one differ by at most this share of the other."""
    if isinstance(wanted, dict):
        same = found.keys() == wanted.keys()
        return same and all(are_near(found[key], wanted[key], near) for key in wanted)
    if isinstance(wanted, float):
        return bool(abs(found - wanted) <= near * max(1.0, abs(wanted)))
    return bool(found == wanted)


def main() -> None:
    from feature_pairs import CALLS, FEATURES

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--with", dest="beside", default="ZeRO 2")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    chosen = [name for name in options.only.split(",") if name] or [
        name for name in (*FEATURES, *MORE) if name not in CALLS and name != options.beside
    ]
    for name in chosen:
        names = (options.beside, name) if options.beside else (name,)
        text = json.dumps(compared(names))
        print(text[:600], flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(text + "\n")


if __name__ == "__main__":
    train() if "TRAIN" in os.environ else main()
