"""`xds env`: what costs speed on a GPU comes with a remedy, and nothing else does."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from xds.launcher.environment.probes import gpus, slow_variables, software

H100 = (
    "0, NVIDIA H100 80GB HBM3, 9.0, Enabled, Default, Enabled, Disabled, 700.00 W, 700.00 W, 16, 16"
)
L40 = "1, NVIDIA L40S, 8.9, Disabled, Exclusive_Process, Enabled, [N/A], 250.00 W, 350.00 W, 8, 16"


def hint(key: str, value: str, *, has_gpu: bool = True, num_cores: int = 8) -> str:
    return slow_variables.remedy(key, value, has_gpu=has_gpu, num_cores=num_cores)


@pytest.mark.parametrize(
    ("key", "slow", "fast"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", "0"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "8"),
        ("CUDA_MODULE_LOADING", "EAGER", "LAZY"),
        ("CUBLAS_WORKSPACE_CONFIG", ":16:8", ":4096:8"),
        ("NVIDIA_TF32_OVERRIDE", "0", "1"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1", ""),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "INFO"),
        ("TORCH_NCCL_BLOCKING_WAIT", "1", "0"),
        ("TORCH_NCCL_ENABLE_TIMING", "true", "false"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_P2P_LEVEL", "LOC", "NVL"),
        ("NCCL_NET", "Socket", "IB"),
        ("NCCL_NVLS_ENABLE", "0", "1"),
        ("NCCL_DEBUG", "TRACE", "INFO"),
        ("NCCL_ALGO", "Ring", ""),
        ("NCCL_MAX_NCHANNELS", "1", "16"),
        ("XDS_BACKEND", "gloo", "nccl"),
        ("PYTORCH_ALLOC_CONF", "a:1, max_split_size_mb:128", "expandable_segments:True"),
        ("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.6", "backend:native"),
        ("OMP_NUM_THREADS", "9", "8"),
    ],
)
def test_a_slow_value_has_a_remedy_and_a_good_one_has_none(key: str, slow: str, fast: str) -> None:
    assert hint(key, slow) and not hint(key, fast)


def test_hints_depend_on_the_machine() -> None:
    assert not hint("XDS_BACKEND", "gloo", has_gpu=False)
    assert hint("OMP_NUM_THREADS", "1", num_cores=16) and not hint("OMP_NUM_THREADS", "1")
    assert not hint("PATH", "1") and not hint("OMP_NUM_THREADS", "many")


def test_every_variable_of_the_table_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for slow in slow_variables.TABLE:
        monkeypatch.setenv(slow.key, "1")
    shown = {line.key for line in software.variables()}
    assert {f"${slow.key}" for slow in slow_variables.TABLE} <= shown
    slow_value = {line.key: line.remedy for line in software.variables()}["$CUDA_LAUNCH_BLOCKING"]
    assert slow_value == "the host waits for each kernel; unset it after debugging"


def test_settings_of_cards_are_read_from_what_nvidia_smi_prints() -> None:
    good, slow = gpus.parsed(f"{H100}\nwarning: something\n{L40}\n")
    assert {line.key: line.remedy for line in gpus.of_card(good)} == {
        "gpu 0 persistence": "",
        "gpu 0 compute mode": "",
        "gpu 0 ECC": "",
        "gpu 0 MIG": "",
        "gpu 0 power limit": "",
        "gpu 0 PCIe lanes": "",
    }
    told = {line.key.removeprefix("gpu 1 "): str(line) for line in gpus.of_card(slow)}
    assert "MIG" not in told  # the card has none
    assert "`nvidia-smi -pm 1`" in told["persistence"] and "-c DEFAULT" in told["compute mode"]
    assert "below the card's 350 W; `nvidia-smi -i 1 -pl 350`" in told["power limit"]
    assert "ECC" in told and "-e 0" in told["ECC"] and "the card has 16" in told["PCIe lanes"]


@pytest.mark.parametrize(
    ("capability", "built", "words"),
    [
        ((9, 0), "sm_80 sm_90", ""),
        ((9, 0), "sm_90a", ""),
        ((8, 9), "sm_80 sm_90", ""),  # a kernel of 8.0 runs on 8.9
        ((8, 0), "sm_86", "none for sm_80: install a torch that is built for it"),
        ((12, 0), "sm_90 compute_90", "none for sm_120: the first run compiles them"),
        ((7, 0), "sm_75 sm_80 compute_80", "none for sm_70: install"),
        ((9, 0), "", ""),
    ],
)
def test_a_torch_for_other_cards_is_told(
    capability: tuple[int, int], built: str, words: str
) -> None:
    found = gpus.architecture(capability, built.split())
    assert found.startswith(words) and bool(found) == bool(words)


def test_torchs_defaults_that_cost_speed_on_a_gpu() -> None:
    cudnn = SimpleNamespace(benchmark=False)
    torch = SimpleNamespace(
        get_float32_matmul_precision=lambda: "highest", backends=SimpleNamespace(cudnn=cudnn)
    )
    told = {line.key: line for line in gpus.of_torch(torch, [(9, 0)], "sm_90")}
    assert "set_float32_matmul_precision" in told["fp32 products"].remedy
    assert "cudnn.benchmark = True" in told["cudnn.benchmark"].remedy
    assert not told["torch's kernels"].remedy
    assert "fp32 products" not in {line.key for line in gpus.of_torch(torch, [(7, 5)], "sm_75")}


def test_a_machine_without_nvidia_smi_has_no_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert list(gpus.settings()) == []


def test_settings_are_asked_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(gpus, "output", lambda *command: asked.append(command) or f"{H100}\n")
    keys = [line.key for line in gpus.settings()]
    assert "gpu 0 power limit" in keys and len(asked) == 1 and asked[0][0] == "nvidia-smi"
