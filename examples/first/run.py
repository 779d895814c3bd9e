"""From a checkout to the first losses, or to the result of the tests, with one command.

    python3 examples/first/run.py                       # trains examples/first/train.py on two ranks
    python3 examples/first/run.py --tests               # runs all tests
    uv run --no-project examples/first/run.py           # with uv, which brings a Python where there is none

It creates the environment .venv in the checkout, or completes the one that is there. It says first what it
downloads; --dry-run says nothing but that. Only the standard library is imported.
"""

import os
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
# megabytes of wheels for Python 3.11 on x86-64, on 2026-11-28
TORCH_MB = {"cpu": 190, "auto": 4700}  # auto: for the GPU's driver, with the libraries of CUDA
OTHERS_MB = {False: 50, True: 160}  # True: with the tools of the tests


def main():
    parser = ArgumentParser(description="Install xds into .venv, and train the first example.")
    parser.add_argument(
        "--tests", action="store_true", help="run the tests in place of the example"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be done")
    args = parser.parse_args()
    backend = "auto" if shutil.which("nvidia-smi") else "cpu"
    size_mb = TORCH_MB[backend] + OTHERS_MB[args.tests]
    build = "for this GPU" if backend == "auto" else "for CPUs"
    more = "the tools of the tests" if args.tests else "five small packages"
    print(
        f"xds: downloads torch {build} and {more}, about {size_mb} MB, into {ENVIRONMENT}",
        flush=True,
    )
    uv = os.environ.get("UV") or shutil.which("uv")
    for command in commands(uv, backend, tests=args.tests):
        print("+", " ".join(command), flush=True)
        if not args.dry_run and not run(command):
            sys.exit(f"xds: this command failed: {' '.join(command)}")


def commands(uv, backend, *, tests):
    """The commands, from a new environment to the result."""
    is_new = not PYTHON.exists()
    if is_new and uv:
        yield [uv, "venv", str(ENVIRONMENT)]
    elif is_new:
        yield [sys.executable, "-m", "venv", str(ENVIRONMENT)]
    if not uv:  # pip alone cannot choose the build of torch
        yield [str(PYTHON), "-m", "pip", "install", "--quiet", "uv"]
    install = [uv] if uv else [str(PYTHON), "-m", "uv"]
    install += ["pip", "install", "--python", str(PYTHON), "--torch-backend", backend]
    what = f"{ROOT}[test]" if tests else str(ROOT)
    yield [*install, "-c", str(ROOT / "constraints.txt"), "-e", what]
    if tests:
        yield [str(ENVIRONMENT / "bin" / "pytest")]
    else:
        yield [str(PYTHON), "-m", "xds", str(Path(__file__).with_name("train.py"))]


def run(command):
    """Whether the command succeeds, for an installation also without the index of torch's builds."""
    if subprocess.run(command, cwd=ROOT, check=False).returncode == 0:
        return True
    if "--torch-backend" not in command:
        return False
    print(
        f"xds: again from the usual index, whose torch may be the one for GPUs: {TORCH_MB['auto']} MB",
        flush=True,
    )
    has_pip = (ENVIRONMENT / "bin" / "pip").exists()
    install = [str(PYTHON), "-m", "pip", "install"] if has_pip else command[:-6]
    return subprocess.run([*install, *command[-4:]], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    main()
