"""Settings of each GPU, and of torch for GPUs, that cost speed: read without starting CUDA."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

from .line import Line, output

FIELDS = (
    "index",
    "name",
    "compute_cap",
    "persistence_mode",
    "compute_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "power.limit",
    "power.default_limit",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_TF32 = (8, 0)  # the first cards with TF32
# ECC of HBM costs nothing; on other cards it takes memory and bandwidth
_HBM = re.compile(r"\b(P100|V100S?|[AH]30|[AH]100|[AH]800|GH200|H200|H20|G?B[123]00)\b")


def settings() -> Iterator[Line]:
    """The settings of each GPU as nvidia-smi reports them, and torch's; nothing where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return
    cards = parsed(output("nvidia-smi", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader"))
    for card in cards:
        yield from of_card(card)
    try:
        import torch
    except Exception:  # already reported by torch_and_backends
        return
    capabilities = sorted({found for card in cards if (found := _numbers(card["compute_cap"]))})
    if torch.version.cuda and capabilities:
        yield from of_torch(torch, capabilities, torch._C._cuda_getArchFlags() or "")


def parsed(text: str) -> list[dict[str, str]]:
    """A dict for each line of nvidia-smi's table; other lines are left out."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines()]
    return [dict(zip(FIELDS, row, strict=True)) for row in rows if len(row) == len(FIELDS)]


def of_card(card: dict[str, str]) -> Iterator[Line]:
    """The lines of one GPU; a value that the card does not have ("[N/A]") has no line."""
    index = card["index"]
    persistence, compute = card["persistence_mode"], card["compute_mode"]
    remedies = {
        "persistence": (
            persistence,
            "each start initialises the card; `nvidia-smi -pm 1`" * (persistence == "Disabled"),
        ),
        "compute mode": (
            compute,
            f"no second process can use it; `nvidia-smi -i {index} -c DEFAULT`"
            * (compute not in ("Default", "")),
        ),
        "ECC": (card["ecc.mode.current"], _ecc(card)),
        "MIG": (
            card["mig.mode.current"],
            f"a rank gets a part of the card; `nvidia-smi -i {index} -mig 0`"
            * (card["mig.mode.current"] == "Enabled"),
        ),
        "power limit": (card["power.limit"], _power(card)),
        "PCIe lanes": (card["pcie.link.width.current"], _lanes(card)),
    }
    for name, (value, remedy) in remedies.items():
        if value and not value.startswith("["):
            yield Line(f"gpu {index} {name}", value, remedy)


def _ecc(card: dict[str, str]) -> str:
    costs = card["ecc.mode.current"] == "Enabled" and not _HBM.search(card["name"])
    return (
        "takes memory and bandwidth on this card; `nvidia-smi -e 0` if you can do without" * costs
    )


def _power(card: dict[str, str]) -> str:
    limit, usual = _numbers(card["power.limit"]), _numbers(card["power.default_limit"])
    is_low = bool(limit and usual) and limit < usual
    watts = ".".join(map(str, usual[:1]))
    return f"below the card's {watts} W; `nvidia-smi -i {card['index']} -pl {watts}`" * is_low


def _lanes(card: dict[str, str]) -> str:
    now, most = card["pcie.link.width.current"], card["pcie.link.width.max"]
    is_narrow = now.isdecimal() and most.isdecimal() and int(now) < int(most)
    return f"the card has {most}; check the slot, the riser and the BIOS" * is_narrow


def _numbers(text: str) -> tuple[int, ...]:
    """(700, 0) for "700.00 W", (9, 0) for "9.0"; () for "[N/A]"."""
    found = re.match(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else ()


def of_torch(torch: Any, capabilities: Sequence[tuple[int, ...]], flags: str) -> Iterator[Line]:
    """What this torch does on cards of these capabilities. flags: what it is built for, "sm_80 sm_90"."""
    remedies = [remedy for found in capabilities if (remedy := architecture(found, flags.split()))]
    yield Line("torch's kernels", flags or "unknown", "; ".join(remedies))
    if max(capabilities) >= _TF32:
        precision = torch.get_float32_matmul_precision()
        remedy = (
            'for fp32 training call torch.set_float32_matmul_precision("high"), which uses TF32'
        )
        yield Line("fp32 products", precision, remedy * (precision == "highest"))
    is_on = torch.backends.cudnn.benchmark
    remedy = "for convolutions of fixed shapes set torch.backends.cudnn.benchmark = True"
    yield Line("cudnn.benchmark", str(is_on), remedy * (not is_on))


def architecture(capability: tuple[int, ...], built: Sequence[str]) -> str:
    """The remedy if torch has no kernels for a card of `capability`, else "".

    A card runs kernels of its major version up to its minor version. It compiles PTX (compute_*) of older ones.
    """
    major, minor = capability
    versions = [(kind, int(number[:-1]), int(number[-1])) for kind, number in _archs(built)]
    if not versions or any(
        kind == "sm" and here == major and least <= minor for kind, here, least in versions
    ):
        return ""
    if any(kind == "compute" and (here, least) <= (major, minor) for kind, here, least in versions):
        return f"none for sm_{major}{minor}: the first run compiles them; install a newer torch"
    return f"none for sm_{major}{minor}: install a torch that is built for it"


def _archs(built: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name in built:
        if found := re.fullmatch(r"(sm|compute)_(\d{2,})[a-z]?", name):
            yield found[1], found[2]


__all__ = ["architecture", "of_card", "of_torch", "parsed", "settings"]
