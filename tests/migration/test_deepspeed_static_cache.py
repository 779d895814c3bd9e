"""Tests of `deepspeed.utils.static_cache`: keys and values are written where the script says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from xds.deepspeed.utils.static_cache import DeepSpeedStaticCache, DeepSpeedStaticLayer


def tokens(*rows: float) -> Tensor:
    return torch.tensor([float(row) for row in rows]).view(-1, 1, 1, 1)


def test_each_row_has_a_position_of_its_own_and_tensors_never_move() -> None:
    config = SimpleNamespace(num_hidden_layers=2, num_attention_heads=1, hidden_size=1)
    cache = DeepSpeedStaticCache(config, 3, 4, "cpu", torch.float32)
    position = torch.tensor([1, 3, 0])
    cache.set_write_position(position)
    layer, address = cache.layers[1], cache.layers[1].keys.data_ptr()
    keys, values = cache.update(tokens(2, 4), tokens(20, 40), 1)
    assert keys.flatten(1).tolist() == [[0, 2, 0, 0], [0, 0, 0, 4]] and values.sum() == 60
    assert layer.get_seq_length().tolist() == [2, 4, 1] and int(cache.get_seq_length(1)) == 4
    cache.compact(torch.tensor([1]))
    assert position.tolist() == [3, -1, -1]
    cache.trim_left(2)
    assert layer.keys.flatten(1).tolist() == [[0, 4, 0, 0]] + [[0] * 4] * 2
    assert layer.keys.data_ptr() == address and len(cache) == 2
    layer.reorder_cache(torch.tensor([2, 1, 0]))
    assert layer.keys[2].sum() == 4
    cache.reset()
    assert layer.keys.sum() == 0 and cache.get_mask_sizes(1) == (4, 0)


def test_one_position_is_for_all_rows_and_is_read_at_each_update() -> None:
    layer = DeepSpeedStaticLayer(4)
    assert layer.get_seq_length() == 0
    layer.update(torch.ones(2, 1, 2, 1), torch.ones(2, 1, 2, 1))
    position = torch.tensor(2)
    layer.set_write_position(position)
    layer.update(tokens(5, 6), tokens(5, 6))
    position.fill_(3)
    layer.update(tokens(7, 8), tokens(7, 8))
    assert layer.keys.flatten(1).tolist() == [[1, 1, 5, 7], [1, 1, 6, 8]]
    assert layer.get_seq_length() == 4


def test_positions_that_do_not_fit_are_refused() -> None:
    cache = DeepSpeedStaticCache(SimpleNamespace(num_hidden_layers=1), 2, 4)
    two = tokens(1, 2)
    for position, said in (
        (torch.tensor([1]), "cover the active batch size"),
        (torch.tensor([1, 4]), "within the cache"),
        (torch.tensor([1, -1]), "within the cache"),
    ):
        cache.set_write_position(position)
        with pytest.raises(ValueError, match=said):
            cache.update(two, two, 0)
    with pytest.raises(ValueError, match="one token at a time"):
        cache.update(two[:1].expand(1, 1, 2, 1), two[:1].expand(1, 1, 2, 1), 0)
    with pytest.raises(ValueError, match="integer dtype"):
        cache.set_write_position(torch.tensor(1.0))
    for rows in ([0, 0], [2]):
        with pytest.raises(ValueError, match="different rows from 0 to 1"):
            cache.compact(torch.tensor(rows))
    with pytest.raises(ValueError, match="number of tokens"):
        cache.trim_left(-1)
