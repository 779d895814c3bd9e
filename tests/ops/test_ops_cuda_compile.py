"""Every CUDA source goes through nvcc where there is one, and registers what Python defines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from xds.ops import build_cache, libraries
from xds.ops.build_compilers import find_nvcc
from xds.ops.errors import BuildError

OPS = {
    "cuda_optimizers": [
        *("adam_", "lion_", "adagrad_", "sgd_", "lamb_direction_", "lamb_apply_", "square_sum"),
    ],
    "cuda_quantize": ["quantize_", "dequantize_", "sign_pack_", "sign_unpack_"],
}
CHECK = """
import importlib, sys, torch
path, *ops = sys.argv[1:]
for module in ("adam", "lion", "adagrad", "sgd", "lamb", "square_sum", "quantize", "signs"):
    importlib.import_module(f"xds.ops.kernels.{module}")
torch.ops.load_library(path)
has = torch._C._dispatch_has_kernel_for_dispatch_key
assert all(has(f"xds::{op}", "CUDA") for op in ops), ops
assert not [found for found in torch._C._dispatch_find_dangling_impls() if "xds" in found]
"""


@pytest.mark.parametrize("name", OPS)
def test_cuda_sources_compile_without_a_warning_and_register_the_ops(
    name: str, tmp_path: Path
) -> None:
    """All sources as one, for one architecture, not optimised: 11 seconds of a processor."""
    try:
        nvcc = find_nvcc(build_cache.default_folder())
    except BuildError:
        pytest.skip("needs nvcc")
    whole = tmp_path / "whole.cu"
    library = libraries.LIBRARIES[name]
    whole.write_text(
        "".join(f'#include "{library.root / source.path}"\n' for source in library.sources)
    )
    home = Path(torch.__file__).parent
    command = [
        *(*nvcc.words, "-std=c++17", "-Xcicc", "-O0", "-Xptxas", "-O0", "-shared"),
        *("-gencode", "arch=compute_90,code=sm_90", "-Werror", "all-warnings"),
        *("-Xcompiler", "-fPIC,-Wall,-Wextra,-Wno-unused-parameter,-Wno-unknown-pragmas"),
        *("-DTORCH_TARGET_VERSION=0x020b000000000000", "-isystem", str(home / "include")),
        *(str(whole), "-o", str(tmp_path / "whole.so"), "-L", str(home / "lib")),
        *("-ltorch_cpu", "-ltorch", "-lc10"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    check = [sys.executable, "-c", CHECK, str(tmp_path / "whole.so"), *OPS[name]]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
