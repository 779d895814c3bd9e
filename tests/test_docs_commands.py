"""Every command of the README, the guides and the examples' pages: its words are right, and it runs.

A page's test reads all of its commands: options, values, files. The commands that one machine can run in
seconds run here as they stand, in a folder with the files that the pages speak of; those that train are slow
tests, and get the options of TINY as well. NOT_RUN has the others, with the reason.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import pydoc
import re
import runpy
import shlex
import shutil
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from forked_launcher import ForkedLauncher
from helpers import run_new_ranks, run_ranks
from pages import PAGES, ROOT, Command, blocks, commands_of, name_of

from xds.engine.data.indexed import IndexedWriter
from xds.launcher import bench
from xds.launcher.cli import _SUBCOMMANDS as SUBCOMMANDS
from xds.launcher.cli import main
from xds.launcher.command_line.options import check_options, read
from xds.launcher.command_line.where import Hosts, where_to_run

NOT_RUN = {
    r"--int[48] --config": "needs torchao: tests/compression/test_quantized_export.py runs it",
    r"--hostfile|^srun|^mpirun|--nnodes|^diff": "needs other machines: tests/launcher has hosts",
    r"--max-restarts 3 train\.py$": "needs Slurm: tests/launcher has its commands",
    r"vision/train\.py imagenet": "needs ImageNet; tests/test_examples.py trains on digits",
    r"train\.py \d+b_": "needs models of that size; tests/test_recipes.py trains tiny ones",
    r"--model train:lora_7b": "reads examples/gpt beside its folder; tests/test_recipes.py runs it",
    r"docs/pictures/draw\.py": "writes the pictures that tests/test_pictures.py compares",
    r"--include localhost:0,2": "needs three GPUs",
    r"first/run\.py": "installs xds; tests/test_wheel.py reads its commands",
    r"^pip|^uv|^python3 -m venv|^source|^pytest|^ruff|^mypy|^mkdocs build": ".ci/run runs it",
    r"^pyproject-build|^twine": ".ci/run runs it",
    r"^mkdocs serve": "serves until it is stopped",
    r"^deepspeed|^accelerate launch|torchrun": "another launcher: tests/migration/ compares with it",
    r"^python benchmarks/": "takes minutes",
    r"--autotuning": "needs the section autotuning: tests/launcher/test_tuning.py",
    r"--resume_from_checkpoint": "after 100 steps; tests/test_examples.py resumes earlier",
    r"^nvidia-smi|collect_env": "another program",
    r"^python -m pytest|^python script\.py|^xds (\S+ )+script\.py": "not meant to be typed",
    r"^python -m xds$": "another name of `xds`",
    r"^python -m xds.*docs": "writes the page that tests compare",
}
# options that make a script's run a matter of seconds
TINY = {
    "examples/first/train.py": "",
    "examples/gpt/train.py": "--layers 2 --width 32 --heads 2 --context 16 --steps 2 --sample 4",
    "examples/pipeline/train.py": "--layers 4 --width 32 --heads 2 --context 16 --steps 2",
    "examples/moe/train.py": "--layers 2 --width 20 --experts 4 --steps 2",
    "examples/3d/train.py": "--layers 4 --width 32 --heads 4 --context 16 --steps 2",
    "examples/huggingface/train.py": "--context 16 --steps 2 --sample 4",
    "examples/huggingface/trainer.py": "--context 16 --max_steps 2 --eval_steps 2 --save_steps 2",
    "examples/vision/train.py": "--epochs 1",
    "examples/compression/train.py": "--epochs 1 --ways rows",
    "examples/generation/train.py": "--steps 1",
    "examples/migration/loop.py": "--steps 2",
    "examples/migration/trainer.py": "--steps 2",
    "examples/migration/accelerated.py": "--epochs 1",
    "train.py": "",
}
HAS_NO_DATA_OPTION = (
    "train.py",
    "examples/first/",
    "examples/migration/",
    "examples/vision/",
    "examples/compression/",
    "examples/generation/",
)
LAUNCHING = ROOT / "examples" / "launching"
MACHINES = ROOT / "engine" / "planning" / "machines"
PLACEHOLDERS = {"FILE": "config.json", "N": "8", "DIR": "llama"}
ENV = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
SCRIPT = """
import os, sys, torch
if os.environ.get("XDS_AS_DEEPSPEED"):
    import deepspeed as engines
else:
    import xds as engines
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
result = engines.initialize(model=torch.nn.Linear(2, 2), config=config)
engine = result[0] if isinstance(result, tuple) else result
engine.backward(engine(torch.ones(1, 2, device=engine.device)).sum())
engine.step()
print("trained")
"""


def filled(command: Command) -> tuple[str, ...]:
    """The words with values for placeholders; `[--option N]` is given."""
    words = [word.strip("[]") if "[" not in word[1:] else word for word in command.words]
    return tuple(PLACEHOLDERS.get(word, word) for word in words)


def is_mention(words: Sequence[str]) -> bool:
    """A name in a sentence, such as `xds checkpoint import` or `xds --quiet`; an ellipsis; a message."""
    if words[0] != "xds" or words[1].startswith("0."):
        return "..." in words or words[0] == "xds"
    if words[1] in SUBCOMMANDS:
        return words[1] != "env" and len(words) == 2 + (words[1] in ("checkpoint", "data"))
    return "--help" not in words and not any(word.endswith(".py") for word in words)


def reason_of(words: Sequence[str]) -> str:
    line = " ".join(words)
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, line)), "")


ALL = [(command, filled(command)) for page in PAGES for command in commands_of(page)]
FOLDERS = {words: command.folder for command, words in ALL}
LINES = sorted(FOLDERS)


# -- the words ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages speak of."""
    folder = tmp_path_factory.mktemp("pages")
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    for name in ("config.json", "ds_config.json", "zero3.json"):
        (folder / name).write_text(json.dumps(config))
    (folder / "pipeline.json").write_text(blocks(ROOT / "docs" / "pipelines.md", "json")[0])
    (folder / "elastic.json").write_text(blocks(ROOT / "docs" / "launching.md", "json")[-1])
    (folder / "hosts").write_text("node-1 slots=8\nnode-2 slots=8\n")
    for name in ("first", "gpt", "moe", "pipeline", "huggingface", "3d", "vision"):
        (folder / "runs" / name).mkdir(parents=True)
        line = {"kind": "step", "step": 1, "samples": 1, "time": 1.0}
        (folder / "runs" / name / "run.jsonl").write_text(json.dumps(line))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "text.txt").write_text((ROOT / "examples" / "gpt" / "train.py").read_text() * 3)
    (build,) = blocks(ROOT / "docs" / "plan.md", "python")
    (folder / "module.py").write_text(build + "\nfunction = build\n")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "max_position_embeddings": 32, "num_key_value_heads": 4}
    (folder / "llama").mkdir()
    llama = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes}
    (folder / "llama" / "config.json").write_text(json.dumps(llama))
    shutil.copy(MACHINES / "a100-40-hdr.json", folder / "machine.json")
    with IndexedWriter(folder / "corpus", "uint16") as writer:
        writer.add_rows(range(60), [10, 20, 30])
    for name in ("examples", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    saved = ROOT / "tests" / "data" / "deepspeed_checkpoints" / "plain_zero1_fp32"
    shutil.copytree(saved, folder / "deepspeed_run")
    run_ranks(_save, 1, str(folder))
    return folder


def _save(folder: str) -> None:
    import torch

    import xds

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = xds.initialize(torch.nn.Linear(2, 2), config)
    for name in ("out", "other"):
        engine.save_checkpoint(f"{folder}/{name}")


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=name_of)
def test_the_commands_of_a_page_are_right(
    page: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (command, words) in enumerate(ALL):
        if command.page == name_of(page):
            try:
                folder = tmp_path / str(number)
                monkeypatch.chdir(copy_of(files, folder, words) if command.folder else files)
                check_words(words)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{command.line}\n{error!r}") from error


def check_words(words: Sequence[str]) -> None:
    """Raise an error if the command cannot be meant so. Starts nothing."""
    program, *rest = words
    if program in ("srun", "mpirun", "torchrun", "accelerate", "deepspeed"):
        at = next((words.index(name) for name in ("xds", "python") if name in words), None)
        if at is not None:
            check_words(words[at:])
    elif program == "xds" and not is_mention(words):
        check_xds(rest)
    elif program.startswith("python") and rest[0] == "-m":
        assert importlib.util.find_spec(rest[1].partition(".")[0]), rest[1]
    elif program == "pytest":
        paths = [word.partition("::")[0] for word in rest if word.startswith("tests")]
        assert all((ROOT / path).exists() for path in paths)
    elif program == "pip":
        extras = re.findall(r"^ +\"(\w+)\": \[", (ROOT / "setup.py").read_text(), re.MULTILINE)
        assert {name for word in rest for name in re.findall(r"\.\[(\w+)\]", word)} <= {*extras}
    for word in rest:
        if re.match(r"(examples|benchmarks)/", word):
            assert (ROOT / word).exists(), word


def check_xds(words: Sequence[str]) -> None:
    if words[0] in SUBCOMMANDS:
        if words[0] == "bench":
            bench.read(words[2:])
            return
        module = importlib.import_module(SUBCOMMANDS[words[0]], "xds.launcher")
        if hasattr(module, "_parser"):
            module._parser().parse_args(words[1:])
        return
    args = read(words)
    check_options(args)
    if args.command:
        where = where_to_run(args, {"PATH": os.environ["PATH"]})
        assert isinstance(where, Hosts) == args.has("hostfile"), where


def test_the_job_for_kubernetes_starts_this_machines_part() -> None:
    yaml = pytest.importorskip("yaml")
    text = (LAUNCHING / "kubernetes.yaml").read_text()
    _, job = yaml.safe_load_all(text)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert int(environ["NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    args = read(container["command"][1:])
    where = where_to_run(args, {**environ, "JOB_COMPLETION_INDEX": "2"})
    assert not isinstance(where, Hosts) and where.restarts.max_restarts == 3
    assert (where.rendezvous.max_nodes, where.rendezvous.node_rank) == (4, 2)


def where_of(words: Sequence[str], environ: dict[str, str]) -> Any:
    args = read(words[1:])
    check_options(args)
    where = where_to_run(args, environ)
    assert words[0] == "xds" and not isinstance(where, Hosts), where
    return where


def test_files_for_schedulers_start_this_machines_part() -> None:
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCHING / "trainjob.yaml").read_text())["spec"]["trainer"]
    address = {"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500", "PET_NODE_RANK": "1"}
    environ = {**address, "PET_NNODES": f"{job['numNodes']}", "PET_NPROC_PER_NODE": "8"}
    where = where_of(job["command"], environ)
    assert (where.rendezvous.max_nodes, where.rendezvous.node_rank) == (2, 1)
    assert where.job.num_ranks == job["numProcPerNode"] == 8

    jobset = yaml.safe_load((LAUNCHING / "jobset.yaml").read_text())
    name, (workers,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    spec = workers["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environ = {each["name"]: each["value"] for each in container["env"]}
    assert environ["MASTER_ADDR"] == f"{name}-{workers['name']}-0-0.{name}"
    assert int(environ["NNODES"]) == spec["completions"] == spec["parallelism"] == 2
    assert spec["backoffLimit"] == 0 < jobset["spec"]["failurePolicy"]["maxRestarts"]
    where = where_of(container["command"], {**environ, "JOB_COMPLETION_INDEX": "1"})
    assert (where.rendezvous.max_nodes, where.rendezvous.node_rank) == (2, 1)

    task = yaml.safe_load((LAUNCHING / "skypilot.yaml").read_text())
    run = task["run"].replace('$(echo "$SKYPILOT_NODE_IPS" | head -n1)', "10.0.0.1")
    run = run.replace("$SKYPILOT_NUM_NODES", str(task["num_nodes"]))
    words = shlex.split(run.replace("$SKYPILOT_NODE_RANK", "1"))
    where = where_of(words[1:], {})
    assert words[0] == "exec" and (where.rendezvous.max_nodes, where.rendezvous.node_rank) == (2, 1)


def test_the_batch_script_for_slurm_gives_the_whole_allocation_to_one_xds() -> None:
    script = (LAUNCHING / "train.sbatch").read_text()
    options = " ".join(re.findall(r"^#SBATCH (--.*?)(?:  +#.*)?$", script, re.MULTILINE))
    assert {"--ntasks-per-node=1", "--signal=B:USR1@120", "--requeue"} <= set(options.split())
    (line,) = [line for line in script.splitlines() if line.startswith("exec ")]
    words = shlex.split(line, comments=True)
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "8"}
    where = where_to_run(read(words[2:]), environ)
    assert isinstance(where, Hosts) and len(where.hosts) == 4 and where.launcher == "slurm"


# -- the options of scripts ---------------------------------------------------------------------------------


class Read(Exception):
    """A script has read its options."""


def script_of(words: Sequence[str]) -> tuple[str, ...]:
    """The script that a command starts, and its arguments."""
    at = next((at for at, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return ()
    folder = FOLDERS.get(tuple(words), "")
    return (f"{folder}/{words[at]}" if folder else words[at], *words[at + 1 :])


SCRIPTS = sorted({script_of(words) for words in LINES if len(script_of(words)) > 1})


def test_scripts_know_the_options_that_the_pages_give_them() -> None:
    """Those that import transformers are run by slow tests."""
    quick = [words for words in SCRIPTS if words[0].startswith(("examples", "benchmarks"))]
    quick = [words for words in quick if not imports_transformers(ROOT / words[0])]
    assert len(quick) > 10
    run_new_ranks(_read_options, 1, quick)


def imports_transformers(script: Path) -> bool:
    names = {"transformers", "accelerate"}
    tree = ast.walk(ast.parse(script.read_text()))
    froms = {
        (node.module or "").partition(".")[0] for node in tree if isinstance(node, ast.ImportFrom)
    }
    return bool(names & froms)


def _read_options(scripts: list[tuple[str, ...]]) -> None:
    from xds.engine.deepspeed.stand_in import activate

    own = ArgumentParser.parse_known_args

    def read_and_stop(self: ArgumentParser, args: Any = None, namespace: Any = None) -> NoReturn:
        found, rest = own(self, args, namespace)
        raise Read(f"unknown: {rest}" if rest else "")

    ArgumentParser.parse_known_args = read_and_stop  # type: ignore[method-assign]
    activate()
    path, modules, last = list(sys.path), set(sys.modules), ""
    for script, *args in scripts:
        if script != last:  # each has a module `data` of its own
            for name in set(sys.modules) - modules:
                in_project = str(ROOT) in str(getattr(sys.modules[name], "__file__", ""))
                if in_project and name.split(".")[0] != "xds":  # which registers its kernels once
                    del sys.modules[name]
        sys.argv, last = [script, *args], script
        sys.path[:] = [str((ROOT / script).parent), *path]
        try:
            runpy.run_path(str(ROOT / script), run_name="__main__")
        except Read as end:
            assert str(end) == "", (script, args, str(end))
        else:
            raise AssertionError(f"{script} has not read its options")


# -- runs ---------------------------------------------------------------------------------------------------


def is_run(words: Sequence[str]) -> bool:
    return not reason_of(words) and not is_mention(words) and words[0] in ("xds", "python")


RUN = [words for words in LINES if is_run(words)]
SLOW = [words for words in RUN if script_of(words)]
MEASURES = ("bench", "plan", "tune")  # for seconds
QUICK = [
    pytest.param(words, marks=[pytest.mark.slow] * (words[1] in MEASURES), id=" ".join(words))
    for words in RUN
    if not script_of(words)
]


def finish(words: Sequence[str], folder: Path) -> str:
    if words[0] == "python":
        words = ["--launcher", "local", "--nproc-per-node", "1", *words[1:]]
    else:
        words = words[1:]
    launcher = ForkedLauncher(words, folder, {**ENV, "OMP_NUM_THREADS": "1"})
    out, err = launcher.communicate(timeout=300)
    assert launcher.returncode == 0, out + err
    return out + err


def copy_of(files: Path, folder: Path, words: tuple[str, ...]) -> Path:
    """A copy of the files, with those of the folder where the command is run."""
    shutil.copytree(files, folder, symlinks=True)
    if FOLDERS[words]:
        shutil.copytree(ROOT / FOLDERS[words], folder, dirs_exist_ok=True)
    return folder


@pytest.mark.parametrize("words", QUICK)
def test_a_quick_command_runs(
    words: tuple[str, ...],
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    folder = copy_of(files, folder, words)
    if words[1] == "elastic" and words[2] == "config.json":
        shutil.copy(folder / "elastic.json", folder / "config.json")
    if words[1:3] == ("checkpoint", "import"):
        shutil.rmtree(folder / "out")
    if words[1:3] == ("bench", "comm"):
        words = (*words, "--max-size", "1KiB")
    if words[1] == "tune":
        words = (*words, "--no-run", "--seconds", "1")
    if words[1] == "plan":  # in this process, which imports transformers once for all of them
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        assert main(list(words[1:])) == 0
        assert capsys.readouterr().out != ""
        return
    if words[:3] == ("python", "-m", "pydoc"):  # in this process, which has imported torch
        assert words[3] in pydoc.render_doc(words[3], renderer=pydoc.plaintext)
        return
    assert finish(words, folder) != ""


@pytest.mark.slow
@pytest.mark.parametrize("words", SLOW, ids=" ".join)
def test_a_command_trains(words: tuple[str, ...], files: Path, tmp_path: Path) -> None:
    script = script_of(words)[0]
    assert script in TINY, f"give {script} options that make it short, or NOT_RUN a reason"
    if imports_transformers(files / script):
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    folder = tmp_path / "run"
    folder = copy_of(files, folder, words)
    shutil.rmtree(folder / "out")
    more = TINY[script].split()
    if not script.startswith(HAS_NO_DATA_OPTION):
        more += ["--data", "text.txt"]
    said = finish((*words, *more), folder)
    shown = "trained" if script == "train.py" else "loss|reward|trained"
    assert re.search(shown, said)


def test_what_is_not_run_has_a_reason() -> None:
    left = [words for words in LINES if not is_mention(words) and words not in RUN]
    for words in left:
        print(f"not run: {' '.join(words)}: {reason_of(words)}")
    assert [words for words in left if not reason_of(words)] == []
    unused = [why for why in NOT_RUN if not any(re.search(why, " ".join(words)) for words in LINES)]
    assert unused == [], "NOT_RUN has reasons for commands that no page has"
