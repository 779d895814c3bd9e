"""The three batch sizes of a config: samples of a step, samples of a forward, forwards of a step."""

from __future__ import annotations

from ...utils.errors import UsageError

AUTO = "auto"


def fill(batch: object, micro_batch: object, steps: object, ranks: int) -> dict[str, int]:
    """The three sizes by the config's names, each worked out from the others where it is not given.

    A size that is "auto" counts as not given.

    Raises:
        UsageError: only the steps are given, or batch = micro_batch * steps * ranks does not hold.
    """
    whole, part, number = (
        None if one == AUTO else _number(one) for one in (batch, micro_batch, steps)
    )
    if whole is None and part is None:
        is_auto = AUTO in (batch, micro_batch)
        why = 'a batch size is "auto", which only a trainer fills in; ' if is_auto else ""
        raise UsageError(
            f"{why}give train_batch_size or train_micro_batch_size_per_gpu a number; the other sizes follow "
            "from it"
        )
    if whole is None:
        assert part is not None
        number = 1 if number is None else number
        whole = part * number * ranks
    elif part is None:
        number = 1 if number is None else number
        part = whole // ranks // number if number > 0 else 0
    elif number is None:
        number = whole // part // ranks if part > 0 else 0
    if min(whole, part, number) < 1 or whole != part * number * ranks:
        raise UsageError(
            f"train_batch_size {whole} must be train_micro_batch_size_per_gpu {part} * "
            f"gradient_accumulation_steps {number} * {ranks} ranks, all positive; change one of them"
        )
    return {
        "train_batch_size": whole,
        "train_micro_batch_size_per_gpu": part,
        "gradient_accumulation_steps": number,
    }


def _number(value: object) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise UsageError(f"batch size {value!r}: must be a whole number")


__all__ = ["fill"]
