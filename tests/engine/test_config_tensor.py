"""Tests of the section tensor_parallel: what it accepts, the data ranks that it leaves, and each refusal."""

import pytest

import xds
from xds.engine.config.config import parse_config

SMALL = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW"}}


def read(section, world_size=None, **others):
    return parse_config({**SMALL, "tensor_parallel": section, **others}, world_size=world_size)


@pytest.mark.parametrize(
    ("section", "size"),
    [({}, 1), ({"tp_size": 2}, 2), ({"autotp_size": 4}, 4), ({"autotp_size": 0}, 1)],
)
def test_both_names_of_the_size_are_read(section, size):
    assert read(section).tensor_parallel.size == size


def test_data_ranks_are_what_stages_and_tensor_ranks_leave():
    config = read({"tp_size": 2}, 12, pipeline={"stages": 3}, gradient_accumulation_steps=4)
    assert (config.model_ranks, config.data_parallel_ranks, config.train_batch_size) == (6, 2, 16)


@pytest.mark.parametrize(
    ("section", "others", "message"),
    [
        ({"tp_size": 2, "autotp_size": 2}, {}, "sets the same option"),
        ({"tp": {"tp_size": 2}}, {}, "write the number of ranks as tensor_parallel.tp_size"),
        ({"tp_size": 2}, {"optimizer": {"type": "Lamb"}}, "cuts them"),
        ({"tp_size": 2}, {"optimizer": {"type": "Muon"}}, "cuts them"),
    ],
)
def test_what_does_not_fit_is_refused(section, others, message):
    with pytest.raises(xds.ConfigError) as caught:
        read(section, **others)
    assert any(message in text for text in caught.value.complaints)


def test_a_wrong_product_is_shown():
    with pytest.raises(xds.ConfigError, match=r"tensor_parallel.tp_size \(2\) x data = 3 ranks"):
        read({"tp_size": 2}, 3)
