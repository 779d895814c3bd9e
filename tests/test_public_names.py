"""Tests of the public names of `xds`, and that reading a config does not import torch."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import run_new_ranks

import xds
import xds.ops.sparse_attention

ROOT = Path(__file__).resolve().parents[1]
NAMES = [
    *("Config", "ConfigError", "Engine", "InferenceEngine", "Preempted", "UsageError", "XdsError"),
    *("get_fp32_state_dict", "init_inference", "initialize", "launch", "newest_checkpoint"),
]
CONFIGS = sorted(
    path.relative_to(ROOT)
    for pattern in ("[a-z]*/config.py", "engine/config/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "__init__.py"
)
QUICK = [
    "xds",
    "xds.utils.errors",
    "xds.launcher.cli",
    "xds.launcher.check",
    "xds.pipe",
    "xds.tensor",
    *(f"xds.{'.'.join(path.with_suffix('').parts)}" for path in CONFIGS),
]


def test_the_public_names_are_the_documented_ones():
    assert sorted(xds.__all__) == NAMES
    guides = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert [name for name in NAMES if f"xds.{name}" not in guides] == []


PIPE = ("DualPipeVModule", "LayerSpec", "PipelineModule", "TiedLayerSpec")
TENSOR = (
    *("DistributedAttention", "cross_entropy", "run_in_tiles", "tile_forward", "tiled_loss"),
    "tiled_mlp",
)


SPARSE = xds.ops.sparse_attention.__all__
PUBLIC = {
    "xds": NAMES,
    "xds.pipe": PIPE,
    "xds.tensor": TENSOR,
    "xds.ops.sparse_attention": SPARSE,
}
COMPRESSED = "xds.engine.model.compressed_training"  # `xds.compression` provides these
COMPRESSION = (
    *(f"{COMPRESSED}.{name}" for name in ("init_compression", "redundancy_clean")),
    *(f"{COMPRESSED}.{name}" for name in ("student_initialization", "CompressionScheduler")),
    "xds.compression.training.distillation.distillation_loss",
    "xds.compression.training.reduction.convert_conv1d_to_linear",
    "xds.engine.checkpoint.exports.quantized.save_quantized",
)
SITE_PAGES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md", "tests/README.md")


def test_every_public_name_imports():
    for module, names in ((xds, NAMES), (xds.pipe, PIPE), (xds.tensor, TENSOR)):
        for name in names:
            assert getattr(module, name).__name__ == name
            assert name in dir(module) and name in module.__all__
    for path in COMPRESSION:
        name = path.rpartition(".")[2]
        assert getattr(xds.compression, name).__name__ == name and name in dir(xds.compression)
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = xds.initialise


def test_completion_and_type_checkers_see_public_names_alone():
    packages = {"compression", "deepspeed", "pipe", "tensor", "zero"}
    assert set(dir(xds)) == {*NAMES, *packages}
    for module in (xds.zero, xds.pipe, xds.tensor, xds.compression):
        assert not any(name.startswith("_") or name.isupper() for name in dir(module))
    (listed,) = run_new_ranks(names_of_an_engine, 1)
    assert {"backward", "config", "step", "save_checkpoint"} <= set(listed)
    assert not any(name.startswith("_") for name in listed) and "internals" not in listed
    for path in ("engine/engine.py", "engine/inference/engine.py"):
        tree = ast.parse((ROOT / path).read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        shown = [each.name for kind in classes for each in kind.body if hasattr(each, "name")]
        assert "__getattr__" not in shown  # it is in a block for the run time alone


def names_of_an_engine():
    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return dir(xds.initialize(torch.nn.Linear(2, 2), config))


def test_the_reference_has_every_public_name_and_the_site_every_page():
    pages = {path.name: path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md")}
    shown = re.findall(r"^::: ([\w.]+)$", "\n".join(pages.values()), re.MULTILINE)
    zero = [name for name in xds.zero.__all__ if name != "Init"]  # the engine's, shown from there
    wanted = [f"{module}.{name}" for module, names in PUBLIC.items() for name in names]
    wanted += [f"xds.zero.{name}" for name in zero] + ["xds.engine.model.zero_init.Init"]
    wanted += COMPRESSION
    assert sorted(shown) == sorted(wanted)
    assert "heading: xds.zero.Init" in pages["zero.md"]
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    listed = re.findall(r"^ *- (?:[^:\n]+: )?(\S+\.md)$", text, re.MULTILINE)
    folders = tuple(re.findall(r"^ *- \w+: (\S+/)(?: #.*)?$", text, re.MULTILINE))
    found = {str(path.relative_to(ROOT)) for glob in SITE_PAGES for path in ROOT.glob(glob)}
    apart = [name for name in found if not name.startswith(folders)]
    assert sorted(listed) == sorted(apart), "nav of mkdocs.yml has every page"


def test_the_reference_shows_the_parts_of_each_docstring():
    """Its parser takes "Raises:" for a part after an empty line only."""
    pages = (path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    joined = []
    for name in re.findall(r"^::: ([\w.]+)$", "\n".join(pages), re.MULTILINE):
        thing = pydoc.locate(name)
        members = vars(thing).items() if isinstance(thing, type) else ()
        found = [("", thing), *((key, each) for key, each in members if not key.startswith("_"))]
        for key, each in [*found, ("__init__", getattr(thing, "__init__", None))]:
            if re.search(r"\S\n *(Args|Returns|Raises|Yields|Attributes):\n", each.__doc__ or ""):
                joined.append(f"{name} {key}")
    assert joined == []
    documented = set(re.findall(r"^ {8}(\w+): ", xds.initialize.__doc__, re.MULTILINE))
    assert inspect.signature(xds.initialize).parameters.keys() <= documented


def test_the_guide_names_what_the_reference_shows_of_the_engine():
    reference = (ROOT / "docs" / "reference" / "xds.md").read_text()
    hidden = re.compile("|".join(re.findall(r'^ +- "!(.*)"$', reference, re.MULTILINE)))
    guide = (ROOT / "docs" / "training.md").read_text().partition("## xds.Engine")[2]
    named = set(re.findall(r"`(\w+)", guide.partition("\n## ")[0]))
    public = {name for name in dir(xds.Engine) if not hidden.search(name)}
    assert sorted(public - named - {"forward"}) == []


def test_type_checkers_know_each_public_name_and_refuse_others():
    """They take a `__getattr__` of a module that they see for any name."""
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    (seen,) = (n for n in body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    assert sorted(alias.asname for node in seen.body for alias in node.names) == NAMES
    assert "__getattr__" not in {n.name for n in body if isinstance(n, ast.FunctionDef)}


def test_help_describes_the_engine_and_its_counters():
    text = pydoc.render_doc(xds.Engine, renderer=pydoc.plaintext)
    assert "save_checkpoint" in text and "global_steps" in text


def test_reading_configs_does_not_import_torch():
    script = "import importlib, sys\n"
    script += f"for name in {QUICK}:\n"
    script += "    importlib.import_module(name)\n"
    script += "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    subprocess.run([sys.executable, "-c", script], check=True)


BARRED = (
    *(
        "xds.launcher",
        "xds.deepspeed",
        "xds.engine.deepspeed",
        "xds.engine.planning",
        "xds.engine.recovering",
        "xds.engine.lost_peers",
        "xds.recovery.generations",
        "xds.engine.meeting",
        "xds.outer.",
        "xds.engine.profiling",
    ),
    *("xds.engine.checkpoint", "xds.zero.checkpoint", "xds.zero.construction"),
    *("xds.engine.data.loaders", "xds.engine.data.metrics", "xds.engine.data.sharing"),
    *("xds.engine.parallel.messages", "xds.engine.model.storage"),
    *(
        "xds.engine.parallel.pipeline",
        "xds.engine.model.recompute",
        "xds.engine.parallel.sequences",
    ),
    *("xds.engine.parallel.slices", "xds.engine.model.tiles"),
    *("xds.engine.optim.schedules", "xds.engine.optim.schedule_base", "xds.engine.preemption"),
    *("xds.engine.telemetry.comms", "xds.engine.telemetry.memory", "xds.engine.telemetry.monitor"),
    *(
        "xds.engine.telemetry.traffic",
        "xds.ops.watch.watcher",
        "xds.ops.watch.reports",
        "xds.ops.watch.store",
    ),
    *(
        "xds.zero.model.auto_ratio",
        "xds.zero.features.host_updates",
        "xds.zero.features.host_copies",
    ),
    *(
        "xds.zero.features.super_offload",
        "xds.pipe.",
        "xds.experts.",
        "xds.tensor.",
        "xds.compression.",
        "xds.offload.",
    ),
)
PLAIN = ("pipe.config", "tensor.config", "experts.config", "compression.config", "offload.config")
PLAIN += ("recovery.config", "outer.config")
PLAIN += ("compression.training", "compression.training.config")
PLAIN += ("compression.scheme", "offload.stores", "offload.interfaces")
MOST_MODULES = 178


def loaded_by_a_run():
    """The modules of a process that has trained nothing but what its config asks for."""
    import torch

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
    engine = xds.initialize(torch.nn.Linear(2, 2), config | {"zero_optimization": {"stage": 2}})
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    engine.destroy()
    return list(sys.modules)


def test_a_run_at_stage_2_imports_no_feature_that_its_config_does_not_ask_for():
    (loaded,) = run_new_ranks(loaded_by_a_run, 1)
    known = {f"xds.{name}" for name in PLAIN}
    assert [name for name in loaded if name.startswith(BARRED) and name not in known] == []
    assert "torch.utils.flop_counter" not in loaded
    modules = sorted(name for name in loaded if name.startswith("xds."))
    assert len(modules) <= MOST_MODULES, modules


def test_every_folder_has_its_config():
    folders = {path.parts[0] for path in CONFIGS}
    assert {"zero", "engine", "offload", "compression", "pipe", "tensor"} <= folders


def test_the_readme_names_the_commands_that_are_tested():
    readme = (ROOT / "README.md").read_text()
    command = 'pip install -c constraints.txt -e ".[test]" && pytest'
    assert command in readme and command in (ROOT / ".ci" / "run").read_text()
