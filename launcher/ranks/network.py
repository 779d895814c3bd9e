"""Addresses of this host: free ports, and the network interface on the route to another host."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

_SIOCGIFADDR = 0x8915  # from linux/sockios.h


def free_port() -> int:
    """A port that is currently free on every address."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
    return port


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; port 0 if none is given."""
    host, colon, port = endpoint.rpartition(":")
    if not colon or not port.isdigit() or (":" in host and not host.startswith("[")):
        return endpoint.strip("[]"), 0
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    """ "host:port", with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def address_towards(host: str) -> str:
    """This host's own address on the route to `host`; "" if there is none. Sends nothing."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.connect(address)
                return str(probe.getsockname()[0])
    return ""


def is_loopback(host: str) -> bool:
    """Whether `host` is "localhost" or a loopback address. Other names are not resolved."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interface_towards(endpoint: str) -> str:
    """The name of the network interface on the route to "host:port"; "" if it is unknown."""
    own = address_towards(split_endpoint(endpoint)[0])
    if not own:
        return ""
    if is_loopback(own):
        return _named_loopback()
    return next((name for _, name in socket.if_nameindex() if _ipv4(name) == own), "")


def _ipv4(interface: str) -> str:
    """The IPv4 address of a network interface on Linux; "" if it has none."""
    request = struct.pack("256s", os.fsencode(interface)[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    return ""


def _named_loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), "")
