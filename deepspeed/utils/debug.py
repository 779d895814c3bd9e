"""`deepspeed.utils.debug`: names of a model's parameters in messages, and prints of ranks that do not mix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor, nn

from ..missing import placeholder

fcntl: Any = None  # imported at the first locked print; scripts may look at it


@final
class _ById:
    """Names of objects. It does not keep the objects, whose `==` may compare elements."""

    def __init__(self) -> None:
        self._names: dict[int, tuple[ref[Any], str]] = {}

    def __setitem__(self, thing: Any, name: str) -> None:
        self._names[id(thing)] = (ref(thing), name)

    def get(self, thing: Any) -> str:
        found = self._names.get(id(thing))
        return found[1] if found is not None and found[0]() is thing else "unknown"

    def clear(self) -> None:
        self._names.clear()


module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
param_names = _ById()


def debug_clear_module_and_param_names() -> None:
    """Forget the names."""
    module_names.clear()
    param_names.clear()


def debug_extract_module_and_param_names(model: nn.Module) -> None:
    """Keep the names of all modules and parameters of `model`, for the functions below."""
    debug_clear_module_and_param_names()
    for name, module in model.named_modules():
        module_names[module] = name
    for name, param in model.named_parameters():
        param_names[param] = name


def debug_module2name(module: nn.Module) -> str:
    """Its name, or "unknown"."""
    return module_names.get(module, "unknown")


def debug_module2name_id(module: nn.Module) -> str:
    return f"name={debug_module2name(module)}"


def debug_module2name_class(module: nn.Module) -> str:
    return f"name={debug_module2name(module)} {type(module).__name__}"


def debug_param2name(param: Tensor) -> str:
    """Its name, or "unknown"."""
    return param_names.get(param)


def ds_id(param: Tensor) -> Any:
    """DeepSpeed's number of a sharded parameter, or "none"."""
    return getattr(param, "ds_id", "none")


def ds_shape(param: Tensor) -> Any:
    """The shape of the whole parameter."""
    return getattr(param, "ds_shape", param.shape)


def debug_param2name_id(param: Tensor) -> str:
    return f"name={debug_param2name(param)} id={ds_id(param)}"


def debug_param2name_id_shape(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} shape={ds_shape(param)}"


def debug_param2name_id_shape_device(param: Tensor) -> str:
    return f"{debug_param2name_id_shape(param)} device={param.device}"


def debug_param2name_id_numel(param: Tensor) -> str:
    return f"{debug_param2name_id(param)} numel={param.numel()}"


def debug_param2name_id_shape_status(param: Tensor) -> str:
    return f"{debug_param2name_id_shape(param)} status={getattr(param, 'ds_status', 'none')}"


@contextmanager
def _locked() -> Iterator[None]:
    """Hold a lock between the processes of this machine, where the system has such locks."""
    global fcntl
    try:
        import fcntl as found
    except ImportError:
        yield
        return
    fcntl = found
    with open(__file__) as file:
        found.flock(file, found.LOCK_EX)
        try:
            yield
        finally:
            found.flock(file, found.LOCK_UN)


def printflock(*msgs: object) -> None:
    """`print`, by one process of this machine at a time."""
    with _locked():
        print(*msgs)


def log_rank_file(rank: int, *msgs: object) -> None:
    """Append a line for each message to log_rank_<rank>.txt in the working folder."""
    with open(f"log_rank_{rank}.txt", "a") as file:
        file.writelines(f"{message}\n" for message in msgs)


def print_rank(*msg: object, force: bool = False) -> None:
    """With `force`: print on each rank, with its number."""
    if force:
        print(f"[{dist.get_rank()}]", *msg)


def print_rank0(*msg: object, force: bool = False) -> None:
    """With `force`: print on rank 0."""
    if force and dist.get_rank() == 0:
        print("[0]", *msg)


def print_backward_tensors(tensor: Tensor) -> None:
    """Print the nodes of autograd's graph behind `tensor`, and the parameters at their ends."""
    waiting = [tensor.grad_fn] if tensor.grad_fn is not None else []
    while waiting:
        node = waiting.pop()
        print(f"Backward tensors in {node}")
        for following, _ in node.next_functions:
            if following is None:
                continue
            leaf = getattr(following, "variable", None)
            if leaf is None:
                waiting.append(following)
            else:
                print(f"{following} shape: {leaf.shape}, data: {leaf}, grad: {leaf.grad}")


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
