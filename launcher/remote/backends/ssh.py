"""ssh, one process for each host. Needs only ssh on both sides, and a key or agent for the login."""

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
    """`ssh HOST 'exec /bin/sh -c ...'`. `XDS_SSH` names another program with the same arguments."""

    name = "ssh"
    remedy = (
        "install OpenSSH's client, or set XDS_SSH to the path of a program with the same arguments"
    )

    @property
    def program(self) -> str:
        """The path in XDS_SSH, or ssh."""
        return os.environ.get("XDS_SSH") or "ssh"

    def command(self, host: Host, remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of ssh. ssh uses the first setting of an option, so the user's come first."""
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
    """Options for ssh: no prompts, timeouts, log only errors, no forwarding, no shared connection."""
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "LogLevel": "ERROR",
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ClearAllForwardings": "yes",
        "ControlMaster": "no",  # a shared connection would keep our streams open
    }
    return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
