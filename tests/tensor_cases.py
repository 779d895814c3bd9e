"""Test helper: cases of training with tensor, sequence, pipeline and data ranks, compared with one process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from runs import plain
from torch import Tensor, nn

from xds.ops.mesh import Mesh
from xds.tensor import DistributedAttention

GPT_FILE = Path(__file__).parents[1] / "examples" / "gpt" / "model.py"
STEPS, COUNT, SAMPLES, LENGTH, VOCAB = 3, 4, 2, 12, 66
# with a smaller eps, one process turns a relative change of 1e-7 in Qwen3's weights into 5e-5 of its norm
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-2}
# SGD shows a factor on all gradients in the parameters; Adam hides it
UPDATES: dict[str, dict[str, Any]] = {"AdamW": ADAMW, "SGD": {"lr": 0.1}}
HEADS = 4
TOKENS = {  # of a llama: blocks whose tensor ranks share the tokens between layers
    **{f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.input_layernorm": "sequence_parallel",
    "model.layers.*.post_attention_layernorm": "sequence_parallel",
}


@dataclass(frozen=True)
class Case:
    """How a model is trained."""

    model: str
    pipe: int
    data: int
    sequence: int
    tensor: int
    stage: int
    optimizer: str = "AdamW"

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.pipe, self.data, self.sequence, self.tensor)

    @property
    def name(self) -> str:
        lengths = "x".join(map(str, self.mesh.shape))
        return f"{self.model}-{lengths}-zero{self.stage}"

    @property
    def layers(self) -> int:
        """Two for each stage."""
        return 2 * self.pipe

    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": COUNT,
            "optimizer": {"type": self.optimizer, "params": UPDATES[self.optimizer]},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "pipeline": {"stages": self.pipe},
            "tensor_parallel": {"tp_size": self.tensor},
        }
        if self.sequence > 1:
            found["sequence_parallel_size"] = self.sequence
        return found


def build(name: str, sequence: int = 1, layers: int = 4) -> nn.Module:
    """A model of blocks with four heads, drawn from one seed. `sequence`: the number of such ranks."""
    torch.manual_seed(7)
    if name == "gpt":
        return _gpt(sequence, layers)
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": HEADS}
    more: dict[str, Any] = {"vocab_size": VOCAB}
    if name != "gpt2":
        more |= {"intermediate_size": 56, "num_key_value_heads": 2}
    else:
        more |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = AutoConfig.for_model(name, **sizes, **more)
    model: nn.Module = AutoModelForCausalLM.from_config(config)
    return model


@cache
def _gpt_module() -> Any:
    """The example's model. Other folders have a file of that name as well."""
    spec = importlib.util.spec_from_file_location("gpt_of_the_example", GPT_FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _gpt(sequence: int, layers: int) -> nn.Module:
    GPT, Shape = _gpt_module().GPT, _gpt_module().Shape
    model = GPT(Shape(layers=layers, width=32, heads=HEADS, context=LENGTH, vocabulary=VOCAB))
    for block in model.blocks if sequence > 1 else ():
        attention: Any = block.attention
        attention.attend = DistributedAttention(attention.attend, heads_dim=1, tokens_dim=2)
    return model


def batches(name: str, step: int, data_rank: int) -> Iterator[Any]:
    """The micro-batches of a step on a data rank."""
    draw = torch.Generator().manual_seed(50 * step + data_rank)
    for _ in range(COUNT):
        ids = torch.randint(3, VOCAB, (SAMPLES, LENGTH + 1), generator=draw)
        if name == "gpt":
            yield ids[:, :-1], ids[:, 1:]
        else:
            yield {"input_ids": ids[:, 1:], "labels": ids[:, 1:].clone()}


Steps = list[tuple[float, float]]


@cache
def one_process(name: str, data: int, layers: int = 4, optimizer: str = "AdamW") -> Steps:
    def parts(step: int) -> list[Any]:
        return [batch for rank in range(data) for batch in batches(name, step, rank)]

    how = {"optimizer": optimizer, **UPDATES[optimizer]}
    return [tuple(step) for step in plain(build(name, layers=layers), STEPS, parts, loss_of, **how)]


def loss_of(output: Any) -> Tensor:
    loss: Tensor = getattr(output, "loss", output)
    return loss
