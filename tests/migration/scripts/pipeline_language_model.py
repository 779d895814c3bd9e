"""A small GPT as a list of layers, with a tied embedding and a topology, in DeepSpeed's style.

With `import deepspeed` instead of the imports below it runs with DeepSpeed.
"""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import xds.deepspeed as deepspeed
from xds.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from xds.deepspeed.runtime.pipe.engine import PipelineEngine
from xds.deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from xds.deepspeed.utils import groups

VOCABULARY, WIDTH, LAYERS, CONTEXT = 64, 32, 4, 16


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, ids):
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))

    @property
    def weight(self):
        return self.tokens.weight


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def logits(embedding, x):
    return F.linear(x, embedding.weight)


def loss_fn(outputs, labels):
    return F.cross_entropy(outputs.float().flatten(0, 1), labels.flatten())


class GPTPipe(PipelineModule):
    def __init__(self, **options):
        specs = [
            TiedLayerSpec("embedding", Embedding, tied_weight_attr="tokens.weight"),
            *[LayerSpec(Block) for _ in range(LAYERS)],
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec(
                "embedding", Embedding, forward_fn=logits, tied_weight_attr="tokens.weight"
            ),
        ]
        super().__init__(layers=specs, loss_fn=loss_fn, **options)


def make_data():
    text = torch.randint(
        0, VOCABULARY, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(5)
    )
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def to_pair(batch):
    return batch["ids"], batch["labels"]


def collate(samples):
    ids, labels = zip(*samples, strict=True)
    return {"ids": torch.stack(ids), "labels": torch.stack(labels)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--output", type=str)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    ds_config = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": args.stage},
        "pipeline": {"seed_layers": True},
    }

    deepspeed.init_distributed()
    topology = PipeDataParallelTopology(num_pp=2, num_dp=2)
    model = GPTPipe(topology=topology, seed_layers=True, partition_method="type:Block")
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=ds_config,
        training_data=make_data(),
        collate_fn=collate,
    )
    engine.set_batch_fn(to_pair)
    assert isinstance(engine, PipelineEngine) and isinstance(engine, deepspeed.DeepSpeedEngine)
    assert engine.is_pipe_parallel and engine.is_data_parallel
    assert engine.grid.topology().get_coord(engine.global_rank).pipe == engine.stage_id
    assert engine.mpu.get_data_parallel_rank() == groups._get_data_parallel_rank()
    assert groups._get_data_parallel_world_size() == engine.dp_world_size == 2
    total = torch.ones(1)
    deepspeed.comm.all_reduce(total, group=groups._get_data_parallel_group())
    deepspeed.comm.all_reduce(total, group=engine.grid.get_pipe_parallel_group())
    assert total.item() == 4
    losses, norms = [], []
    for _ in range(4):
        losses.append(engine.train_batch().item())
        norms.append(float(engine.get_global_grad_norm()))
    if engine.global_rank == 0:
        found = {"losses": losses, "norms": norms, "micro_batches": engine.micro_batches}
        with open(args.output, "w") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
