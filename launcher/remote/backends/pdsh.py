"""pdsh: one command that starts an ssh for each host. It returns exit codes, but does not forward input."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from ...job import Host, Remote
from .base import AllAtOnce, check_host_name, shell_line
from .ssh import options


@final
class Pdsh(AllAtOnce):
    """`pdsh -R ssh -w a,b LINE`. The ranks wait for each other, so the fan-out is the number of hosts."""

    name = "pdsh"
    program = "pdsh"
    remedy = "install pdsh, or use --launcher ssh, which needs nothing but ssh"

    def command(self, hosts: Sequence[Host], remote: Remote, argv: Sequence[str]) -> list[str]:
        """The argv of pdsh. It replaces %n by the host's index, and %% by a percent sign."""
        for host in hosts:
            check_host_name(host.name, also=", [ ] ^ / : %")
        line = shell_line(remote, [*argv, "--index", _INDEX_MARK]).replace("%", "%%")
        return [
            *(self.program, "-R", "ssh", "-S", "-N", "-b"),  # -b: the first Ctrl-C ends it
            *("-f", str(len(hosts))),
            *remote.launcher_args,
            *("-w", ",".join(host.name for host in hosts)),
            line.replace(_INDEX_MARK, "%n"),
        ]

    def environment(self, remote: Remote) -> dict[str, str]:
        """The options for ssh, after those of the user."""
        users = os.environ.get("PDSH_SSH_ARGS_APPEND", "").split()
        port = ["-p", str(remote.ssh_port)] if remote.ssh_port else []
        return {"PDSH_SSH_ARGS_APPEND": " ".join([*users, "-T", *port, *options()])}


_INDEX_MARK = "XDSINDEXOFHOST"
