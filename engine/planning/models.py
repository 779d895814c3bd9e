"""The model of a plan: built on the meta device, from a folder of transformers or by a function.

--model DIR               a folder with config.json of transformers
--model module:function   function() returns a model, or (model, batch), where `batch` is one micro-batch
"""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...ops.torch_internals import tree_leaves, tree_map
from ...pipe.cut.meta_copies import ShapesOnly
from ...utils.errors import UsageError
from ...utils.quoting import printable

RANDOM = (
    *("normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_", "log_normal_"),
    "cauchy_",
)


@final
class WithoutValues(TorchFunctionMode):
    """Nothing is initialised: on the meta device torch would load its compiler to draw no numbers."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if func in (torch.randn, torch.rand):
            return torch.empty(*args, **{k: v for k, v in kwargs.items() if k != "generator"})
        if name in RANDOM or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@final
class FusedKernels(TorchFunctionMode):
    """Kernels that the meta device lacks keep what those of other devices keep.

    There torch would keep all weights of attention, and multiplies groups of rows in bf16 only.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_grouped_mm":
            return _grouped(*args[:2])
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = inspect.signature(_sdpa).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        return _sdpa(*given.args, **given.kwargs)


def _grouped(rows: Tensor, weights: Tensor) -> Tensor:
    """A product for each of `weights`, with equal parts of `rows` where they can be equal."""
    groups = len(weights)
    if len(rows) % groups:
        return rows.mm(weights[0])
    return rows.view(groups, -1, rows.shape[1]).bmm(weights).flatten(0, 1)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The signature of `scaled_dot_product_attention`."""
    width, wider = value.shape[-1], query.shape[-1] - value.shape[-1]
    if wider > 0:
        value = nn.functional.pad(value, (0, wider))
    found: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found[..., :width]


@contextmanager
def meta_device() -> Iterator[None]:
    """What is built inside is on the meta device, and has no values."""
    with torch.device("meta"), WithoutValues(), ShapesOnly():
        yield


class ModelSource(ABC):
    """Builds the model as often as it is asked to.

    fuses: kernels of its blocks are fused also where the engine compiles nothing, as those of a framework that
        has such kernels.
    """

    name: str
    fuses = False

    @abstractmethod
    def build(self) -> nn.Module:
        """A new model, on the default device."""

    @abstractmethod
    def batch(self, micro_batch_size: int) -> Any:
        """One micro-batch on the default device; None: not known."""

    def on_meta(self) -> nn.Module:
        """A new model on the meta device: shapes without memory."""
        with meta_device():
            return self.build()

    def batch_on_meta(self, micro_batch_size: int) -> Any:
        """One micro-batch on the meta device; None: not known."""
        with meta_device():
            batch = self.batch(micro_batch_size)
        return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch)


@final
class FolderModel(ModelSource):
    """A model of transformers, from the config.json in a folder. Its weights are not read.

    Code of the folder runs only where `trusts_code` says so; transformers itself would ask on the terminal.
    """

    def __init__(
        self, folder: Path, sequence_length: int | None, *, trusts_code: bool = False
    ) -> None:
        try:
            import transformers
        except ImportError:
            raise UsageError(
                f"--model {printable(str(folder))}: transformers is not installed; run `pip install "
                "transformers`, or give module:function"
            ) from None
        self.name = str(folder)
        self._trusts_code = trusts_code
        with self._naming_damage():
            self._config = transformers.AutoConfig.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trusts_code
            )
            self._config.use_cache = False
            names = getattr(self._config, "architectures", None) or [""]
            found = getattr(transformers, names[0], None)
        is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
        self._class = found if is_model else None
        self._auto = transformers.AutoModelForCausalLM
        known = getattr(self._config, "max_position_embeddings", None)
        self._length: int | None = sequence_length or known

    def build(self) -> nn.Module:
        model: nn.Module
        with self._naming_damage():
            if self._class is not None:
                model = self._class(self._config)
            else:
                model = self._auto.from_config(self._config, trust_remote_code=self._trusts_code)
        return model

    def batch(self, micro_batch_size: int) -> Any:
        if self._length is None or not hasattr(self._config, "vocab_size"):
            return None
        with self._naming_damage():
            tokens = torch.zeros((micro_batch_size, self._length), dtype=torch.int64)
            tokens.random_(0, self._config.vocab_size)
        return {"input_ids": tokens, "labels": tokens.clone()}

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        """Raises UsageError instead of what transformers raises, which is of many kinds and lines."""
        try:
            yield
        except Exception as error:
            where = f"--model {printable(self.name)}"
            if "trust_remote_code" in str(error) and not self._trusts_code:
                raise UsageError(
                    f"{where}: its config.json names code of the folder (auto_map), which is not run; read the "
                    "code, and add --trust-remote-code to run it"
                ) from error
            reason = printable(f"{type(error).__name__}: {error}".partition("\n")[0])
            raise UsageError(
                f"{where}: transformers makes no model of it ({reason}); correct its config.json"
            ) from error


@final
class FunctionModel(ModelSource):
    """What a function returns: a model, or a model and one micro-batch."""

    def __init__(self, name: str) -> None:
        self.name = name
        module, _, function = name.partition(":")
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            self._function = getattr(import_module(module), function)
            inspect.signature(self._function).bind()
        except (ImportError, AttributeError, TypeError) as error:
            raise UsageError(
                f"--model {printable(name)}: {error}; give module:function, where the module is importable "
                "from this folder, or a folder with config.json"
            ) from None

    def build(self) -> nn.Module:
        return self._both()[0]

    def batch(self, micro_batch_size: int) -> Any:
        return self._both()[1]

    def _both(self) -> tuple[nn.Module, Any]:
        found = self._function()
        model, batch = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"--model {printable(self.name)}: the function returned a {type(model).__name__}; it must "
                "return an nn.Module, or (nn.Module, one micro-batch)"
            )
        return model, batch


@final
class ResizedBatches(ModelSource):
    """The model of another source, with micro-batches of any size: a function's one is repeated."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self.name = source.name

    def build(self) -> nn.Module:
        return self._source.build()

    def batch(self, micro_batch_size: int) -> Any:
        batch = self._source.batch(micro_batch_size)
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
        lengths = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors}
        if len(lengths) != 1 or lengths == {0} or lengths == {micro_batch_size}:
            return batch

        def resized(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            return leaf[:1].repeat(micro_batch_size, *[1] * (leaf.dim() - 1))

        return tree_map(resized, batch)


def model_source(
    text: str, sequence_length: int | None = None, *, trusts_code: bool = False
) -> ModelSource:
    """The model that `--model` names.

    Args:
        sequence_length: tokens of a sample, for a folder; trusts_code: the folder's code may run.
    Raises:
        UsageError: there is no such folder or function, or transformers makes no model of the folder.
    """
    if Path(text).is_dir():
        if not (Path(text) / "config.json").is_file():
            raise UsageError(
                f"--model {printable(text)}: the folder has no config.json; give the folder of a model of "
                "transformers, or module:function"
            )
        return FolderModel(Path(text), sequence_length, trusts_code=trusts_code)
    if ":" not in text:
        raise UsageError(
            f"--model {printable(text)}: there is no such folder; give a folder with config.json, or "
            "module:function"
        )
    return FunctionModel(text)


__all__ = [
    "FolderModel",
    "FunctionModel",
    "FusedKernels",
    "ModelSource",
    "ResizedBatches",
    "meta_device",
    "model_source",
]
