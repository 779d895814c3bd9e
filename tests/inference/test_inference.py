"""`xds.init_inference`: outputs are those of transformers, in slices, in few bits and streamed."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import run_new_ranks, run_processes, run_ranks
from small_models import VOCAB, build, greedy, on_meta, prompt
from torch import Tensor, nn

import xds

pytest.importorskip("transformers", reason="pip install -e '.[test]'")
pytest.importorskip("torchao", reason="pip install -e '.[test]'")

FP32 = {"dtype": "fp32"}


def answers(model: Any) -> tuple[Tensor, Tensor]:
    """Logits, and tokens of a greedy generation."""
    with torch.no_grad():
        return model(prompt()).logits.clone(), greedy(model, prompt())


def answers_here(name: str, settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    engine = xds.init_inference(build(name), **settings)
    found = answers(engine)
    assert not any(param.requires_grad for param in engine.parameters())
    engine.destroy()
    return found


def expect_same(found: list[tuple[Tensor, Tensor]], name: str, atol: float = 1e-4) -> None:
    logits, tokens = answers(build(name))
    assert logits.std() > 0.3  # so that a difference of 1e-4 means something
    for own, made in found:
        torch.testing.assert_close(own, logits, atol=atol, rtol=0)
        assert torch.equal(made, tokens)


# a fused projection, heads of keys that are copied, a bias after each sum
@pytest.mark.parametrize(("name", "tp_size"), [("gpt2", 1), ("gpt2", 2), ("llama", 4), ("opt", 2)])
@pytest.mark.quick("gpt2-2", "opt-2")
def test_slices_answer_as_transformers(name: str, tp_size: int) -> None:
    settings = {**FP32, "tensor_parallel": {"tp_size": tp_size}}
    expect_same(run_ranks(answers_here, tp_size, name, settings), name)


def other_kinds() -> list[float]:
    """The largest differences of an encoder and of an encoder with a decoder, cut as their policies say."""
    from transformers import BertConfig, BertForMaskedLM, T5Config, T5ForConditionalGeneration
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.t5.modeling_t5 import T5Block

    sizes = {"hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
    bert = BertConfig(vocab_size=VOCAB, num_attention_heads=4, **sizes)
    t5 = T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=56, num_layers=2, num_heads=4)
    t5.decoder_start_token_id = 0
    rows = ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")
    ids = prompt()
    found = []
    for kind, config, policy, inputs in (
        (BertForMaskedLM, bert, {BertLayer: "output.dense"}, {"input_ids": ids}),
        (T5ForConditionalGeneration, t5, {T5Block: rows}, {"input_ids": ids, "labels": ids}),
    ):
        torch.manual_seed(0)
        model = kind(config).eval()
        with torch.no_grad():
            wanted = model(**inputs).logits
        engine = xds.init_inference(model, mp_size=2, injection_policy=policy, **FP32)
        found.append(float((engine(**inputs).logits - wanted).abs().max()))
        assert any(param.shape[0] == 28 for param in engine.parameters())
    return found


def test_encoders_are_cut_as_their_policies_say() -> None:
    assert max(run_ranks(other_kinds, 2)[1]) < 1e-4


@pytest.mark.parametrize("offload", [None, "cpu", "nvme"])
def test_shards_and_streamed_weights_answer_as_transformers(
    offload: str | None, tmp_path: Path
) -> None:
    zero: dict[str, Any] = {"stage": 3}
    if offload is not None:
        zero["offload_param"] = {"device": offload, "nvme_path": str(tmp_path), "max_in_cpu": 0}
    expect_same(run_ranks(answers_here, 2, "llama", {**FP32, "zero": zero}), "llama")


def test_shards_of_slices_answer_as_transformers() -> None:
    settings = {**FP32, "zero": {"stage": 3}, "mp_size": 2}
    expect_same(run_ranks(answers_here, 4, "opt", settings), "opt")


def sampled(tp_size: int, stage: int) -> Tensor:
    engine = xds.init_inference(build("gpt2"), mp_size=tp_size, zero={"stage": stage}, **FP32)
    torch.manual_seed(torch.distributed.get_rank())  # rank 0's counts
    ids = prompt()
    return engine.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=9
    )


@pytest.mark.parametrize("stage", [0, 3])
def test_slices_draw_what_one_process_draws(stage: int) -> None:
    one, two = run_ranks(sampled, 1, 1, 0)[0], run_ranks(sampled, 2, 2, stage)
    assert torch.equal(one, two[0]) and torch.equal(one, two[1])


def test_16_bits_are_the_default_and_angles_keep_theirs() -> None:
    def here() -> None:
        engine = xds.init_inference(build("llama"))
        assert {param.dtype for param in engine.parameters()} == {torch.float16}
        assert engine.module.model.rotary_emb.inv_freq.dtype == torch.float32
        logits, _ = answers(engine)
        torch.testing.assert_close(logits.float(), answers(build("llama"))[0], atol=3e-2, rtol=1e-2)

    run_ranks(here, 1)


# -- few bits -----------------------------------------------------------------------------------------------


def trained(name: str) -> nn.Module:
    """It has learned to count in steps of 3."""
    model = build(name)
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        ids = counting(torch.randint(0, VOCAB, (16, 1)))
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def counting(first: Tensor) -> Tensor:
    return (first + 3 * torch.arange(12)) % VOCAB


def perplexity(model: Any) -> float:
    ids = counting(torch.arange(VOCAB)[:, None])
    with torch.no_grad():
        return math.exp(float(model(ids, labels=ids).loss))


def perplexity_here(state: dict[str, Tensor], name: str, settings: dict[str, Any]) -> float:
    model = build(name)
    model.load_state_dict(state)
    return perplexity(xds.init_inference(model, **settings))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("gpt2", [(2, {"mp_size": 2})]),
        pytest.param(
            *("llama", [(4, {"mp_size": 4}), (2, {"zero": {"stage": 3}})]), marks=pytest.mark.slow
        ),
    ],
)
def test_int8_keeps_the_perplexity(
    name: str, ranks: list[tuple[int, dict[str, Any]]], tmp_path: Path
) -> None:
    """Within 1 %; and whole, in slices, sharded and streamed alike."""
    model = trained(name)
    plain, state = perplexity(model), model.state_dict()
    assert plain < VOCAB / 4
    nvme = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    whole = run_ranks(perplexity_here, 1, state, name, {"dtype": torch.int8})[0]
    assert whole == pytest.approx(plain, rel=0.01) and whole != plain
    for size, more in ranks:
        found = run_ranks(perplexity_here, size, state, name, {"dtype": "int8", **more})
        assert found == pytest.approx([plain] * size, rel=0.01)
    streamed = {"dtype": "int8", "zero": {"stage": 3, "offload_param": nvme}}
    assert run_ranks(perplexity_here, 1, state, name, streamed)[0] == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(
    "weight",
    [
        {"num_bits": 4},
        {"post_init_quant": {"q_proj": {"num_bits": 4, "group_size": 16}, "fc": {"num_bits": 8}}},
        {"quantized_initialization": {"num_bits": 4, "group_size": 8, "group_dim": 0}},
    ],
)
def test_4_bits_and_groups(weight: dict[str, Any]) -> None:
    def here() -> tuple[float, int]:
        engine = xds.init_inference(build("opt"), quant={"weight": weight}, **FP32)
        bits = [param for name, param in engine.named_parameters() if name.endswith("bits")]
        error = (answers(engine)[0] - answers(build("opt"))[0]).norm()
        return float(error / answers(build("opt"))[0].norm()), len(bits)

    ((error, num_layers),) = run_ranks(here, 1)
    assert 0 < error < 0.2
    assert num_layers == (2 * 3 if "post_init_quant" in weight else 2 * 6)


class Reading(nn.Module):
    """Modules that read the weights of their linear layers, and do not call them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.one, self.plain = nn.Linear(16, 1), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.encoder(x)
        return torch.addmm(self.one(y)[0], y[0], self.plain.weight.t())


@pytest.mark.parametrize("more", [{}, {"zero": {"stage": 3}}, {"mp_size": 2}], ids=str)
def test_weights_in_few_bits_can_be_read(more: dict[str, Any]) -> None:
    def here() -> tuple[float, float]:
        torch.manual_seed(0)
        model, x = Reading().eval(), torch.randn(1, 5, 16)
        with torch.no_grad():
            wanted = model(x)
        engine = xds.init_inference(model, dtype="int8", **more)
        if not more:
            with pytest.raises(RuntimeError, match="inference tensor"):
                engine.plain.weight.mul_(2)
        return float((engine(x) - wanted).norm() / wanted.norm()), float(wanted.std())

    for error, size in run_ranks(here, 2):
        assert 0 < error < 0.05 and size > 0.1


# -- where weights come from --------------------------------------------------------------------------------


def of_checkpoint(name: str, settings: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor]:
    return answers(xds.init_inference(on_meta(name, **changes), **{**FP32, **settings}))


def save_as(kind: str, name: str, folder: Path) -> dict[str, Any]:
    """Weights of `name` in `folder`, and the keys that name them."""
    model = build(name)
    if kind == "folder":
        model.save_pretrained(folder)
        return {"checkpoint": str(folder)}
    names = list(model.state_dict())
    parts = [names[::2], names[1::2]]
    for number, part in enumerate(parts):
        state = {one.removeprefix("model."): model.state_dict()[one] for one in part}
        torch.save({**state, "of.another.model": torch.ones(2)}, folder / f"part{number}.bin")
    files = {"type": "BLOOM", "checkpoints": ["part0.bin", "part1.bin"], "version": 1.0}
    if kind == "dict":
        return {"checkpoint": files, "base_dir": str(folder)}
    (folder / "checkpoints.json").write_text(json.dumps(files))
    return {"checkpoint_config": {"checkpoint_dir": str(folder / "checkpoints.json")}}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("folder", {}),
        ("folder", {"zero": {"stage": 3}}),
        ("dict", {"mp_size": 2}),
        ("json", {"zero": {"stage": 3}}),
    ],
    ids=str,
)
def test_meta_models_read_their_part_of_files(
    kind: str, more: dict[str, Any], tmp_path: Path
) -> None:
    settings = save_as(kind, "llama", tmp_path)
    expect_same(run_ranks(of_checkpoint, 2, "llama", settings | more), "llama")


def save_engine(folder: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 2},
    }
    engine = xds.initialize(build("gpt2"), config)
    engine.save_checkpoint(folder)
    engine.destroy()


def test_checkpoints_of_an_engine_start_inference(tmp_path: Path) -> None:
    run_processes(save_engine, 2, str(tmp_path))
    for more in ({"mp_size": 2}, {"zero": {"stage": 3}}):
        settings = {"checkpoint": str(tmp_path), **more}
        expect_same(run_ranks(of_checkpoint, 2, "gpt2", settings), "gpt2")


def test_saved_weights_start_again_at_another_size(tmp_path: Path) -> None:
    settings = {**FP32, "save_mp_checkpoint_path": str(tmp_path), "mp_size": 2}
    run_ranks(answers_here, 2, "gpt2", settings)
    again = {"checkpoint": str(tmp_path / "ds_inference_config.json")}
    expect_same(run_ranks(of_checkpoint, 1, "gpt2", again), "gpt2")


def test_few_bits_are_made_while_files_are_read(tmp_path: Path) -> None:
    settings = {"quant": {"weight": {"num_bits": 4}}, **save_as("folder", "gpt2", tmp_path)}
    here = run_ranks(answers_here, 1, "gpt2", {**FP32, "quant": settings["quant"]})[0]
    for size, more in ((1, {}), (2, {"zero": {"stage": 3, "offload_param": {"device": "cpu"}}})):
        for found in run_ranks(of_checkpoint, size, "gpt2", settings | more):
            torch.testing.assert_close(found[0], here[0], atol=1e-5, rtol=0)


# -- a model larger than its memory -------------------------------------------------------------------------

LARGE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16}


def anonymous_bytes() -> int:
    """Memory of this process that is no file: pages of mapped files are the system's to drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError


def peak_of_a_run(folder: str, disk: str) -> tuple[int, Tensor]:
    """Bytes that loading and generating took at most beyond those before, and the tokens."""
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": disk, "max_in_cpu": 0},
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
    }
    greedy(
        xds.init_inference(build("llama"), zero=zero, **FP32), prompt(), 2
    )  # what is imported late
    model = on_meta("llama", **LARGE)
    before, peak, is_done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        engine = xds.init_inference(model, checkpoint=folder, zero=zero, **FP32)
        tokens = greedy(engine, prompt(), 3)
    finally:
        is_done.set()
        watcher.join()
    return peak[0], tokens


@pytest.mark.slow
def test_a_model_larger_than_the_memory_it_gets_generates(tmp_path: Path) -> None:
    model = build("llama", **LARGE)
    whole = sum(param.nbytes for param in model.parameters())
    unit = sum(param.nbytes for param in model.model.layers[0].parameters())
    model.save_pretrained(tmp_path / "weights")
    wanted = greedy(model, prompt(), 3)
    ((peak, tokens),) = run_new_ranks(peak_of_a_run, 1, str(tmp_path / "weights"), str(tmp_path))
    assert torch.equal(tokens, wanted)
    print(f"at most {peak / unit:.1f} units of {whole / unit:.1f}")
    assert peak < whole / 2


# -- what is refused ----------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "long prompts": ({"max_tokens": 4}, "max_out_tokens = 4"),
    "long answers": ({"max_out_tokens": 9}, "max_out_tokens = 9"),
    "caches that do not fit": ({"min_out_tokens": 10**12}, "min_out_tokens"),
    "two values": ({"config": {"kernel_inject": True}, "kernel_inject": False}, "kernel_inject"),
    "two sizes": ({"mp_size": 2, "tp": {"tp_size": 4}}, "mp_size"),
    "too few ranks": ({"mp_size": 2}, "1 ranks do not fall"),
    "two sizes of experts": ({"ep_size": 2, "moe": {"ep_size": 4}}, "moe.ep_size is 4"),
    "an unknown key": ({"max_tokns": 3}, "max_tokens"),
    "a dtype": ({"dtype": "fp8"}, "int8"),
    "int8 without quant": ({"dtype": "int8", "quant": {"enabled": False}}, "quant"),
    "bits of no layer": ({"quant": {"weight": {"post_init_quant": {"x9": {}}}}}, "'x9'"),
    "a group that does not divide": (
        {"quant": {"weight": {"quantized_initialization": {"group_size": 7}}}},
        "groups of 7",
    ),
    "an odd number of inputs": (
        {"mp_size": 1, "quant": {"weight": {"num_bits": 4}}},
        "share a byte",
    ),
    "a list": ({"config": "[1]"}, "must be an object"),
    "a stage": ({"zero": {"stage": 4}}, "init_inference: zero.stage = 4"),
    "limits the wrong way round": ({"max_tokens": 4, "min_tokens": 8}, "min_out_tokens = 8"),
    "a policy that is a list": ({"injection_policy": [1]}, "injection_policy = [1]"),
    "a plan and a policy": (
        {"tp": {"plan": {"a": "colwise"}}, "injection_policy": {nn.Linear: "a"}},
        "leave one of them out",
    ),
    "an mpu that is none": ({"mpu": 3}, "get_model_parallel_group"),
    "a group that is none": ({"tp": {"tp_group": "x"}}, "tensor_parallel.tp_group"),
    "graphs of slices": ({"enable_cuda_graph": True, "mp_size": 2}, "enable_cuda_graph"),
    "a missing folder": ({"checkpoint": "/nowhere"}, "/nowhere"),
    "slices of Megatron": (
        {"checkpoint": {"type": "Megatron", "checkpoints": ["a", "b"]}},
        "slices of several ranks",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    settings, words = REFUSED[case]

    def here() -> None:
        with pytest.raises(xds.XdsError) as caught:
            changes = {"n_inner": 35} if "odd" in case else {}
            engine = xds.init_inference(build("gpt2", **changes), **settings)
            greedy(engine, prompt())
        assert words in str(caught.value)

    run_ranks(here, 1)


def test_lengths_that_are_not_given_count() -> None:
    def here() -> None:
        engine = xds.init_inference(build("llama"), max_out_tokens=24, **FP32)
        embeds = engine.get_input_embeddings()(prompt())
        for inputs in ({"inputs": prompt()}, {"inputs_embeds": embeds, "max_new_tokens": 20}):
            with pytest.raises(xds.UsageError, match="has 5 tokens, with new ones 25"):
                engine.generate(**inputs)
        draft = xds.init_inference(build("llama", seed=2), **FP32)  # names with "_" are looked up
        wanted = greedy(build("llama"), prompt(1))
        assert torch.equal(greedy(engine, prompt(1), assistant_model=draft), wanted)

    run_ranks(here, 1)


def test_a_model_on_meta_needs_a_checkpoint(tmp_path: Path) -> None:
    other = tmp_path / "other.pt"
    torch.save({"transformer.wte.weight": torch.ones(VOCAB, 32)}, other)

    def here() -> None:
        with pytest.raises(xds.UsageError, match="checkpoint"):
            xds.init_inference(on_meta("gpt2"))
        with pytest.raises(xds.UsageError, match="missing.*; let checkpoint name all weights"):
            xds.init_inference(on_meta("gpt2"), checkpoint=other)

    run_ranks(here, 1)


def test_ranks_with_other_weights_are_told() -> None:
    def here() -> None:
        model = build("gpt2", seed=torch.distributed.get_rank())
        with pytest.raises(xds.UsageError, match="other weights"):
            xds.init_inference(model, mp_size=2)

    run_ranks(here, 2)


def test_models_in_another_form_are_told() -> None:
    def here() -> None:
        model = build("gpt2")
        config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}}
        engine = xds.initialize(model, config)
        with pytest.raises(xds.UsageError, match="belongs to an engine"):
            xds.init_inference(model)
        engine.destroy()
        answers(xds.init_inference(model, **FP32))
        with pytest.raises(xds.UsageError, match="PipelineModule"):
            xds.init_inference(xds.pipe.PipelineModule([nn.Linear(2, 2)], num_stages=1))

    run_ranks(here, 1)


def init_in_shards(quant: bool) -> str:
    with xds.zero.Init():
        model = build("gpt2")
    settings = {"dtype": "int8", "zero": {"stage": 3}} if quant else {}
    with pytest.raises(xds.UsageError) as caught:
        xds.init_inference(model, **settings)
    return str(caught.value)


def test_models_in_shards_need_stage_3() -> None:
    assert "stage" in run_processes(init_in_shards, 2, False)[0]
    assert "meta device" in run_processes(init_in_shards, 2, True)[0]


# -- injection_policy ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """An MLP with a side way, which a wrong policy would sum twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.side = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.side(x)


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def test_injection_policies_name_the_rows() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    policy = {GPT2Block: ("attn.c_proj", "mlp.c_proj")}
    expect_same(
        run_ranks(answers_here, 2, "gpt2", {**FP32, "mp_size": 2, "injection_policy": policy}),
        "gpt2",
    )

    def policies() -> None:
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        with pytest.raises(xds.UsageError, match="nothing_like_it"):
            xds.init_inference(blocks(), mp_size=2, injection_policy={Block: "nothing_like_it"})
        engine = xds.init_inference(
            blocks(), mp_size=2, injection_policy={Block: ("down",)}, **FP32
        )
        torch.testing.assert_close(engine(x), blocks()(x))
        for kind, names in ((Block, (".down",)), (nn.Sequential, ("0.down", "1.down"))):
            policy = {kind: names}
            engine = xds.init_inference(blocks(), mp_size=2, injection_policy=policy, **FP32)
            torch.testing.assert_close(engine(x), blocks()(x))
        plan = {"tp_size": 2, "plan": {"1.up": "colwise", "1.down": "rowwise"}}
        engine = xds.init_inference(blocks(), tp=plan, **FP32)
        torch.testing.assert_close(engine(x), blocks()(x))
        assert engine.module[1].up.weight.shape == (8, 8) != engine.module[0].up.weight.shape
        engine = xds.init_inference(blocks(), mp_size=2, injection_policy={Block: "side"}, **FP32)
        with pytest.raises(xds.UsageError, match="slices"):
            engine(x)

    run_ranks(policies, 2)


# -- the engine ---------------------------------------------------------------------------------------------


def test_names_of_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    def here() -> None:
        engine = xds.init_inference(
            build("gpt2"), {"dtype": "fp32", "enable_cuda_graph": True}, use_triton=True
        )
        assert engine.config.model_type == "gpt2" and not engine.training
        with pytest.raises(xds.UsageError, match="profile_model_time"):
            engine.model_times()
        engine.profile_model_time()
        wanted = engine(prompt()).logits
        assert len(engine.model_times()) == 1 and engine.model_times() == []
        engine.compile(backend="eager")
        assert engine.is_compiled and torch.equal(engine(prompt()).logits, wanted)
        with pytest.raises(xds.UsageError, match="only infers"):
            engine.train()
        engine.destroy()
        engine.destroy()
        with pytest.raises(xds.UsageError, match="destroyed"):
            engine(prompt())

    with caplog.at_level("INFO", "xds"):
        run_ranks(here, 1)
    assert "enable_cuda_graph: there is no GPU" in caplog.text
    assert "use_triton has no effect" in caplog.text
