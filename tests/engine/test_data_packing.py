"""Packed rows: the same loss and gradients as one sample a row, at any number of ranks, also resumed."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from helpers import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import xds
from xds.engine.config.sections import DataPacking
from xds.engine.data.packing import WINDOW, best_fit, packed_loader
from xds.utils.errors import ConfigError, UsageError

VOCAB, TOKENS = 61, 32


class Samples(Dataset[Any]):
    """Samples of 1 to 24 tokens; the first token of each is its own."""

    def __init__(self, number: int = 300, *, has_lengths: bool = True, longest: int = 24) -> None:
        draw = np.random.default_rng(0)
        self._lengths = draw.integers(1, longest + 1, number)
        if has_lengths:
            self.lengths = self._lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1, VOCAB, (int(self._lengths[index]),), generator=draw)
        return {"input_ids": ids.tolist(), "other": "is not packed"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        samples = Samples()
        return (torch.tensor(samples[index]["input_ids"]) for index in range(len(samples)))


@given(st.lists(st.integers(1, 50), max_size=200), st.integers(50, 64))
def test_rows_hold_each_item_once_and_are_at_most_two_ninths_more_than_needed(
    lengths: list[int], tokens: int
) -> None:
    rows = best_fit(lengths, tokens)
    assert sorted(itertools.chain(*rows)) == list(range(len(lengths)))
    assert all(sum(lengths[one] for one in row) <= tokens for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    # Johnson 1973: 11/9 of the optimum, and 4
    assert len(rows) <= 11 / 9 * -(-sum(lengths) // tokens) * 2 + 4


def test_little_of_a_real_distribution_of_lengths_is_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.0, 10 * WINDOW).astype(int).clip(1, 2048)
    windows = [lengths[at : at + WINDOW] for at in range(0, len(lengths), WINDOW)]
    rows = sum(len(best_fit(window.tolist(), 2048)) for window in windows)
    assert 1 - lengths.sum() / (rows * 2048) < 0.002


def loader(data: Any, rank: int = 0, world_size: int = 1, **changes: Any) -> Any:
    workers = changes.pop("num_workers", 0)
    packing = DataPacking(**{"tokens": TOKENS, "seed": 1, **changes})
    return packed_loader(
        data,
        packing,
        micro_batch_size=8 // world_size // 2,
        rank=rank,
        world_size=world_size,
        step_rows=8,
        num_workers=workers,
    )


def test_a_row_has_whole_samples_with_their_own_positions_and_labels() -> None:
    data = Samples(has_lengths=False)
    seen = []
    for batch in loader(data, cu_seqlens=True):
        assert {value.shape for name, value in batch.items() if name != "cu_seqlens"} == {
            (4, TOKENS)
        }
        bounds = batch["cu_seqlens"].tolist()
        flat = {name: value.reshape(-1) for name, value in batch.items()}
        assert bounds[0] == 0 and bounds[-1] == 4 * TOKENS
        for start, stop in itertools.pairwise(bounds):
            ids, labels = (flat[name][start:stop].tolist() for name in ("input_ids", "labels"))
            assert flat["position_ids"][start:stop].tolist() == list(range(stop - start))
            assert labels == ([-100, *ids[1:]] if ids[0] else [-100] * len(ids))
            if ids[0]:
                seen.append(tuple(ids))
    assert set(seen) == {tuple(data[index]["input_ids"]) for index in range(len(data))}
    assert len(seen) - len(data) < 8 * TOKENS  # the last step is filled up


def test_rows_are_padded_to_a_multiple() -> None:
    widths = {batch["labels"].shape[1] for batch in loader(Samples(longest=3), pad_to=8)}
    assert widths <= {8, 16, 24, 32}
    assert max(batch["labels"].shape[1] for batch in loader(Samples(), pad_to=24)) <= TOKENS
    for one in loader(Samples(number=1), pad_to=1):
        assert one["input_ids"].shape == (4, Samples(number=1).lengths[0])


def steps(
    world_size: int, kind: Any, first: Any = None, last: int | None = None, **how: Any
) -> Any:
    """The rows of each step over all ranks, and the position after them."""
    loaders = [loader(kind(), rank, world_size, **how) for rank in range(world_size)]
    for one in loaders:
        assert first is None or one.resume(first)
    iterators, found = [iter(one) for one in loaders], []
    while last is None or len(found) < last:
        batches = [next(each, None) for each in iterators for _ in range(2)]
        if batches[0] is None:
            break
        found.append(sorted(tuple(row.tolist()) for one in batches for row in one["input_ids"]))
    return found, loaders[0].position()


@pytest.mark.parametrize("kind", [Samples, lambda: Samples(has_lengths=False), Stream])
@pytest.mark.quick("Stream")
def test_steps_are_the_same_at_any_number_of_ranks_and_resumed(kind: Any) -> None:
    whole, end = steps(1, kind)
    assert end == {"epoch": 1, "rows": 0} and len(whole) > 10
    for world_size in (2, 4):
        assert steps(world_size, kind)[0] == whole
    begun, position = steps(4, kind, last=5)
    assert begun + steps(2, kind, position)[0] == whole
    (second, _), (first, _) = steps(1, kind, end, 3), steps(1, kind, last=3)
    assert (second == first) is (kind is Stream)  # shuffled anew, or in the order of the stream
    assert steps(1, kind, num_workers=2)[0] == whole


def test_a_run_that_stopped_at_the_end_of_an_epoch_begins_the_next_one() -> None:
    first = loader(Samples())
    for _ in first:
        position = first.position()
    again = loader(Samples())
    assert again.resume(position) and again.position() == {"epoch": 1, "rows": 0}
    assert len(list(again)) > 1


def test_epochs_after_a_resumed_one_are_whole() -> None:
    whole, resumed = loader(Samples()), loader(Samples())
    first, *later = [len(list(whole)) for _ in range(3)]
    assert resumed.resume({"epoch": 0, "rows": 24})
    assert [len(list(resumed)) for _ in range(3)] == [first - 24 // 4, *later]  # in fours


def test_strided_and_expanded_samples_are_packed_as_their_values() -> None:
    samples = [
        torch.arange(1, 9)[::2],
        torch.ones((), dtype=torch.int64).expand(3),
        np.arange(1, 4),
    ]
    (batch, *_) = loader(samples)
    found = batch["input_ids"][batch["input_ids"] > 0].tolist()
    assert sorted(found)[:10] == sorted([1, 3, 5, 7, 1, 1, 1, 1, 2, 3] * 4)[:10]


def test_a_rank_reads_the_samples_of_its_own_rows_where_lengths_are_known() -> None:
    data = Samples()
    for _ in loader(data, 1, 4):
        pass
    assert len(data.read) < 0.4 * len(data)


def test_what_cannot_be_packed_is_one_sentence() -> None:
    class Uneven(Samples):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"input_ids": [1, 2], "labels": [1]}

    class Wrong(Samples):
        lengths = [1, 2]  # type: ignore[assignment]

    class Shifted(Samples):
        lengths = np.full(300, 3)  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__(has_lengths=False)

    for data, changes, says in (
        (Samples(), {"tokens": 20}, "a sample has 24 tokens; raise tokens"),
        (Samples(has_lengths=False), {"tokens": 20}, "a sample has 2. tokens; raise tokens"),
        (Uneven(has_lengths=False), {}, "different lengths"),
        *(
            ([{"input_ids": value}], {}, "one value for each token")
            for value in (None, 3, "abc", [[1], [2]], torch.ones(2, 3), torch.ones(()))
        ),
        (Samples(has_lengths=False), {"columns": {"ids": 0}}, "no 'ids'"),
        (Wrong(has_lengths=False), {}, "whole number for each of the 300"),
        (Shifted(), {}, "sample [0-9]+ has [0-9]+ tokens, and `lengths` of the dataset says"),
        (iter(()), {}, "training_data is a tuple_iterator without a length"),
        (DataLoader(Samples(), batch_size=None), {}, "training_data is a DataLoader without state"),
        ([], {}, "training_data is empty"),
    ):
        with pytest.raises((UsageError, ConfigError), match=says):
            for _ in loader(data, **changes):
                pass
    assert sum(1 for _ in loader(Samples(), tokens=12, drop_longer=True)) > 1
    for section, says in (
        ({"tokens": 8, "columns": {}}, "name a column"),
        ({"tokens": 8, "columns": {"input_ids": "x"}}, "the value of its padding"),
        ({"tokens": 8, "columns": {"input_ids": float("nan")}}, "a finite number such as 0"),
    ):
        with pytest.raises(ConfigError, match=says):
            xds.Config.load(runs.config(data_packing=section))
    config = runs.config(data_packing={"tokens": 8})

    class Kept:
        def __iter__(self) -> Any:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            return

    with pytest.raises(UsageError, match="data_packing takes the samples of a dataset"):
        xds.initialize(nn.Linear(2, 2), config, training_data=Kept())


# -- models of transformers -----------------------------------------------------------------------------------


SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "llama": {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2},
    "opt": {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "pad_token_id": 0},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},  # no position_ids, but distances
    "rwkv": {"hidden_size": 32, "attention_hidden_size": 32, "context_length": 64},
    "roberta": {"hidden_size": 32, "intermediate_size": 48},
    "bart": {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    },
}
NO_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "hidden_dropout")


def model_of(kind: str, *, has_dropout: bool = False) -> nn.Module:
    """As users build it: its cache is on."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4} | SIZES[kind]
    off = {} if has_dropout else dict.fromkeys(NO_DROPOUT, 0.0)
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, **sizes, **off)
    return AutoModelForCausalLM.from_config(config)


def one_by_one(model: Any, batches: list[dict[str, Tensor]]) -> Tensor:
    """The mean loss over all labels of the samples, one a forward. Leaves its gradients."""
    total, number = torch.zeros(()), 0
    for batch in batches:
        for ids, positions in zip(batch["input_ids"], batch["position_ids"], strict=True):
            starts = [*(positions == 0).nonzero().view(-1).tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                sample = ids[None, start:stop]
                if sample[0, 0] and stop - start > 1:  # not padding
                    loss = loss_of(model(input_ids=sample, labels=sample))
                    total, number = total + loss * (stop - start - 1), number + stop - start - 1
    (total / number).backward()
    return (total / number).detach()


def loss_of(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.loss
    return found


SGD: dict[str, Any] = {
    "optimizer": "SGD",
    "params": {"lr": 0.5},
    "data_packing": {"tokens": TOKENS},
}


def packed(build: Any, stage: int, more: dict[str, Any]) -> None:
    """Two micro-batches by SGD without clipping, against plain torch with one sample a row."""
    config = runs.config(stage, samples=2, accumulation=2, **(SGD | more))
    engine = xds.initialize(build(), config, training_data=Samples(number=40))
    batches = list(itertools.islice(iter(engine.training_dataloader), 2))
    for batch in batches:
        n = (batch["labels"][:, 1:] != -100).sum()
        engine.backward(loss_of(engine(**batch)), weight=n)
        engine.step()
    rows = torch.cat([torch.stack([one["input_ids"], one["position_ids"]]) for one in batches], 1)
    everything = engine.gather_for_metrics(rows.transpose(0, 1).contiguous(), None)
    ids, positions = everything.transpose(0, 1)
    plain = build()
    wanted = one_by_one(plain, [{"input_ids": ids, "position_ids": positions}])
    assert engine.mean_loss() == pytest.approx(wanted.item(), rel=1e-6)
    torch.optim.SGD(plain.parameters(), 0.5).step()
    found = engine.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name
    engine.destroy()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "opt", "bloom"])
@pytest.mark.quick("gpt2", "bloom")
def test_packed_rows_have_the_loss_and_gradients_of_one_sample_a_row(kind: str) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    run_ranks(packed, 2, partial(model_of, kind), 2, {})
    if kind == "llama":
        run_ranks(packed, 4, partial(model_of, kind), 3, {"sequence_parallel_size": 2})
        slices = {"tensor_parallel": {"tp_size": 2}}
        run_ranks(packed, 2, partial(model_of, kind), 1, slices)


# -- the proof that samples are apart -------------------------------------------------------------------------


class Own(nn.Module):
    """A model that a user has written: `masks` its samples from each other, or not."""

    def __init__(
        self, *, masks: bool = True, restarts: bool = True, gates: bool = False, leak: str = ""
    ) -> None:
        super().__init__()
        self._leak = leak
        self.scale = nn.Parameter(torch.zeros(()))
        self._masks, self._restarts = masks, restarts
        self.tokens, self.places = nn.Embedding(VOCAB, 32), nn.Embedding(2 * TOKENS, 32)
        self.states, self.out, self.head = (
            nn.Linear(32, 96),
            nn.Linear(32, 32),
            nn.Linear(32, VOCAB),
        )
        if gates:  # at first no token depends on another
            nn.init.zeros_(self.out.weight)
            nn.init.zeros_(self.out.bias)

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        position_ids: Tensor | None = None,
        kinds: Tensor | None = None,
    ) -> Tensor:
        length = input_ids.shape[1]
        places = torch.arange(length).expand_as(input_ids)
        is_known = position_ids is not None and self._restarts
        x = self.tokens(input_ids) + self.places(position_ids if is_known else places)
        sample = torch.zeros_like(places) if position_ids is None else (position_ids == 0).cumsum(1)
        if kinds is not None:
            x = x + self.places(kinds)
        mask = places[:, :, None] >= places[:, None]
        if self._leak == "boundaries of row 0":
            sample = sample[:1].expand_as(sample)
        elif self._leak == "samples of one token" and position_ids is not None:
            sample = torch.cat([sample[:, :1] * 0, (position_ids.diff() < 0).cumsum(1)], 1)
        elif self._leak == "fifth sample":
            sample = sample.clamp(max=4)
        elif self._leak == "far tokens":
            mask = mask | (places[:, :, None] - places[:, None] > 16)
        if self._masks and self._leak != "far tokens":
            mask = mask & (sample[:, :, None] == sample[:, None])
        query, key, value = self.states(x).chunk(3, 2)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, mask)
        x = x + self.out(attended)
        if self._leak == "another column" and kinds is not None:
            x = x + 0.1 * self.places(kinds).mean(1, keepdim=True)
        if self._leak == "a gate that opens":
            x = x + self.scale * x.mean(1, keepdim=True)
        logits = self.head(x)[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def own_model(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    return Own(**how)


def refusal(build: Any, stage: int, names: list[str], more: dict[str, Any]) -> tuple[int, str]:
    """The steps that were trained, and the sentence that refuses the next one."""
    config = runs.config(stage, samples=2, **(SGD | more))
    engine = xds.initialize(build(), config, training_data=Samples())
    try:
        for step, batch in enumerate(engine.training_dataloader):
            engine.backward(loss_of(engine(**{name: batch[name] for name in names})))
            engine.step()
            if step == 3:
                return step, "trains"
        raise AssertionError
    except UsageError as error:
        return engine.global_steps, str(error)
    finally:
        engine.destroy()


ALL = ["input_ids", "labels", "position_ids"]
SEES = "lets tokens see other samples of their row"


@pytest.mark.parametrize(
    ("build", "names", "steps", "says"),
    [
        (partial(own_model, masks=False), ALL, 0, SEES),
        (own_model, ALL[:2], 0, "pass it position_ids of the batch"),
        (partial(own_model, restarts=False), ALL, 0, "does not let its positions restart"),
        (partial(own_model, masks=False, gates=True), ALL, 1, SEES),
        (partial(model_of, "rwkv"), ALL, 0, f"RwkvForCausalLM {SEES}"),
        (partial(model_of, "bart"), ALL, 0, "BartForCausalLM does not let its positions restart"),
        (
            partial(model_of, "roberta"),
            ALL,
            0,
            "RobertaForCausalLM has positions that do not begin at",
        ),
    ],
)
@pytest.mark.quick(
    "build0-names0-0-lets tokens see other samples of their row",
    "own_model-names1-0-pass it position_ids of the batch",
    "build6-names6-0-RobertaForCausalLM has positions that do not begin at",
)
def test_a_model_whose_samples_are_not_apart_is_refused_on_every_rank(
    build: Any, names: list[str], steps: int, says: str
) -> None:
    for stage in (0, 3):
        for found in run_ranks(refusal, 2, build, stage, names, {}):
            assert found[0] == steps and says in found[1] and "\n" not in found[1]


LEAKS = ("boundaries of row 0", "samples of one token", "fifth sample", "far tokens")


class Kinds(Samples):
    """Each token has a kind as well."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        found = super().__getitem__(index)
        return {**found, "kinds": [one % 7 for one in found["input_ids"]]}


def refused_at(leak: str) -> int:
    """The steps before the model is refused; 40: it trains."""
    packing = {"tokens": 64, "columns": {"input_ids": 0, "labels": -100, "kinds": 0}}
    config = runs.config(samples=2, **(SGD | {"data_packing": packing}))
    engine = xds.initialize(Own(leak=leak), config, training_data=Kinds())
    try:
        for _ in range(40):
            for batch in engine.training_dataloader:
                engine.backward(engine(**batch))
                engine.step()
                if engine.global_steps == 40:
                    return 40
        raise AssertionError
    except UsageError as error:
        assert SEES in str(error)
        return engine.global_steps
    finally:
        engine.destroy()


def test_leaks_of_some_rows_samples_and_columns_are_seen_and_right_columns_train() -> None:
    for leak in (*LEAKS, "another column"):
        assert run_ranks(refused_at, 1, leak) == [0], leak
    assert run_ranks(refused_at, 1, "a gate that opens") == [31]
    assert run_ranks(refused_at, 1, "") == [40]


def test_a_forward_without_position_ids_is_refused_by_name() -> None:
    (found,) = run_ranks(refusal, 1, partial(nn.Linear, 2, 2), 0, ALL, {})
    assert found == (0, found[1]) and "the forward of Linear takes no position_ids" in found[1]


def test_a_model_of_a_user_that_masks_its_samples_trains() -> None:
    run_ranks(packed, 2, own_model, 3, {})
    run_ranks(packed, 2, partial(own_model, gates=True), 0, {})


def proven(has_packing: bool) -> list[Any]:
    """Losses with dropout, buffers that forwards write, and a random number after them."""
    config = runs.config(2, samples=2, **SGD)
    rows = list(itertools.islice(loader(Samples()), 3))
    if not has_packing:
        del config["data_packing"]
    model = nn.ModuleList([model_of("gpt2", has_dropout=True)])
    engine = xds.initialize(model[0], config, training_data=Samples() if has_packing else None)
    torch.manual_seed(5)
    found = []
    for batch in rows:
        more = {} if has_packing else {"use_cache": False}
        loss = engine(**batch, **more).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return [*found, torch.rand(()).item()]


def test_the_proof_changes_no_bit_of_the_training() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    assert run_ranks(proven, 2, True) == run_ranks(proven, 2, False)


def after_an_error(stage: int) -> None:
    """A packed forward that raises leaves no mask for plain forwards of as many tokens."""
    config = runs.config(stage, samples=2, **SGD)
    engine = xds.initialize(model_of("llama"), config, training_data=Samples(number=40))
    batch = next(iter(engine.training_dataloader))

    def fail(*_: Any) -> None:
        raise ArithmeticError

    with torch.no_grad():
        before = engine(input_ids=batch["input_ids"]).logits
        handle = engine.module.model.norm.register_forward_hook(fail)
        with pytest.raises(ArithmeticError):
            engine(**batch)
        handle.remove()
        assert engine(input_ids=batch["input_ids"]).logits.equal(before)
    engine.destroy()


def test_after_an_error_in_a_packed_forward_plain_rows_are_whole_again() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    run_ranks(after_an_error, 1, 0)


def losses_of_train_batch(more: dict[str, Any]) -> list[float]:
    config = runs.config(1, samples=2, accumulation=2, data_packing={"tokens": TOKENS}) | more
    engine = xds.initialize(model_of("llama"), config, training_data=Samples())
    found = [engine.train_batch().item() for _ in range(3)]
    engine.destroy()
    return found


def test_a_pipeline_takes_packed_rows() -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    (wanted,) = run_ranks(losses_of_train_batch, 1, {})
    for found in run_ranks(losses_of_train_batch, 2, {"pipeline": {"stages": 2}}):
        assert found == pytest.approx(wanted, rel=1e-5)


def train(engine: Any, number: int) -> list[float]:
    found = []
    for batch in itertools.islice(iter(engine.training_dataloader), number):
        engine.backward(engine(**batch).loss, weight=(batch["labels"][:, 1:] != -100).sum())
        engine.step()
        found.append(engine.mean_loss())
    return found


def interrupted(folder: Path, accumulation: int, saves: bool) -> list[float]:
    config = runs.config(2, samples=2, accumulation=accumulation, data_packing={"tokens": TOKENS})
    engine = xds.initialize(model_of("gpt2"), config, training_data=Samples())
    if saves:
        found = train(engine, 4 * accumulation)
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
        found = train(engine, 4 * accumulation)
    engine.destroy()
    return found[accumulation - 1 :: accumulation]


def test_a_checkpoint_keeps_the_place_for_another_number_of_ranks(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install -e '.[test]'")
    run_ranks(interrupted, 2, tmp_path / "c", 2, True)
    (two, _) = run_ranks(interrupted, 2, tmp_path / "c", 2, False)
    (one,) = run_ranks(interrupted, 1, tmp_path / "c", 4, False)
    assert one == pytest.approx(two, rel=1e-5)
