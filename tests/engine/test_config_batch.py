"""The three batch sizes, as a table: what is given, how many ranks, what comes out."""

import pytest

import xds
from xds.engine.config.batch import solve_batch
from xds.engine.config.config import parse_config

#  train, micro, steps, ranks -> train, micro, steps
SOLVED = [
    ((32, 4, 4, 2), (32, 4, 4)),
    ((32, 4, 0, 2), (32, 4, 4)),
    ((32, 0, 4, 2), (32, 4, 4)),
    ((0, 4, 4, 2), (32, 4, 4)),
    ((32, 0, 0, 2), (32, 16, 1)),
    ((0, 4, 0, 2), (8, 4, 1)),
    ((1, 0, 0, 1), (1, 1, 1)),
    ((32768, 16, 0, 64), (32768, 16, 32)),
]


@pytest.mark.parametrize(("given", "wanted"), SOLVED)
def test_solved(given, wanted):
    assert solve_batch(*given) == (wanted, [])


#  train, micro, steps, ranks -> what the one complaint says
REFUSED = [
    (
        (32, 4, 3, 2),
        "train_batch_size = 32: must equal train_micro_batch_size_per_gpu (4) x "
        "gradient_accumulation_steps (3) x world size (2) = 24; remove one of the three keys or "
        "set train_batch_size to 24",
    ),
    (
        (32, 5, 0, 2),
        "train_batch_size = 32: must be a multiple of train_micro_batch_size_per_gpu (5) x world "
        "size (2) = 10; set train_batch_size to 30 or 40, or change train_micro_batch_size_per_gpu "
        "or the number of ranks",
    ),
    (
        (32, 0, 3, 2),
        "train_batch_size = 32: must be a multiple of gradient_accumulation_steps (3) x world size "
        "(2) = 6; set train_batch_size to 30 or 36, or change the number of ranks",
    ),
    (
        (2, 0, 0, 4),
        "train_batch_size = 2: must be a multiple of the world size (4); set train_batch_size to "
        "4, or change the number of ranks",
    ),
    (
        (0, 0, 4, 2),
        "train_batch_size: no batch size is given (gradient_accumulation_steps = 4 alone is not "
        "enough); write train_batch_size (samples per step over all ranks) or "
        "train_micro_batch_size_per_gpu (samples per rank and forward)",
    ),
    (
        (0, 0, 0, 2),
        "train_batch_size: no batch size is given; write train_batch_size (samples per step over all "
        "ranks) or train_micro_batch_size_per_gpu (samples per rank and forward)",
    ),
]


@pytest.mark.parametrize(("given", "complaint"), REFUSED)
def test_refused(given, complaint):
    assert solve_batch(*given)[1] == [complaint]


def test_the_config_raises_the_complaint():
    config = parse_config({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 5})
    with pytest.raises(xds.ConfigError, match="30 or 40"):
        config.resolve(2)
    with pytest.raises(xds.ConfigError, match="world size = 0"):
        config.resolve(0)
