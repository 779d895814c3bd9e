"""`import deepspeed` is xds: where it is asked for, what it finds, and how its errors are caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from forked_launcher import ForkedLauncher

import xds
from xds.engine.deepspeed import launcher
from xds.engine.deepspeed.errors import in_their_form, methods_raise_theirs
from xds.engine.deepspeed.missing import Missing
from xds.utils.errors import DamagedError

SCRIPT = """
import os
import torch
import deepspeed
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "Adam"},
    "zero_optimization": {"stage": 2},
}
engine, *_ = deepspeed.initialize(model=model, config=config)
engine.backward(engine(torch.ones(2, 4)).mean())
engine.step()
try:
    deepspeed.initialize(model=model, config={**config, "gradient_clipping": -1})
except AssertionError as error:
    assert "gradient_clipping" in str(error)
print("trained", os.environ["RANK"], deepspeed.__version__)
"""


def run_python(code: str, **variables: str) -> str:
    """What `code` prints, in a folder where no package named deepspeed is."""
    environment = {key: value for key, value in os.environ.items() if key != "XDS_AS_DEEPSPEED"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=os.sep,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ACTIVATE = "from xds.engine.deepspeed.stand_in import activate; activate()\n"


def test_a_stand_in_can_be_caught_compared_and_derived_from() -> None:
    layer: Any = import_module("xds.deepspeed.linear.optimized_linear").OptimizedLinear
    module = import_module("xds.deepspeed.linear").optimized_linear
    assert isinstance(layer, Missing) and layer is module.OptimizedLinear

    class Mine(layer):  # type: ignore[misc]
        size = 3

        def __init__(self) -> None:
            raise RuntimeError("not reached")

    assert Mine.size == 3 and not isinstance(3, layer)
    with pytest.raises(
        xds.UsageError, match=r"^deepspeed\.linear\.\w+\.OptimizedLinear is not covered"
    ):
        Mine()


def test_the_alias_is_the_same_module_under_a_second_name_and_does_not_load_the_compiler() -> None:
    """torch._dynamo alone would take a second at each start."""
    code = ACTIVATE + (
        "import importlib.metadata as m, importlib.util as u, json, sys\n"
        "assert u.find_spec('deepspeed') and 'deepspeed' not in sys.modules\n"
        "import deepspeed\n"
        "assert 'torch' not in sys.modules\n"
        "assert deepspeed.initialize and 'torch._dynamo' not in sys.modules\n"
        "import deepspeed.runtime.zero.stage3, deepspeed.inference.v2, xds.deepspeed\n"
        "import xds.deepspeed.runtime.zero.stage3 as own\n"
        "assert deepspeed is xds.deepspeed and deepspeed.runtime.zero.stage3 is own\n"
        "assert own.__spec__.name == own.__name__ == 'xds.deepspeed.runtime.zero.stage3'\n"
        "assert u.find_spec('deepspeed.no_such_module') is None\n"
        "print(json.dumps([m.version('deepspeed'), m.metadata('deepspeed')['Name'], deepspeed.__version__]))"
    )
    assert json.loads(run_python(code)) == ["0.19.8", "deepspeed", "0.19.8+xds"]


def test_a_real_deepspeed_wins_unless_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").write_text("__version__ = 'real'")
    code = "import deepspeed; print(deepspeed.__version__)"
    assert run_python(code, PYTHONPATH=str(tmp_path)) == "real\n"
    assert run_python(ACTIVATE + code, PYTHONPATH=str(tmp_path)) == "0.19.8+xds\n"


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_variable_alone_is_enough_in_an_environment_with_xds(value: str) -> None:
    """Its site-packages have the file xds_as_deepspeed.pth."""
    code = "import importlib.util as u; print(u.find_spec('deepspeed') is not None)"
    assert run_python(code, XDS_AS_DEEPSPEED=value) == f"{value == '1'}\n"


@pytest.mark.contract
def test_the_option_starts_ranks_in_which_it_stands_in(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "imports.py").write_text("import deepspeed\n")

    def run(*words: str) -> tuple[int | None, str, str]:
        started = ForkedLauncher(["--nproc-per-node", *words], tmp_path, os.environ)
        out, err = started.communicate(timeout=150)
        return started.returncode, out, err

    code, out, err = run("2", "--as-deepspeed", "train.py")
    assert code == 0, err
    line = f"xds {xds.__version__} stands in for deepspeed; stage 2, 2 ranks, fp32"
    assert out.splitlines().count(line) == 1
    assert "trained 0 0.19.8+xds" in out

    code, _, err = run("1", "imports.py")
    assert code == 1
    assert "start it with `xds --as-deepspeed`; nothing has to be installed" in err


def test_deepspeeds_launcher_starts_ranks_and_returns_their_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys, time\n"
        "print(sys.argv[1], *(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_SIZE')))\n"
        "if os.environ['RANK'] == '1':\n    time.sleep(60)  # ended by the failure of rank 0\n"
        "sys.exit(3)\n"
    )
    words = ["--num_gpus", "2", str(tmp_path / "train.py"), """I'm "here" """]
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "xds.deepspeed.launcher.runner", *words],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert """I'm "here"  0 2 2""" in done.stdout
    monkeypatch.setattr(launcher, "EXPORT_ENVS", [*launcher.EXPORT_ENVS, "MY_"])
    monkeypatch.setattr(launcher, "run_command", lambda arguments: 0)
    with caplog.at_level("WARNING", "xds"):
        launcher.main(["train.py"])
    assert "MY_ are not forwarded" in caplog.text and ".deepspeed_env" in caplog.text


@pytest.mark.parametrize("kind", [xds.UsageError, DamagedError, xds.ConfigError])
@pytest.mark.parametrize("caught", [ValueError, AssertionError, xds.XdsError])
def test_errors_are_what_scripts_for_deepspeed_catch(kind: Any, caught: Any) -> None:
    given = kind(["a = 1: wrong"] if kind is xds.ConfigError else "a = 1: wrong")
    with pytest.raises(caught, match="a = 1: wrong") as info, in_their_form():
        raise given
    assert info.value is given and isinstance(given, kind) and type(given).__name__ == kind.__name__
    assert not isinstance(kind("text"), AssertionError), "elsewhere it is xds's own"


def test_methods_and_properties_of_a_class_raise_them_too() -> None:
    @methods_raise_theirs
    class Engine:
        def step(self) -> None:
            """Steps."""
            raise xds.UsageError("step: no")

        @property
        def loss(self) -> float:
            raise xds.UsageError("loss: no")

    assert Engine.step.__doc__ == "Steps."
    with pytest.raises(AssertionError, match="step"):
        Engine().step()
    with pytest.raises(ValueError, match="loss"):
        _ = Engine().loss
