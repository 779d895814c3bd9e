"""`xds checkpoint`: the output and the exit code of each command."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_processes
from saved_checkpoints import engine_of, train

from xds.launcher.checkpoint import main
from xds.launcher.cli import main as xds_main
from xds.utils.errors import UsageError
from xds.utils.sizes import parse_bytes, size_text


def save_three(folder: str) -> None:
    engine = engine_of(2, "bf16")
    for tag in ("first", "second", "third"):
        train(engine, 1)
        engine.save_checkpoint(folder, tag)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_processes(save_three, 2, str(folder))
    return folder


Capture = pytest.CaptureFixture[str]


def test_info_says_what_it_is_and_which_others_there_are(saved: Path, capsys: Capture) -> None:
    assert main(["info", str(saved), "--tensors"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in (
        "tag third",
        "global steps 3",
        "world size 2",
        "stage 2",
        "files 2",
        "params 11",
    ):
        assert line.split() in lines
    for line in (
        "other tags second, first",
        "tied again.weight = inner.weight",
        "param inner.weight [27, 9] float32 states step, exp_avg, exp_avg_sq",
        "frozen frozen.bias [9] bfloat16",
        "buffer norm.num_batches_tracked [] int64",
    ):
        assert line.split() in lines


def test_info_in_json_reads_back(saved: Path, capsys: Capture) -> None:
    assert main(["info", str(saved / "first"), "--json", "--tensors"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["tag"], facts["global_steps"], facts["stage"]) == ("first", 1, 2)
    assert facts["other_tags"] == ["third", "second"]
    assert facts["size_bytes"] == sum(
        p.stat().st_size for p in (saved / "first").glob("*.safetensors")
    )
    assert facts["dtypes"] == ["bfloat16"] or "float32" in facts["dtypes"]
    one = next(one for one in facts["tensors"] if one["name"] == "outer.weight")
    assert one["shape"] == [9, 27] and one["states"] == ["step", "exp_avg", "exp_avg_sq"]


def test_verify_accepts_a_complete_checkpoint(saved: Path, capsys: Capture) -> None:
    assert main(["verify", str(saved), "--tag", "second"]) == 0
    out, err = capsys.readouterr()
    assert "second is complete: 2 files" in out and err == ""


def test_verify_names_every_damaged_file(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    first, second = sorted((folder / "third").glob("*.safetensors"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    second.write_bytes(second.read_bytes()[:-1])
    assert main(["verify", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "third is damaged: 2 problems in 2 files" in err
    assert f"{first} is damaged: bytes" in err
    assert f"{second} has {len(content)}" not in err and f"{second} has " in err
    assert main(["verify", str(folder), "--tag", "second"]) == 0
    for to in ("safetensors", "torch", "dcp"):
        capsys.readouterr()
        assert main(["export", str(folder), str(tmp_path / "out"), "--to", to]) == 1
        assert "third/rank_0000" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("what", ["manifest.json", "manifest is gone", "latest"])
def test_a_damaged_manifest_or_latest_is_damage(
    saved: Path, tmp_path: Path, capsys: Capture, what: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved, folder)
    manifest = folder / "third" / "manifest.json"
    if what == "manifest.json":
        manifest.write_bytes(manifest.read_bytes()[:-20])
    elif what == "latest":
        (folder / "latest").write_text("no such tag")
    else:
        manifest.unlink()
    for command in ("verify", "info"):
        assert main([command, str(folder)]) == 1
        assert what.split()[0] in capsys.readouterr().err


def test_a_command_that_cannot_be_done_is_a_sentence_and_2(
    saved: Path, tmp_path: Path, capsys: Capture
) -> None:
    out = str(tmp_path / "out")
    for words, sentence in (
        (["verify", str(tmp_path / "nowhere")], "nowhere is not a folder"),
        (["info", str(tmp_path)], "has no file `latest`: there is no checkpoint in it"),
        (["info", str(saved), "--tag", "fourth"], "fourth is not a committed checkpoint"),
        (["export", str(saved), out, "--to", "safetensors", "--with-optimizer"], "hold a model"),
        (
            ["export", str(saved), out, "--to", "dcp", "--max-shard-size", "1GB"],
            "does not split files",
        ),
        (
            ["export", str(saved), out, "--to", "safetensors", "--max-shard-size", "much"],
            "--max-shard-size = much: must be a size such as 5GB",
        ),
        (["export", str(saved), str(saved), "--to", "dcp"], "exists; choose another name"),
        (["diff", str(saved), str(tmp_path)], "has no file `latest`"),
    ):
        assert main(words) == 2, words
        printed = capsys.readouterr()
        assert printed.err.startswith(f"xds checkpoint {words[0]}: ") and sentence in printed.err
        assert printed.out == ""
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(saved), out])
    assert stopped.value.code == 2


def test_diff_says_what_differs_and_1(saved: Path, capsys: Capture) -> None:
    assert main(["diff", str(saved), str(saved / "third")]) == 0
    assert "are equal" in capsys.readouterr().out
    assert main(["diff", str(saved), str(saved), "--tag-a", "first"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "counters.global_steps: 1 in the first, 3 in the second" in lines
    assert [
        line for line in lines if line.startswith("inner.weight: ") and " elements differ" in line
    ]
    assert not [line for line in lines if line.startswith("frozen")]
    count, most = lines[-1].split("; elements differ by at most ")
    assert count == f"{len(lines) - 1} differences"
    found = [line.rpartition(", by at most ")[2] for line in lines if " elements differ, " in line]
    assert float(most) == max(map(float, found))


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp"])
def test_export_writes_it_and_says_so(
    saved: Path, tmp_path: Path, to: str, capsys: Capture
) -> None:
    out = tmp_path / "new" / "out"
    words = ["export", str(saved), str(out), "--to", to, "--dtype", "bf16"]
    assert main(words) == 0
    printed = capsys.readouterr()
    assert f"third -> {out}: " in printed.out and printed.err == ""
    assert ("config.json" in printed.out) == (to == "safetensors")
    assert main(words) == 2
    assert main([*words, "--overwrite", "--exclude-frozen"]) == 0
    if to == "torch":
        state = torch.load(out, weights_only=True)
        assert state["inner.weight"].dtype == torch.bfloat16 and "frozen.weight" not in state


def test_what_is_exported_can_be_imported(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    for to in ("safetensors", "torch"):
        out, back = tmp_path / f"{to}.{'pt' if to == 'torch' else to}", tmp_path / f"{to}-back"
        assert main(["export", str(saved), str(out), "--to", to]) == 0
        assert main(["import", str(out), str(back)]) == 0
        capsys.readouterr()
        assert main(["diff", str(saved), str(back)]) == 1
        lines = capsys.readouterr().out.splitlines()
        # an import of weights has neither the optimizer nor the counters
        assert not [line for line in lines if "elements differ" in line]
        assert not [
            line for line in lines if line.startswith(("inner.weight: ", "norm.running_mean: "))
        ]


def test_xds_finds_it_and_help_needs_no_torch(saved: Path, capsys: Capture) -> None:
    assert xds_main(["checkpoint", "verify", str(saved)]) == 0
    capsys.readouterr()
    code = (
        "import sys\nfrom xds.launcher.checkpoint import main\n"
        "try:\n    main(['export', '--help'])\nexcept SystemExit as end:\n"
        "    assert 'torch' not in sys.modules; sys.exit(end.code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--max-shard-size" in done.stdout


def test_sizes_are_read_and_written_as_people_do() -> None:
    sizes = {
        "5GB": 5 * 10**9,
        "1.5GiB": 3 << 29,
        "500 MB": 5 * 10**8,
        "4096": 4096,
        "2K": 2000,
        "7B": 7,
    }
    assert {text: parse_bytes("size", text) for text in sizes} == sizes
    for text in ("", "GB", "-1GB", "5XB", "0", "1e9", "\u0665GB"):
        with pytest.raises(UsageError, match="^size = "):
            parse_bytes("size", text)
    assert [size_text(n) for n in (999, 1500, 1_500_000_000)] == ["999 bytes", "1.50 KB", "1.50 GB"]
