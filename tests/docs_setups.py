"""Test helper: what stands before the Python blocks of a page, so that they run.

A page's JSON blocks are files beside it: config.json, 1.json, ... "out" becomes a folder of the test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Setup(NamedTuple):
    """`edits`: what a run shortens. is_process: ranks are processes, as `xds.zero.Init` needs."""

    before: str = ""
    world_size: int = 2
    edits: Mapping[str, str] = {}
    is_process: bool = False


BLOCKS = """
import torch
import xds

class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mlp = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU())

    def forward(self, x):
        return x + self.mlp(x)
"""

SETUPS = {
    "docs/checkpoints.md": Setup(
        """
        import torch
        import xds

        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
        engine = xds.initialize(torch.nn.Linear(2, 2), config)
        """,
        edits={
            "engine.global_steps < 200": "engine.global_steps < 20",
            'resume("out")': 'resume("new")',
            'engine.save_checkpoint("out")': 'engine.save_checkpoint("new")',
        },
    ),
    "docs/dropping.md": Setup(
        """
        import torch
        import xds

        class Block(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())

            def forward(self, x):
                return x + self.inner(x)

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens = torch.nn.Embedding(32, 8)
                self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

            def forward(self, tokens):
                x = self.tokens(tokens)
                for block in self.blocks:
                    x = block(x)
                return x.square().mean()

        model, batches = Model(), [torch.randint(0, 32, (2, 16)) for _ in range(3)]
        """,
        edits={
            'xds.initialize(model, "1.json")': 'xds.initialize(Model(), "1.json")',
            "Short(model)": "Short(Model())",
        },
    ),
    "docs/compressed-training.md": Setup(
        edits={
            "range(300)": "range(210)",
            "print(model[0].up)": "assert model[0].up.out_features == 64",
        }
    ),
    "docs/data.md": Setup(
        """
        import json
        from types import SimpleNamespace

        import torch
        import xds

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.head = torch.nn.Embedding(500, 4), torch.nn.Linear(4, 500)

            def forward(self, input_ids, labels, position_ids=None, attention_mask=None):
                logits = self.head(self.tokens(input_ids))[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
                return SimpleNamespace(loss=loss)

        with open("config.json") as file:
            config = json.load(file)
        config["optimizer"] = {"type": "AdamW"}
        torch.manual_seed(0)
        model = Model()
        dataset = [torch.randint(16, (length,)) for length in range(100, 1500, 70)]
        """,
        edits={
            'model, "config.json"': "model, config",
            "integers(1, 5000": "integers(1, 500",
            "size=2000": "size=400",
            'engine = xds.initialize(model, "curriculum.json"': "engine.destroy()\n"
            'engine = xds.initialize(model, "1.json"',
            'engine = xds.initialize(model, "batches.json"': "engine.destroy()\n"
            'engine = xds.initialize(model, "2.json"',
        },
    ),
    "docs/inference.md": Setup(
        """
        import torch
        import xds
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61}
        config = LlamaConfig(**sizes, **heads)

        def new_model():
            torch.manual_seed(0)
            return LlamaForCausalLM(config)

        if torch.distributed.get_rank() == 0:
            new_model().save_pretrained("out")
        torch.distributed.barrier()
        """
    ),
    "docs/native-ops.md": Setup(world_size=1, is_process=True),
    "docs/pipelines.md": Setup(
        BLOCKS
        + """
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(8) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def logits(embedding, x):
    return x @ embedding.weight.t()

def loss_fn(outputs, labels):
    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

torch.manual_seed(0)
model = Model()
dataset = [{"x": torch.randn(8)} for _ in range(64)]
validation = [{"x": torch.randn(4, 8)} for _ in range(12)]
""",
        edits={"range(100)": "range(2)", '"pipeline.json"': '"config.json"'},
    ),
    "docs/plan.md": Setup(world_size=1),
    "docs/tune.md": Setup(world_size=1),
    "docs/profiling.md": Setup(
        """
        import torch

        model, batch = torch.nn.Linear(4, 4), torch.ones(2, 4)
        """,
        world_size=1,
    ),
    "docs/report.md": Setup(
        """
        import torch
        import xds

        config = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
        engine = xds.initialize(torch.nn.Linear(2, 2), config)
        """
    ),
    "docs/sequence.md": Setup(
        """
        import torch

        self = torch.nn.Module()
        local_attention = torch.nn.functional.scaled_dot_product_attention
        query = key = value = torch.randn(1, 8, 2, 4)
        """,
        world_size=1,
    ),
    "docs/generation.md": Setup(
        """
        import torch
        import xds

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16)

            def forward(self, tokens):
                return self.head(self.tokens(tokens))

            def generate(self, tokens, max_new_tokens, do_sample=False):
                for _ in range(max_new_tokens):
                    next_one = self(tokens)[:, -1:].softmax(-1)
                    chosen = torch.multinomial(next_one[:, 0], 1) if do_sample else next_one.argmax(-1)
                    tokens = torch.cat([tokens, chosen], 1)
                return tokens

        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        engine = xds.initialize(Model(), config)
        prompt, received, sizes = torch.ones(2, 3, dtype=torch.int64), {}, []
        """,
        edits={'save("weights")': 'save("out/weights")'},
    ),
    "docs/stage-3.md": Setup(
        """
        import json
        import os

        import torch
        import xds
        from safetensors.torch import save_file

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Linear(8, 8)
                self.head = torch.nn.Linear(8, 4)

            def forward(self, x):
                return self.head(self.body(x)).square().mean()

            def generate(self, prompt):
                return self.head(self.body(prompt)).argmax(-1)

        config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}
        config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": 0}
        rank = int(os.environ["LOCAL_RANK"])
        if rank == 0:
            os.makedirs("weights")
            save_file(dict(Model().state_dict()), "weights/model.safetensors")
            with open("config.part", "w") as file:
                json.dump(config, file)
            os.rename("config.part", "config.json")
        torch.distributed.barrier()
        batch, prompt = torch.randn(2, 8), torch.randn(1, 8)
        batches = [batch] * (1 + rank)
        """,
        is_process=True,
    ),
    "docs/sparse-attention.md": Setup(),
    "docs/experts.md": Setup(
        "import torch\nfrom torch import nn",
        world_size=1,
    ),
    "docs/tiles.md": Setup(
        BLOCKS
        + """
import json

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(2))
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32)

config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
with open("config.json", "w") as file:
    json.dump(config, file)
model, x = Model(), torch.randn(1, 64, 16)
labels = torch.randint(32, (1, 64))
function, positions, scale = (lambda x, at, scale: x * scale + at), torch.ones(1, 64, 16), torch.ones(16)
""",
        world_size=1,
    ),
}
