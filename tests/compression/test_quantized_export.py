"""Files of 8 and 4 bits through torchao: sizes, and what transformers loads from them."""

from __future__ import annotations

import sys

import pytest
import torch
from helpers import run_ranks

import xds
from xds.launcher.checkpoint import main

HIDDEN = 64


def small(**more):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
        **more,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def saved(folder):
    model = small()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3},
    }
    xds.initialize(model, config).save_checkpoint(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
def test_transformers_loads_what_the_command_writes(tmp_path, capsys, bits):
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    model = small()
    run_ranks(saved, 2, str(tmp_path / "run"))
    model.config.save_pretrained(tmp_path)
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "run"), str(out), "--to", "safetensors", f"--int{bits}"]
    assert main([*command, "--config", str(tmp_path / "config.json")]) == 0
    assert f"14 matrices in int{bits}, 2 whole" in capsys.readouterr().out
    layers = sum(p.numel() for n, p in model.named_parameters() if n.endswith("proj.weight"))
    rows = sum(len(p) for n, p in model.named_parameters() if n.endswith("proj.weight"))
    others = sum(p.numel() for p in model.parameters()) - layers
    packed = layers + 5 * rows if bits == 8 else layers // 2 + layers // 32 * 4
    size = (out / "model.safetensors").stat().st_size
    assert 0 <= size - packed - 4 * others < 20_000  # of names
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    weight, whole = (m.model.layers[1].mlp.up_proj.weight for m in (loaded, model))
    if bits == 8:
        tokens = torch.arange(10).view(1, 10)
        assert (loaded(tokens).logits - model(tokens).logits).abs().max() < 0.02
    else:  # its products need a GPU
        steps = torch.stack([(weight.qdata << 4) >> 4, weight.qdata >> 4], -1).view(whole.shape)
        scale, zero = (
            one.t().float().repeat_interleave(32, 1) for one in (weight.scale, weight.zero_point)
        )
        assert ((steps * scale + zero - whole).abs() <= 0.6 * scale + 2e-3).all()
    assert main(command) == 2 and "exists" in capsys.readouterr().err


def test_wrong_options_and_a_missing_package_are_one_sentence(tmp_path, capsys, monkeypatch):
    state = {"a.weight": torch.ones(4, 32), "a.sparse_pruning_mask": torch.ones(4, 32)}
    with pytest.raises(xds.UsageError, match="a.sparse_pruning_mask is a mask or score"):
        xds.compression.save_quantized(state, tmp_path / "x", 8)
    with pytest.raises(xds.UsageError, match="bits = 2: must be 4 or 8"):
        xds.compression.save_quantized({}, tmp_path / "x", 2)
    with pytest.raises(xds.UsageError, match="give a regular expression"):
        xds.compression.save_quantized({}, tmp_path / "x", 8, keep="(")
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("xds.engine.integrations.optional.find_spec", lambda name: None)
    with pytest.raises(xds.UsageError, match=r'pip install -e "\.\[torchao\]"'):
        xds.compression.save_quantized({}, tmp_path / "x", 8)
    for more in (["--to", "torch", "--int8"], ["--to", "safetensors", "--int4", "--dtype", "bf16"]):
        assert main(["export", str(tmp_path), str(tmp_path / "x"), *more]) == 2
        assert "it writes a folder" in capsys.readouterr().err
    assert main(["export", str(tmp_path), "x", "--to", "torch", "--keep", "a"]) == 2
    assert "they belong to --int8 and --int4" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_state_dicts_with_tied_and_odd_values_are_written_or_refused(tmp_path):
    pytest.importorskip("torchao")
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 40, "n_positions": 16}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    save = xds.compression.save_quantized
    with pytest.raises(xds.UsageError, match="c_attn.weight is .inputs, outputs., as Conv1D"):
        save(model.state_dict(), tmp_path / "x", 8)
    tied = small(tie_word_embeddings=True)
    tied.config.save_pretrained(tmp_path)
    text = save(tied.state_dict(), tmp_path / "tied", 8, config=tmp_path / "config.json")
    assert "14 matrices in int8, 2 whole" in text
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tied")
    tokens = torch.arange(10).view(1, 10)
    assert (loaded(tokens).logits - tied(tokens).logits).abs().max() < 0.02
    odd = {
        "double.weight": torch.ones(32, 32, dtype=torch.float64),
        "empty.weight": torch.ones(0, 32),
        "mask": torch.tensor([-torch.inf]),
        "view.weight": torch.randn(64, 64)[:32, :32],
    }
    assert "1 matrices in int8, 1 whole" in save(odd, tmp_path / "odd", 8)
    for state, says in (
        ({"a.weight": torch.full((4, 4), torch.nan)}, "a.weight has NaN or infinite values"),
        ({"a.weight": torch.ones(4, 4).to_sparse()}, "must be a dense tensor"),
        ({"step": 3}, "must be a dense tensor"),
        (model, "must be a state dict"),
    ):
        with pytest.raises(xds.UsageError, match=says):
            save(state, tmp_path / "x", 8)
    assert not (tmp_path / "x").exists()
