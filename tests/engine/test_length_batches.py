"""Batches by length against a plain search for the longest one, and the learning rates of batches."""

import random

import pytest

from xds import UsageError
from xds.engine.data.length_batches import batch_by_seqlens, scale_lr


def longest_groups(lengths, ids, width, max_tokens, least, most):
    """Micro-batches by trying every end of a group; the last end that is valid counts."""
    start, found = 0, []
    while start < len(ids):
        best = start
        for end in range(start + width, len(ids) + 1, width):
            micros = [ids[start + at : end : width] for at in range(width)]
            sizes = {len(micro) for micro in micros}
            tokens = max(sum(lengths[one] for one in micro) for micro in micros)
            if least <= min(sizes) and max(sizes) <= most and tokens <= max_tokens:
                best = end
        if best == start:
            break
        found += [ids[start + at : best : width] for at in range(width)]
        start = best
    return found


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
@pytest.mark.parametrize("same_size", [False, True])
@pytest.mark.quick("True-seqlen", "False-random")
def test_batches_are_those_of_an_exhaustive_search(order, same_size):
    draw = random.Random(f"{order}{same_size}")
    for _ in range(60):
        lengths = [draw.randint(0, 12) for _ in range(draw.randint(30, 90))]
        max_tokens, effective = draw.randint(8, 40), draw.randint(1, 3)
        most, seed = draw.choice([None, 1, 4]), draw.randint(0, 9)
        pairs = list(enumerate(lengths))
        if order == "random":
            random.Random(seed).shuffle(pairs)
        if order == "seqlen":
            pairs.sort(key=lambda pair: (pair[1], pair[0]))
        ids = [at for at, length in pairs if length <= max_tokens]
        width = effective if same_size else 1
        want = longest_groups(lengths, ids, width, max_tokens, 1, most or len(lengths))
        want = want[: len(want) - len(want) % effective]
        found, sizes, longest = batch_by_seqlens(
            *(lengths, max_tokens, None, 1, most, order, effective, same_size),
            seed=seed,
        )
        assert [micro for _, micro in found] == want
        assert [step for step, _ in found] == [at // effective for at in range(len(want))]
        for at, (size, most_tokens) in enumerate(zip(sizes, longest, strict=True)):
            step = [one for micro in want[at * effective : (at + 1) * effective] for one in micro]
            assert (size, most_tokens) == (len(step), max(lengths[one] for one in step))


def test_no_sample_is_lost_but_those_that_fit_nowhere():
    found, sizes, longest = batch_by_seqlens([3, 2, 2, 5, 3, 9, 1, 6, 4], 8)
    assert [micro for _, micro in found] == [
        [0, 1, 2],
        [3, 4],
        [6, 7],
        [8],
    ]  # 9 tokens are too many
    assert (sizes, longest) == ([3, 2, 2, 1], [3, 5, 6, 4])
    # the second sample has no neighbor that fits: the dataset goes on behind it
    found, _, _ = batch_by_seqlens([7, 8, 2, 3, 1, 1], 8, min_batch_size=2)
    assert [micro for _, micro in found] == [[2, 3, 4, 5]]
    found, _, _ = batch_by_seqlens([9, 4, 4, 4], 8, sequence_ids_per_mb=[3, 1])
    assert found == [(0, [3, 1])]


def test_learning_rates_and_wrong_arguments():
    assert [scale_lr(4, 16, 0.5, method) for method in ("linear", "sqrt", "none", None)] == [
        *(2.0, 1.0, 0.5, 0.5)
    ]
    for call, said in (
        (lambda: scale_lr(4, 8, 1, "cubic"), "'cubic'"),
        (lambda: scale_lr(0, 8), "base_batch_size = 0"),
        (lambda: batch_by_seqlens([1], 0), "max_tokens = 0"),
        (lambda: batch_by_seqlens([1], 8, sequence_picking_order="longest"), "'longest'"),
        (lambda: batch_by_seqlens([1] * 9, 8, None, 4, 2), "max_batch_size = 2"),
        (lambda: batch_by_seqlens([1] * 9, 8, effective_batch_size=4), "make only 2 micro-batches"),
    ):
        with pytest.raises(UsageError, match=said):
            call()
