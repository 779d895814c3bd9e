"""Plain ssh, one for each host: needs nothing but ssh on both ends, and a key or agent that lets in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from ...job import Host, Remote
from .base import PerHost, check_host_name, shell_line

CONNECT_SECONDS = 10
ALIVE_SECONDS = 5
ALIVE_COUNT = 3


@final
class Ssh(PerHost):
    """`ssh HOST 'exec /bin/sh -c ...'`; `XDS_SSH` names another program that is called as ssh is."""

    name = "ssh"
    remedy = (
        "install OpenSSH's client, or set XDS_SSH to the path of a program that is called like ssh"
    )

    @property
    def program(self) -> str:
        """The path in XDS_SSH, or ssh."""
        return os.environ.get("XDS_SSH") or "ssh"

    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of ssh; of two settings of one option ssh takes the first, so the user's come first."""
        check_host_name(host.name)
        return [
            self.program,
            *remote.launcher_args,
            "-T",
            *(["-p", str(remote.ssh_port)] if remote.ssh_port else []),
            *options(),
            "--",
            host.name,
            shell_line(remote, argv),
        ]


def options() -> list[str]:
    """Never ask, never hang, say only errors, forward nothing, and stay no longer than the command."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "LogLevel": "ERROR",
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",  # a connection kept for others holds our streams open
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
