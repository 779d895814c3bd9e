"""Build script. The repository root is the package: the folder zero/ is xds.zero."""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Leave this script out of the wheel: it sits in the package's own folder."""

    def find_package_modules(self, package, package_dir):
        modules = super().find_package_modules(package, package_dir)
        return [module for module in modules if module[:2] != ("xds", "setup")]


NOT_SHIPPED = ["tests*", "examples*", "benchmarks*", "docs*", "build*"]
folders = find_packages(exclude=NOT_SHIPPED)
setup(
    name="xds-engine",
    version="0.1.0",
    description="Train PyTorch models that do not fit one device: ZeRO 0-3 from a JSON config",
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "pydantic>=2.5", "ninja", "numpy", "py-cpuinfo", "tqdm"],
    extras_require={
        "test": [
            *("pytest", "hypothesis", "ruff", "mypy", "safetensors"),
            *("transformers>=5", "accelerate", "peft"),
        ],
        "plot": ["matplotlib"],
        "huggingface": ["transformers>=5", "accelerate", "safetensors"],
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "comet": ["comet_ml"],
    },
    package_dir={"xds": "."},
    packages=["xds", *(f"xds.{name}" for name in folders)],
    package_data={"xds": ["py.typed"], "xds.ops": ["csrc/*/*"]},
    entry_points={"console_scripts": ["xds=xds.launcher.cli:main"]},
    cmdclass={"build_py": BuildPy},
)
