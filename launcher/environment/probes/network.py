"""The communication hardware of this machine: network interfaces, InfiniBand or RoCE, NVLink, GPUDirect."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from .line import Line, output

_NET = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")
_SLOW_MBIT = 1000
_SIOCGIFADDR = 0x8915
_MODULES = ("nvidia_peermem", "nv_peer_mem", "gdrdrv")


def interfaces() -> Iterator[Line]:
    """Each interface that is up, with its speed and address. gloo, and NCCL over sockets, use one of them."""
    up = [path for path in sorted(_NET.iterdir()) if path.name != "lo" and _is_up(path)]
    if not up:
        yield Line("network", "no interface is up", "ranks on other machines cannot be reached")
    for path in up:
        megabits = _number(path / "speed")
        speed = f"{megabits / 1000:g} Gbit/s" if megabits > 0 else "speed not reported"
        remedy = "slow; set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to a faster one"
        is_slow = 0 < megabits < _SLOW_MBIT
        mtu = _number(path / "mtu")
        yield Line(f"network {path.name}", f"{speed}, MTU {mtu}", remedy * is_slow)
        yield Line(f"address of {path.name}", ipv4(path.name) or "no IPv4", varies=True)


def own_name() -> Iterator[Line]:
    """The addresses of this machine's own name. Without GLOO_SOCKET_IFNAME gloo publishes that address."""
    host = socket.gethostname()
    try:
        found = sorted({str(one[4][0]) for one in socket.getaddrinfo(host, None)})
    except OSError as error:
        remedy = "add it to /etc/hosts, or set GLOO_SOCKET_IFNAME"
        yield Line("own name resolves to", f"nothing, {error}", remedy, varies=True)
        return
    # the loopback address is correct here: xds sets GLOO_SOCKET_IFNAME for the ranks
    yield Line("own name resolves to", ", ".join(found), varies=True)


def _is_up(path: Path) -> bool:
    return _text(path / "operstate") in ("up", "unknown")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:  # reading the speed of a link that is down fails
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else 0


def ipv4(interface: str) -> str:
    """The IPv4 address of a network interface on Linux; "" if it has none."""
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(reply[20:24])


def infiniband() -> Iterator[Line]:
    """Each port of each InfiniBand or RoCE adapter: state, rate, kind."""
    ports = sorted(_INFINIBAND.glob("*/ports/*")) if _INFINIBAND.is_dir() else []
    if not ports:
        yield Line("infiniband", "none")
    for port in ports:
        adapter = port.parent.parent.name
        kind = {"Ethernet": "RoCE"}.get(_text(port / "link_layer"), _text(port / "link_layer"))
        state = _text(port / "state").partition(":")[2].strip() or "state unknown"
        rate = _text(port / "rate") or "rate unknown"
        remedy = "the port is not active; check the cable and `ibstat`" * (state != "ACTIVE")
        yield Line(f"infiniband {adapter}:{port.name}", f"{kind}, {state}, {rate}", remedy)
    if ports and not os.path.exists("/dev/infiniband"):
        remedy = "start the container with --device=/dev/infiniband; without it NCCL uses sockets"
        yield Line("/dev/infiniband", "missing", remedy)


def nvlink() -> Iterator[Line]:
    """The NVLinks of each GPU as reported by nvidia-smi, and the kernel modules that GPUDirect needs."""
    if shutil.which("nvidia-smi") is None:
        return
    speeds_by_gpu = nvlinks(output("nvidia-smi", "nvlink", "--status"))
    if not speeds_by_gpu:
        yield Line("nvlink", "none")
    for gpu, speeds in speeds_by_gpu.items():
        total = sum(speeds)
        value = f"{len(speeds)} links, {total:g} GB/s in each direction"
        yield Line(f"nvlink of gpu {gpu}", value)
    modules = _text(Path("/proc/modules"))
    loaded = [module for module in _MODULES if re.search(rf"(?m)^{module}\b", modules)]
    needed = _INFINIBAND.is_dir() and not loaded
    remedy = "`modprobe nvidia-peermem` on the host: without it messages go through host memory"
    yield Line("gpudirect", ", ".join(loaded) or "no module loaded", remedy * needed)


def nvlinks(text: str) -> dict[str, list[float]]:
    """GB/s of each active link, by GPU, from `nvidia-smi nvlink --status`."""
    found: dict[str, list[float]] = {}
    gpu = ""
    for line in text.splitlines():
        if heading := re.match(r"GPU (\d+):", line):
            gpu = heading[1]
        elif gpu and (link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line)):
            found.setdefault(gpu, []).append(float(link[1]))
    return found
