"""Compiled blocks on sequence ranks give the numbers of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import worst
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from warm_ranks import warm

import xds
from xds.tensor import DistributedAttention

WIDTH, TOKENS, SAMPLES, STEPS = 8, 8, 2, 3
COMPILE: dict[str, Any] = {"enabled": True, "backend": "aot_eager"}
ONE_GRAPH = {**COMPILE, "kwargs": {"fullgraph": True}}


def compiled(model: tuple[Any, ...], kind: str, config: dict[str, Any]) -> Any:
    """Losses and norms, and whether graphs were made."""
    from test_sequence_training import train

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = train(model, kind, config)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], counters["graph_break"]
    return found, counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize(
    ("model", "kind", "stage", "more"),
    [
        pytest.param("llama", "padded", 3, {}, marks=pytest.mark.slow),
        pytest.param("llama", "packed", 2, {"checkpoint": True}, marks=pytest.mark.slow),
        pytest.param("mistral", "odd", 0, ONE_GRAPH, marks=pytest.mark.slow),
    ],
)
def test_a_model_of_transformers_equals_one_process(
    model: str, kind: str, stage: int, more: dict[str, Any]
) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    from test_sequence_training import config_of, one_process

    config = config_of(2, stage, compile={**COMPILE, **more})
    if config["compile"].pop("checkpoint", False):
        config["activation_checkpointing"] = {"enabled": True}
    (found, has_graphs), other = warm(2).run(compiled, (model,), kind, config)
    assert has_graphs and (found, True) == other
    assert worst(found, one_process((model,), kind, 1)) <= 1e-5


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[B, N, H, D]"""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = DistributedAttention(attend)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.up(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return x + self.out(self.attend(q, k, v).flatten(2).tanh())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, ids: Tensor, labels: Tensor, position_ids: Tensor | None = None) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def plain(size: int, section: dict[str, Any] | None) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-2}},
        "zero_optimization": {"stage": 1},
        "sequence_parallel_size": size,
    }
    if section:
        config["compile"] = section
    engine = xds.initialize(Model(), config)
    found = []
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 11, (SAMPLES, TOKENS), generator=draw)
        loss = engine(ids, ids.roll(-1, 1))
        engine.backward(loss)
        engine.step()
        found.append((loss.item(), engine.get_global_grad_norm()))
    engine.destroy()
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], counters["graph_break"]
    return found, counters["stats"]["unique_graphs"]


@pytest.mark.slow
def test_a_plain_model_equals_one_process() -> None:
    wanted, _ = warm(1).run(plain, 1, None)[0]
    for found, graphs in warm(2).run(plain, 2, ONE_GRAPH):
        assert graphs and worst(found, wanted) <= 1e-5


def theirs() -> list[Tensor]:
    """The same inputs through DeepSpeed's class, eager and compiled: outputs and gradients."""
    from xds.deepspeed.sequence.layer import DistributedAttention as Theirs

    module = Theirs(attend, dist.group.WORLD)
    given = torch.randn(SAMPLES, 4, 2, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = []
    for call in (module.__call__, torch.compile(lambda *x: module(*x) * 2, backend="aot_eager")):
        x = given.clone().requires_grad_()
        out = call(x, x, x, 0)
        out.sum().backward()
        found += [out.detach(), x.grad]
    return found


def test_the_class_with_the_arguments_of_deepspeed_is_not_compiled() -> None:
    for out, grad, compiled_out, compiled_grad in warm(2).run(theirs):
        assert torch.equal(compiled_out, 2 * out)
        assert torch.allclose(compiled_grad, 2 * grad)


def ring_in_one_graph() -> str:
    from test_sequence_training import config_of, train

    with pytest.raises(Exception, match="a ring of sequence ranks") as error:
        train(("llama", 1, 2), "padded", config_of(4, 1, compile=ONE_GRAPH))
    return type(error.value).__name__


@pytest.mark.slow
def test_a_ring_is_not_in_one_graph() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    assert len({*warm(4).run(ring_in_one_graph)}) == 1
