"""Compressed messages over a backend's own collectives, as on NCCL: ranks are threads here."""

from __future__ import annotations

from typing import Any

import pytest
import test_one_bit_adam as one_bit
import test_zeropp as zeropp
import torch
from threaded_ranks import run_threads
from warm_ranks import warm


@pytest.mark.slow
@pytest.mark.parametrize(
    ("zero", "length"),
    [
        ({**zeropp.GRADS, **zeropp.LOCO}, 2),
        pytest.param(zeropp.GRADS, 4, marks=pytest.mark.slow),
        pytest.param({**zeropp.GRADS, **zeropp.WEIGHTS}, 2, marks=pytest.mark.slow),
    ],
)
def test_quantised_messages_have_the_bits_of_gloo(zero: dict[str, Any], length: int) -> None:
    stage = 3 if "zero_quantized_weights" in zero else 2
    args = (stage, zero, length, 4 * 1024, {})
    threads = run_threads(zeropp.train_vector, 4, *args)
    for (found, sent), (want, bytes_) in zip(
        threads, warm(4).run(zeropp.train_vector, *args), strict=True
    ):
        for kind in sent.keys() - {"access"}:  # whose messages differ
            assert sent[kind] == bytes_[kind], kind
        assert all(one.equal(other) for one, other in zip(found, want, strict=True))


def test_one_bit_messages_have_the_bits_of_gloo() -> None:
    threads = run_threads(one_bit.train, 2, 2)
    for (found, sent), (want, bytes_) in zip(threads, warm(2).run(one_bit.train, 2), strict=True):
        assert sent == bytes_
        assert all(one.equal(other) for one, other in zip(found, want, strict=True))
        assert torch.stack(list(found)).isfinite().all()
