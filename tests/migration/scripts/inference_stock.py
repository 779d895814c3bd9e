"""A script of inference in DeepSpeed's style, which names nothing of xds. Compares with transformers."""

import os

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.inference.config import DeepSpeedInferenceConfig
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block


def build():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 61}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()


local_rank = int(os.getenv("LOCAL_RANK", "0"))
world_size = int(os.getenv("WORLD_SIZE", "1"))
device = torch.device(get_accelerator().device_name(local_rank))
ids = torch.arange(2, 12).view(2, 5).to(device)
options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False}
wanted = build().to(device).generate(ids, **options)

policy = {GPT2Block: ("attn.c_proj", "mlp.c_proj")}
with deepspeed.OnDevice(dtype=torch.float32, device="meta"):
    empty = GPT2LMHeadModel(build().config)
if local_rank == 0:
    torch.save(build().state_dict(), "weights.bin")
deepspeed.init_distributed()
deepspeed.comm.barrier()
files = {"type": "ds_model", "checkpoints": ["weights.bin"], "version": 1.0}
for model, settings in (
    (build(), {"mp_size": world_size, "replace_with_kernel_inject": True, "max_tokens": 32}),
    (build(), {"tensor_parallel": {"tp_size": world_size}, "injection_policy": policy}),
    (build(), {"config": DeepSpeedInferenceConfig(tp={"tp_size": world_size}, dtype="fp32")}),
    (empty, {"checkpoint": files, "base_dir": os.getcwd(), "mp_size": world_size}),
):
    config = settings.pop("config", None)
    engine = deepspeed.init_inference(model, config, dtype=torch.float32, **settings)
    assert isinstance(engine, deepspeed.InferenceEngine)
    engine.profile_model_time()
    found = engine.generate(ids, **options)
    assert len(engine.model_times()) == 6
    print(f"rank {local_rank}: equal {torch.equal(found, wanted)}", flush=True)
try:
    deepspeed.init_inference(build(), {"dtype": "fp16"}, dtype="fp32")
except ValueError as error:
    print(f"rank {local_rank}: {error}")
