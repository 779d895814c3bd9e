"""Build script. The repository root is the package: the folder zero/ is xds.zero."""

import re
from contextlib import suppress
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

ROOT = Path(__file__).resolve().parent

# Read at the start of every Python of the environment: where the variable XDS_AS_DEEPSPEED is set,
# `import deepspeed` finds xds.deepspeed (see engine/deepspeed/stand_in.py). Elsewhere it reads one variable.
AS_DEEPSPEED = "xds_as_deepspeed.pth"
AS_DEEPSPEED_LINE = (
    "import os; os.environ.get('XDS_AS_DEEPSPEED', '').lower() in ('', '0', 'false') or "
    "__import__('xds.engine.deepspeed.stand_in', fromlist=['activate']).activate()\n"
)


class EditableWheel(editable_wheel):
    """Add the file for XDS_AS_DEEPSPEED to an editable installation, and a path that type checkers read.

    setuptools maps xds to the root by an import hook, which mypy, pyright and editors do not run. They read a
    line of a .pth file: here a folder whose entry `xds` is a link to the root.
    """

    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        Path(unpacked_wheel, AS_DEEPSPEED).write_text(AS_DEEPSPEED_LINE)
        link = ROOT / ".editable" / "xds"
        with suppress(OSError):  # a file system without links: only the hook
            link.parent.mkdir(exist_ok=True)
            if not link.is_symlink():
                link.symlink_to("..", target_is_directory=True)
            Path(unpacked_wheel, "xds_editable.pth").write_text(f"{link.parent}\n")
        return super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)


class BuildPy(build_py):
    """Leave this script out of the wheel: it sits in the package's own folder. Add the same file to it."""

    def run(self):
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, AS_DEEPSPEED).write_text(AS_DEEPSPEED_LINE)

    def get_outputs(self, include_bytecode=True):
        outputs = super().get_outputs(include_bytecode)
        return (
            outputs if self.editable_mode else [*outputs, str(Path(self.build_lib, AS_DEEPSPEED))]
        )

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("xds", "setup")]


def index_page():
    """README.md for a package index, which has no files beside it: without pictures and links to files."""
    text = re.sub(r"^!\[.*\n+", "", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    return re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text)


NOT_SHIPPED = ["tests*", "examples*", "benchmarks*", "docs*", "build*"]
folders = find_packages(exclude=NOT_SHIPPED)
setup(
    name="xds-engine",
    version="0.2.0",
    description="Train PyTorch models that do not fit one device: ZeRO 0-3 from a JSON config",
    long_description=index_page(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["deep learning", "distributed training", "PyTorch", "ZeRO", "DeepSpeed"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "pydantic>=2.10", "ninja", "numpy", "py-cpuinfo", "tqdm"],
    extras_require={
        "test": [
            *("pytest", "pytest-xdist", "hypothesis", "ruff", "mypy", "safetensors", "hjson"),
            *("transformers>=5", "accelerate", "peft", "scikit-learn", "torchao"),
            "cloudpickle",
        ],
        "release": ["build", "twine"],
        "docs": ["mkdocs>=1.6,<2", "mkdocs-material", "mkdocstrings[python]"],
        "notebook": ["cloudpickle"],
        "plot": ["matplotlib"],
        "vision": ["scikit-learn"],
        "torchao": ["torchao>=0.18", "safetensors"],
        "huggingface": ["transformers>=5", "accelerate", "safetensors"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "comet": ["comet_ml"],
    },
    package_dir={"xds": "."},
    packages=["xds", *(f"xds.{name}" for name in folders)],
    package_data={
        "xds": ["py.typed"],
        "xds.ops": ["csrc/*/*"],
        "xds.engine.planning": ["machines/*.json"],
    },
    entry_points={"console_scripts": ["xds=xds.launcher.cli:main"]},
    cmdclass={"build_py": BuildPy, "editable_wheel": EditableWheel},
)
