"""What a run says of its experts, and biases of routers that even out their tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers import run_ranks
from runs import config
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import xds
from xds.launcher.reporting.page import page_of
from xds.launcher.reporting.records import read_run

COEFFICIENT = 0.01
STEPS = 3


def deepseek() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
    sizes |= {"n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 8}
    sizes |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(first_k_dense_replace=1, **sizes))


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 61, (2, 9), generator=generator)


def biases_of_one_process() -> torch.Tensor:
    model = deepseek()
    router = model.model.layers[1].mlp.gate
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        counts = torch.zeros(8)
        for rank in range(2):
            ids, chosen = batch(step, rank), []
            hook = router.register_forward_hook(lambda _, args, out, to=chosen: to.append(out[2]))
            (model(input_ids=ids, labels=ids).loss / 2).backward()
            hook.remove()
            counts += torch.bincount(chosen[0].view(-1), minlength=8)
        optimizer.step()
        optimizer.zero_grad()
        router.e_score_correction_bias += COEFFICIENT * torch.sign(counts.mean() - counts)
    return router.e_score_correction_bias.clone()


def trained(folder: str) -> Any:
    section = {"enabled": True, "autoep_size": "auto", "load_balance_coeff": COEFFICIENT}
    more: dict[str, Any] = {"expert_parallel": section, "steps_per_print": 1}
    more |= {
        "report_folder": f"{folder}/report",
        "csv_monitor": {"enabled": True, "output_path": folder},
    }
    engine = xds.initialize(deepseek(), config(2, optimizer="SGD", params={"lr": 0.1}, **more))
    for step in range(STEPS):
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    bias = engine.module.model.layers[1].mlp.gate.e_score_correction_bias.clone()
    engine.destroy()
    return bias


def test_biases_move_as_in_one_process_and_a_run_shows_the_tokens(tmp_path: Path) -> None:
    biases = run_ranks(trained, 2, str(tmp_path))
    wanted = biases_of_one_process()
    assert wanted.abs().max() > 0
    for bias in biases:
        torch.testing.assert_close(bias, wanted, rtol=0, atol=1e-6)
    (values,) = tmp_path.rglob("*expert_imbalance.csv")
    assert len(values.read_text().splitlines()) == STEPS + 1
    lines = [json.loads(line) for line in (tmp_path / "report/run.jsonl").read_text().splitlines()]
    line = [line for line in lines if line["kind"] == "experts"][-1]  # one a second
    (layer,) = line["layers"]
    assert sum(layer["counts"]) == 2 * 2 * 9 * 2  # ranks, samples, tokens, choices
    run = read_run(str(tmp_path / "report"))
    assert f"Tokens of experts in step {line['step']}<" in page_of(run, "run", 0.0)


def test_a_router_without_a_bias_is_refused() -> None:
    import pytest
    from test_shared_experts import mixtral

    section = {"enabled": True, "load_balance_coeff": 0.01}
    with pytest.raises(
        xds.UsageError, match="the router of model.layers.0.mlp.experts has no buffer"
    ):
        xds.initialize(mixtral(), config(0, expert_parallel=section))


def test_a_bias_keeps_its_precision_in_16_bits() -> None:
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = torch.nn.Linear(4, 8)
            self.register_buffer("expert_bias", torch.full((8,), 1.001))

    router = Router()
    engine = xds.initialize(router, config(0, "bf16"))
    assert router.expert_bias.dtype == torch.float32 and router.expert_bias[0] == 1.001
    engine.destroy()


def test_after_a_load_of_an_earlier_step_biases_move_as_before(tmp_path: Path) -> None:
    section = {"enabled": True, "load_balance_coeff": COEFFICIENT}
    engine = xds.initialize(
        deepseek(), config(0, optimizer="SGD", params={"lr": 0.1}, expert_parallel=section)
    )
    bias = engine.module.model.layers[1].mlp.gate.e_score_correction_bias

    def steps(first: int, last: int) -> list[torch.Tensor]:
        found = []
        for step in range(first, last):
            ids = batch(step, 0)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            found.append(bias.clone())
        return found

    steps(0, 1)
    engine.save_checkpoint(tmp_path)
    before = steps(1, 4)
    engine(input_ids=(ids := batch(9, 0)), labels=ids)  # tokens of a step that does not come
    engine.load_checkpoint(tmp_path)
    again = steps(1, 4)
    engine.destroy()
    assert all(torch.equal(one, other) for one, other in zip(before, again, strict=True))
    assert not torch.equal(before[0], before[2])
