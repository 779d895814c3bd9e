"""Numbers as text: 3 digits and a prefix, as DeepSpeed's profiler writes them."""

from __future__ import annotations

PRECISION = 2  # decimals

_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float, units: str | None = None, precision: int = PRECISION) -> str:
    """`num` in `units`: T, G, M, K, "", m or u; None chooses. Another unit is written, and nothing divided.

    >>> number_to_string(1234567), number_to_string(1234567, "K", 0), number_to_string(0)
    ('1.23 M', '1235 K', '0 ')
    """
    if units is None:
        fits = (prefix for prefix, size in _PREFIXES.items() if num >= size)
        units = "" if num == 0 else next(fits, "u")
    return f"{round(num / _PREFIXES.get(units, 1.0), precision):g} {units}"


def macs_to_string(macs: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Multiply-accumulates."""
    return f"{number_to_string(macs, units, precision)}MACs"


def flops_to_string(flops: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Floating-point operations in a second."""
    return f"{number_to_string(flops, units, precision)}FLOPS"


def bytes_to_string(b: float, units: str | None = None, precision: int = PRECISION) -> str:
    """Bytes, in powers of 1000."""
    return f"{number_to_string(b, units, precision)}B"


def params_to_string(
    params_num: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """Parameters, with B for 10^9.

    >>> params_to_string(1.5e9), params_to_string(110)
    ('1.5 B', '110')
    """
    units = units.replace("B", "G") if units else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(
    duration: float, units: str | None = None, precision: int = PRECISION
) -> str:
    """Seconds.

    >>> duration_to_string(0.0123)
    '12.3 ms'
    """
    return f"{number_to_string(duration, units, precision)}s"


__all__ = [
    "PRECISION",
    "bytes_to_string",
    "duration_to_string",
    "flops_to_string",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
]
