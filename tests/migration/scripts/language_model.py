"""A small GPT in DeepSpeed's style: sharded construction, own optimizer and schedule, accumulation, a resume.

With `import deepspeed` instead of the import below it runs with DeepSpeed.
"""

import argparse
import json

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import xds.deepspeed as deepspeed

VOCABULARY, WIDTH, LAYERS, CONTEXT = 64, 32, 4, 16


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


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_data():
    text = torch.randint(
        0, VOCABULARY, (64, CONTEXT + 1), generator=torch.Generator().manual_seed(5)
    )
    return TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--save", type=str, default=None)
    parser.add_argument("--output", type=str)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": args.bf16},
        "zero_optimization": {"stage": args.stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }

    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(11)
    with deepspeed.zero.Init(config_dict_or_path=ds_config, enabled=args.stage == 3):
        model = GPT()
    decayed = [p for p in model.parameters() if p.dim() > 1 or args.stage == 3]
    others = [p for p in model.parameters() if not any(p is other for other in decayed)]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2)
    engine, _, loader, scheduler = deepspeed.initialize(
        args=args,
        model=model,
        optimizer=optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (1 + t)),
        training_data=make_data(),
        config=ds_config,
    )
    engine.train()
    device = deepspeed.get_accelerator().current_device_name()
    losses, norms = [], []
    for ids, targets in loader:
        loss = engine(ids.to(device), targets.to(device))
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float().clone()
        deepspeed.comm.all_reduce(mean, op=deepspeed.comm.ReduceOp.SUM)
        losses.append(mean.item() / deepspeed.comm.get_world_size())
        if engine.is_gradient_accumulation_boundary():  # of the next micro-batch
            norms.append(float(engine.get_global_grad_norm() or 0))
    weight = deepspeed.utils.safe_get_full_fp32_param(engine.module.tokens.weight)
    with deepspeed.zero.GatheredParameters(model.tokens.weight, modifier_rank=None):
        gathered = model.tokens.weight.float().sum().item()
    if args.save:
        engine.save_checkpoint(args.save, client_state={"batches": len(losses)})
        _, client_state = engine.load_checkpoint(args.save)
        assert client_state["batches"] == len(losses)
    deepspeed.utils.log_dist(f"trained {engine.global_steps} steps", ranks=[0])
    deepspeed.comm.barrier()
    if rank == 0:
        results = {"losses": losses, "norms": norms, "lr": scheduler.get_last_lr()[0]}
        results.update(weight=weight.sum().item(), gathered=gathered, steps=engine.global_steps)
        with open(args.output, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
