"""Each private name of torch that xds uses still means what xds takes it for. Run it first with a new torch."""

import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge

from xds.engine import torch_clipping
from xds.ops import torch_internals as internals

ROOT = Path(__file__).parents[2]


def test_no_other_file_imports_a_private_name_of_torch():
    private = re.compile(
        r"^\s*(?:from torch(?:\.\w+)*\._\w+|from torch\._\w+)[\w.]* import|torch\._C\.", re.M
    )
    folders = (
        "utils",
        "ops",
        "offload",
        "compression",
        "zero",
        "pipe",
        "tensor",
        "experts",
        "recovery",
        "engine",
        "launcher",
    )
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 300
    named = [file.name for file in files if private.search(file.read_text())]
    # the names of c10d's flight recorder differ by build, so dump.py asks for them as it runs
    assert sorted(set(named) - {"dump.py"}) == ["torch_internals.py"]


def test_a_running_backward_is_seen_and_knows_which_nodes_it_will_reach():
    reached, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    seen = []

    def look(_: torch.Tensor) -> None:
        nodes = [get_gradient_edge(param).node for param in (reached, other)]
        seen.append((internals.in_backward(), [internals.will_execute(node) for node in nodes]))
        internals.after_backward(lambda: seen.append(reached.grad.tolist()))

    doubled = reached * 2
    doubled.register_hook(look)
    assert not internals.in_backward()
    assert internals.graph_task_id() == internals.NO_BACKWARD
    (doubled.sum() + other.sum() * 0).backward(inputs=[reached])
    assert seen == [(True, [True, False]), [2.0, 2.0]]


def test_a_mode_sees_no_function_inside_of_its_absence():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    with Mode():
        with internals.NoTorchFunction():
            torch.ones(1).add(1)
        assert not seen
        torch.ones(1).add(1)
        assert seen


def test_trees_transforms_and_graphs():
    leaves, spec = internals.tree_flatten({"a": [1, (2, None)]})
    text = internals.treespec_dumps(spec)
    assert leaves == [1, 2, None] == internals.tree_leaves({"a": [1, (2, None)]})
    assert internals.tree_unflatten(leaves, internals.treespec_loads(text)) == {"a": [1, (2, None)]}
    assert internals.tree_map_only(int, str, [1, 2.0]) == ["1", 2.0]
    seen = torch.func.vmap(lambda x: x + internals.in_functorch())(torch.zeros(2))
    assert seen.tolist() == [1.0, 1.0] and not internals.in_functorch()

    def outside(x: torch.Tensor) -> torch.Tensor:
        with internals.outside_of_functorch():
            assert not internals.in_functorch()
        return x + internals.in_functorch()

    assert torch.func.vmap(outside)(torch.zeros(2)).tolist() == [1.0, 1.0]

    @internals.outside_of_graphs
    def compiling() -> bool:
        return torch.compiler.is_compiling()

    compiled = torch.compile(lambda x: x + compiling(), backend="eager")
    assert compiled(torch.zeros(1)).item() == 0


def test_an_instance_can_replace_what_a_call_of_a_module_runs():
    layer = nn.Linear(2, 2)
    assert hasattr(nn.Module, internals.CALL)
    setattr(layer, internals.CALL, lambda x: x + 1)
    layer.register_forward_hook(lambda *_: 1 / 0)  # it does not run
    assert layer(torch.zeros(2)).tolist() == [1, 1]
    assert not list(nn.Linear(2, 2)._forward_hooks)


def test_users_of_a_memory_are_counted():
    own = torch.zeros(8)
    assert internals.num_users(own) == 1
    view, shared = own[2:].view(torch.uint8), own.numpy()
    assert internals.num_users(own) == 3
    kept = nn.Parameter(own[:1])
    del view, shared
    assert internals.num_users(own) == 2
    graph = (kept * kept).sum()
    del kept
    assert internals.num_users(own) == 2 and graph == 0
    del graph
    assert internals.num_users(own) == 1


def test_the_function_in_torchs_clipping_can_be_exchanged():
    def given(*args):
        return args

    own = internals.exchange_inner(nn.utils.clip_grad_norm_, given)
    try:
        assert nn.utils.clip_grad_norm_(1, 2) == (1, 2)
    finally:
        assert internals.exchange_inner(nn.utils.clip_grad_norm_, own) is given
    # where another test has left an engine, the engine's function has torch's
    own = torch_clipping.functions._own.get(nn.utils.clip_grad_norm_, own)
    assert own is nn.utils.clip_grad_norm_.__wrapped__


def test_a_parameter_gets_memory_of_any_device():
    param = nn.Parameter(torch.ones(2))
    for device in ("cpu", "meta"):  # torch's own assignment refuses the second
        internals.set_values(param, torch.zeros(3, device=device))
        assert param.shape == (3,) and param.device.type == device
        assert isinstance(param, nn.Parameter) and param.requires_grad and param.is_leaf


def test_a_group_that_sends_nothing_has_the_rank_that_was_asked_for():
    internals.open_fake_group(1, 3)
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (1, 3)
        values = torch.ones(2)
        dist.all_reduce(values)
        assert values.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()
