"""What must never change: the losses of small trainings, as they are stored in losses.json.

A training in fp32 gives the stored losses within 1e-6 on any processor, in 16 bits within 1e-2. `same_bits.py`
compares two checkouts on one machine bit for bit. To store losses after a change that is meant, run it with
XDS_STORE_LOSSES=1.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from helpers import run_processes, run_ranks
from same_bits import cases, train

import xds
from xds.launcher import cli

pytestmark = pytest.mark.contract
STORED = Path(__file__).parent / "losses.json"
STEPS = 3
FEATURES = (
    "1 ranks, stage 0, fp32, host",
    "2 ranks, stage 2, fp32, host",
    "2 ranks, stage 3, bf16, all on disk",
    "2 ranks, stage 3, fp32, all on the host",
    "2 ranks, stage 2, fp32, freezing",
    "2 ranks, stage 3, fp32, edits",
    "2 ranks, 1-bit Adam, stage 1",
    "2 ranks, ZeRO++, stage 3, fp32",
    "2 ranks, shared parameters, stage 2",
    "4 ranks, MiCS, stage 3",
    "4 ranks, pipeline, stage 1, fp32",
    "4 ranks, slices, stage 3",
    "4 ranks, sequences, stage 1",
    "4 ranks, llama pipeline, stage 3",
)


def losses(name: str) -> list[float]:
    """Of this rank."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(cases()[name][1], STEPS, folder, reads=name in FEATURES)
    return [float(loss) for loss in found["losses"]]


def test_losses_are_as_stored() -> None:
    matrix = [name for name in cases() if name.startswith("2 ranks") and "accumulation 2" in name]
    chosen = {name for name in matrix if " host" not in name and " disk" not in name} | {*FEATURES}
    assert chosen <= cases().keys()
    found = {}
    for name in [name for name in cases() if name in chosen]:
        run = run_processes if "shared parameters" in name else run_ranks
        found[name] = run(losses, cases()[name][0], name, small_numel=None)
    if os.environ.get("XDS_STORE_LOSSES"):
        STORED.write_text(json.dumps(found, indent=0) + "\n")
    wanted = json.loads(STORED.read_text())
    assert found.keys() == wanted.keys()
    for name, ranks in wanted.items():
        # bf16 and fp16 have other last bits on another processor
        limit = 1e-6 if cases()[name][1].get("precision", "fp32") == "fp32" else 1e-2
        for mine, stored in zip(found[name], ranks, strict=True):
            assert mine == pytest.approx(stored, rel=limit), name


def saved(folder: str) -> None:
    model = torch.nn.Linear(4, 4)
    engine = xds.initialize(model, {"train_batch_size": 2, "optimizer": {"type": "AdamW"}})
    engine.save_checkpoint(folder)
    engine.destroy()


def test_each_command_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run_ranks(saved, 1, str(tmp_path / "out"))
    (tmp_path / "config.json").write_text('{"train_batch_size": 2, "optimizer": {"type": "AdamW"}}')
    elastic = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}
    (tmp_path / "elastic.json").write_text(json.dumps({"elasticity": elastic}))
    (tmp_path / "small.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"
    )
    config = str(tmp_path / "config.json")
    for words in (
        ["--help"],
        ["--version"],
        ["check", config],
        ["elastic", str(tmp_path / "elastic.json")],
        ["plan", config, "--model", "small:build", "--world-size", "2"],
        ["checkpoint", "verify", str(tmp_path / "out")],
        ["checkpoint", "info", str(tmp_path / "out")],
        ["data", "info", "--help"],
        ["ops", "list"],
        ["env"],
        ["bench", "comm", "--help"],
    ):
        try:
            code = cli.main(words)
        except SystemExit as request:  # argparse's --help
            code = request.code
        shown = capsys.readouterr()
        assert code in (0, None), f"xds {' '.join(words)}: {shown.err}"
        assert shown.out, words
