"""A language model on long sequences, in the style of DeepSpeed's ALST tutorial.

With `import deepspeed` instead of `xds.deepspeed` it runs with DeepSpeed.
"""

import argparse
import json

import torch
import torch.distributed.nn.functional
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM

import xds.deepspeed as deepspeed
from xds.deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from xds.deepspeed.runtime.utils import move_to_device
from xds.deepspeed.utils import groups


def make_samples():
    generator = torch.Generator().manual_seed(3)
    samples = []
    for _ in range(6):
        ids = torch.randint(3, 61, (12,), generator=generator)
        labels = ids.clone()
        labels[:7] = -100  # a prompt: the first rank has no labels
        samples.append({"input_ids": ids, "labels": labels, "position_ids": torch.arange(12)})
    return samples


def build(attention):
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads, attn_implementation=attention)
    return AutoModelForCausalLM.from_config(config)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--output", type=str)
    args = parser.parse_args()
    deepspeed.init_distributed()
    world_size = torch.distributed.get_world_size()
    sequence_parallel_size = world_size
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.0}},
        "zero_optimization": {"stage": args.stage},
        "sequence_parallel_size": sequence_parallel_size,
    }
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path="tiny",
        core_attn_implementation="sdpa",
        sequence_parallel_size=sequence_parallel_size,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )
    model = build("sdpa")
    engine, _, _, _ = deepspeed.initialize(
        config=config, model=model, model_parameters=model.parameters(), mpu=mpu
    )
    samples = make_samples()
    sampler = DistributedSampler(samples, shuffle=False)
    loader = DataLoader(samples, batch_size=1, sampler=sampler)
    sp_group = groups._get_sequence_parallel_group()
    sp_world_size = groups._get_sequence_parallel_world_size()
    sp_rank = groups._get_sequence_parallel_rank()
    loader = UlyssesSPDataLoaderAdapter(
        loader,
        sp_rank=sp_rank,
        sp_group=sp_group,
        sp_world_size=sp_world_size,
        device=engine.device,
    )
    losses = []
    for batch in loader:
        batch = move_to_device(batch, engine.device)
        outputs = engine(**batch)
        shift_labels = batch["shift_labels"]
        loss = engine.module.loss_function(
            logits=outputs.logits,
            labels=None,
            shift_labels=shift_labels,
            vocab_size=engine.module.config.vocab_size,
        )
        # the mean over no labels is nan
        good = (shift_labels != -100).sum()
        loss = torch.where(good > 0, loss, torch.zeros_like(loss))
        every_loss = torch.distributed.nn.functional.all_gather(loss, group=sp_group)
        every_good = torch.distributed.nn.functional.all_gather(good, group=sp_group)
        total = sum(every_loss[rank] * every_good[rank] for rank in range(sp_world_size))
        loss = total / sum(every_good)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if torch.distributed.get_rank() == 0:
        with open(args.output, "w") as file:
            json.dump({"losses": losses}, file)


if __name__ == "__main__":
    main()
