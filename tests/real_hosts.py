"""Test helper: hosts made of namespaces, each with its own address, name, pids, /dev/shm and a real sshd.

    with Hosts(2) as hosts:
        hosts.run(["xds", "--hostfile", str(hosts.hostfile(slots=[2, 1])), "train.py"])

A bridge in a separate namespace connects them; there is no route out of it. Every namespace ends with the
process that made it, even with SIGKILL: its first process reads a pipe which that process holds open.
The head's ssh finds keys and known hosts through its own /etc/ssh/ssh_config.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xds.ops.build.build_cache import default_folder

HEAD = "head"
NOWHERE = "nowhere"  # resolves to an unused address
# A link that was idle sends so many bytes at once. Packets are cut to this size before they are counted.
_BURST_BYTES = 16 * 1024
_QUEUE_BYTES = 1 << 20  # packets beyond are dropped
_END_SECONDS = 10.0
_PREFIX = "xds-hosts-"
_SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/sbin:/usr/bin")
_TOOLS = ("ip", "unshare", "nsenter", "mount", "env", "bash")
_SSH_TOOLS = ("ssh", "ssh-keygen")

# The first process of a host. It also adopts and reaps what loses its parent there.
_BEGIN = """
set -e
mount -t tmpfs -o size=2g,mode=1777 none /dev/shm
mount --bind {folder}/hosts /etc/hosts
echo {name} > /proc/sys/kernel/hostname
ip link set lo up
echo made
read -r
"""
_SERVE = """
mount -t tmpfs none /run
mkdir -m 755 /run/sshd
mount --bind {folder}/shadow /etc/shadow
{sshd} -f {own}/sshd_config -E {own}/sshd.log
for try in {{1..400}}; do  # it listens only once it has gone to the background
    (exec 3<>/dev/tcp/127.0.0.1/22) 2> /dev/null && break
    sleep 0.05
done
"""
_REACH = "mount --bind {folder}/ssh_config /etc/ssh/ssh_config\n"
_STAY = "echo ready\nread -r || :\n"

_SSHD_CONFIG = """\
Port 22
HostKey {own}/host_key
AuthorizedKeysFile {own}/authorized_keys
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
UseDNS no
SetEnv TMPDIR={own}/tmp XDG_CACHE_HOME={own}/cache
"""
_SSH_CONFIG = """\
Host *
    User {user}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    GlobalKnownHostsFile /dev/null
    LogLevel ERROR
"""


@functools.cache
def why_not(needs_ssh: bool = True) -> str:
    """Why there can be no such hosts here; "" where there can. needs_ssh: as `has_ssh` of Hosts."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "making hosts takes root"
    tools = (*_TOOLS, *_SSH_TOOLS) if needs_ssh else _TOOLS
    missing = [tool for tool in tools if shutil.which(tool) is None]
    missing += [] if _SSHD or not needs_ssh else ["sshd (Debian: openssh-server)"]
    if missing:
        return f"not installed: {', '.join(missing)}"
    trial = (
        "mount -t tmpfs none /mnt && mount --bind /etc/hostname /etc/hosts"
        " && echo trial > /proc/sys/kernel/hostname && ip link set lo up"
        " && ip link add bridge0 type bridge && ip link add port0 type veth peer name port1"
    )
    made = subprocess.run(
        [*_unshare(True), "bash", "-ec", trial], stdin=subprocess.DEVNULL, capture_output=True
    )
    return f"namespaces: {made.stderr.decode().strip()}" if made.returncode else ""


def _unshare(has_pids: bool) -> list[str]:
    words = ["unshare", "--net", "--uts", "--mount"]
    return [*words, "--pid", "--fork", "--kill-child", "--mount-proc"] if has_pids else words


class Links:
    """The links of `places`, the first of which is the head. Each place has a name and an address."""

    def __init__(self, places: Sequence[str]) -> None:
        self._places = list(places)
        self._subnet = f"10.{random.randrange(64, 250)}.{random.randrange(250)}"
        self._first: dict[str, subprocess.Popen[str]] = {}  # each namespace's first process

    def address(self, place: str) -> str:
        """The IPv4 address of a host, of the head, or of NOWHERE."""
        number = 250 if place == NOWHERE else 10 + self._places.index(place)
        return f"{self._subnet}.{number}"

    def cut(self, place: str) -> None:
        """Cut the link of `place` to the others."""
        self._switch(f"link set {self._port(place)} down")

    def mend(self, place: str) -> None:
        """Undo `cut`."""
        self._switch(f"link set {self._port(place)} up")

    def limit(self, place: str, megabits: float) -> str:
        """Let `place` send and receive `megabits` per second at most; why that cannot be, "" when it is done.

        The headers of packets count: of 100 Mb/s, 11.9 MB/s are left for what is sent.
        """
        if shutil.which("tc") is None:
            return "not installed: tc"
        rate = f"tbf rate {megabits}mbit burst {_BURST_BYTES} limit {_QUEUE_BYTES}"
        for where, device in ((place, "eth0"), ("switch", self._port(place))):
            self._tc(where, "del", device)  # there may be none
            reason = self._tc(where, "add", device, f"root handle 1: {rate}")
            if reason:
                return f"tc tbf: {reason}"
        return ""

    def _tc(self, place: str, verb: str, device: str, words: str = "root") -> str:
        enter = ["nsenter", "-t", str(self._first[place].pid), "-n"]
        asked = [*enter, "tc", "qdisc", verb, "dev", device, *words.split()]
        done = subprocess.run(asked, capture_output=True, text=True)
        return done.stderr.strip() if done.returncode else ""

    def _port(self, place: str) -> str:
        return f"port{self._places.index(place)}"

    def _switch(self, *lines: str) -> None:
        self._ip("switch", *lines)

    def _ip(self, place: str, *lines: str) -> None:
        words = ["nsenter", "-t", str(self._first[place].pid), "-n", "ip", "-batch", "-"]
        text = "\n".join(lines) + "\n"
        done = subprocess.run(words, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ip in {place}: {done.stderr.strip()}")


class Hosts(Links):
    """`count` hosts named host0, host1, ..., and a head that reaches them by ssh, as a context.

    Each host has folders of its own for temporary files and caches (TMPDIR, XDG_CACHE_HOME), and its own
    process ids. All share the file system otherwise, as a cluster shares its home. The libraries that xds has
    built here are in these caches at first, so that no test waits for a compiler.
    """

    def __init__(self, count: int, *, has_ssh: bool = True) -> None:
        """has_ssh: each host has an sshd; without, `popen` and `run` still start processes on it."""
        self.names = [f"host{number}" for number in range(count)]
        super().__init__([HEAD, *self.names])
        self._has_ssh = has_ssh
        self._begun: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Hosts:
        reason = why_not(self._has_ssh)
        if reason:
            raise RuntimeError(reason)
        _remove_stale_folders()
        self.folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.folder.chmod(0o755)
        try:
            self._write_files()
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._begun:
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
        for name in [name for name in self._places if name in self._first]:
            for pid in self.processes(name):
                _kill(pid, signal.SIGKILL)
        for first in self._first.values():
            assert first.stdin is not None and first.stdout is not None
            with contextlib.suppress(OSError):
                first.stdin.close()
            try:
                first.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                first.kill()
                first.wait()
            first.stdout.close()
        for process in self._begun:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- what runs where ---------------------------------------------------------------------------------

    def hostfile(
        self,
        slots: int | Sequence[int] = 1,
        names: Sequence[str] | None = None,
        file: str = "hosts",
    ) -> Path:
        """Write a hostfile of `names` (default: every host) with their slots; its path."""
        names = self.names if names is None else names
        each = [slots] * len(names) if isinstance(slots, int) else slots
        path = self.folder / f"hostfile-{file}"
        lines = [f"{name} slots={number}\n" for name, number in zip(names, each, strict=True)]
        path.write_text("".join(lines))
        return path

    def popen(
        self,
        words: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        cwd: str | Path = "/",
        place: str = HEAD,
        **settings: Any,
    ) -> subprocess.Popen[Any]:
        """Start `words` on the head (or on `place`) in a session of its own; at the head its pid is theirs.

        env: on top of this process's environment.
        """
        own = self.folder / place
        environment = {**os.environ, "TMPDIR": f"{own}/tmp", "XDG_CACHE_HOME": f"{own}/cache"}
        process: subprocess.Popen[Any] = subprocess.Popen(
            [*self._enter(place), "env", "-C", str(cwd), "--", *words],
            env={**environment, **(env or {})},
            start_new_session=True,
            **{"stdin": subprocess.DEVNULL, **settings},
        )
        self._begun.append(process)
        return process

    def run(
        self, words: Sequence[str], env: Mapping[str, str] | None = None, **settings: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run `words` on the head (or on `place`) to their end; what they printed as text."""
        seconds = settings.pop("timeout", 120.0)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = self.popen(words, env, **{**pipes, **settings})
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(list(words), process.returncode, out, err)

    def processes(self, place: str) -> dict[int, str]:
        """Command lines of the living processes of `place`, by pid here; without its sshd."""
        first = self._first[place].pid
        try:
            net = os.readlink(f"/proc/{first}/ns/net")
        except OSError:
            return {}
        found = {}
        for entry in os.scandir("/proc"):
            if entry.name.isdigit() and int(entry.name) != first:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry.name}/ns/net") == net:
                        found[int(entry.name)] = _command(entry.name)
        return {
            pid: words
            for pid, words in found.items()
            if not words.startswith(("sshd:", "sshd-", "/usr/lib/openssh/", str(_SSHD)))
            and _is_alive(pid)
            and _stat(pid)[1:2] != [str(first)]  # the first process within
        }

    def wait_until_empty(self, seconds: float, places: Sequence[str] | None = None) -> float:
        """Wait until no process is left on `places` (default: the hosts); the seconds that took.

        Raises:
            AssertionError: some were left after `seconds`; it names them.
        """
        begin = time.monotonic()
        places = self.names if places is None else places
        while True:
            left = {
                f"{name} {pid}": w for name in places for pid, w in self.processes(name).items()
            }
            if not left:
                return time.monotonic() - begin
            if time.monotonic() - begin > seconds:
                raise AssertionError(f"left after {seconds} s: {left}")
            time.sleep(0.02)

    def left_files(self, place: str) -> list[str]:
        """What lies in the temporary folder and in /dev/shm of `place`."""
        shm = Path(f"/proc/{self._inside(place)}/root/dev/shm")
        temporary = self.folder / place / "tmp"
        return sorted(str(p) for top in (shm, temporary) for p in top.rglob("*"))

    def cache(self, place: str) -> Path:
        """The cache folder of `place` (XDG_CACHE_HOME there)."""
        return self.folder / place / "cache"

    # -- what is refused or hidden --------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Refuse new connections to that host."""
        keys = self.folder / name / "authorized_keys"
        former = keys.read_text()
        keys.write_text("")
        try:
            yield
        finally:
            keys.write_text(former)

    @contextlib.contextmanager
    def hidden(self, name: str, path: str | Path) -> Iterator[None]:
        """Let a folder be empty on that host alone."""
        self._must(name, "mount", "-t", "tmpfs", "none", str(path))
        try:
            yield
        finally:
            self._must(name, "umount", "-l", str(path))

    def _must(self, name: str, *words: str) -> None:
        done = self.run(words, place=name)
        if done.returncode:
            raise RuntimeError(f"{words} on {name}: {done.stderr.strip()}")

    # -- how they are made --------------------------------------------------------------------------------

    def _write_files(self) -> None:
        folder = self.folder
        for place in self._places:
            for name in ("tmp", "cache"):
                (folder / place / name).mkdir(parents=True)
            with contextlib.suppress(OSError):  # another process may build one now
                built = shutil.ignore_patterns("runs", "*.lock")
                shutil.copytree(default_folder(), folder / place / "cache" / "xds", ignore=built)
        places = [*self._places, NOWHERE]
        lines = [f"{self.address(place)} {place}\n" for place in places]
        # by that form a server of both families looks up the caller
        lines += [f"::ffff:{self.address(place)} {place}.cluster\n" for place in places]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        user = pwd.getpwuid(os.geteuid()).pw_name
        (folder / "shadow").write_text(f"{user}:*:19000:0:99999:7:::\nsshd:*:19000::::::\n")
        if not self._has_ssh:
            return
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder, user=user))
        _make_key(folder / "key")
        known = []
        for name in self.names:
            own = folder / name
            known.append(f"{name},{self.address(name)} {_make_key(own / 'host_key')}")
            shutil.copy(folder / "key.pub", own / "authorized_keys")
            (own / "sshd_config").write_text(_SSHD_CONFIG.format(own=own, folder=folder))
        (folder / "known_hosts").write_text("\n".join(known) + "\n")

    def _make(self) -> None:
        self._start("switch", ["unshare", "--net"], "echo made\n" + _STAY)
        for place in self._places:
            reach = _REACH if place == HEAD else _SERVE
            text = _BEGIN + (reach if self._has_ssh else "") + _STAY
            quoted = {"folder": self.folder, "own": self.folder / place, "sshd": _SSHD}
            words = {key: shlex.quote(str(value)) for key, value in quoted.items()}
            self._start(place, _unshare(place != HEAD), text.format(name=place, **words))
        for name, first in self._first.items():
            _expect(name, first, "made")
        lines = ["link add bridge type bridge", "link set bridge up"]
        for place in self._places:
            port, pid = self._port(place), self._first[place].pid
            lines.append(f"link add {port} type veth peer name eth0 netns {pid}")
            lines += [f"link set {port} master bridge", f"link set {port} up"]
        self._switch(*lines)
        for place in self._places:
            to = f"{self.address(place)}/24"
            self._ip(place, f"address add {to} broadcast + dev eth0", "link set eth0 up")
            stdin = self._first[place].stdin
            assert stdin is not None
            stdin.write("\n")
            stdin.flush()
        for name, first in self._first.items():
            _expect(name, first, "ready")

    def _start(self, name: str, words: Sequence[str], script: str) -> None:
        (self.folder / name).mkdir(exist_ok=True)
        with open(self.folder / name / "first.log", "w") as log:
            self._first[name] = subprocess.Popen(
                [*words, "bash", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a Ctrl-C in the terminal is for the test alone
            )

    def _enter(self, place: str) -> list[str]:
        first = self._first[place].pid
        if place == HEAD:
            kinds = ["--net", "--uts", "--mount"]
            return ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(first), *kinds]
        return ["nsenter", "-t", str(self._inside(place)), "--net", "--uts", "--mount", "--pid"]

    def _inside(self, place: str) -> int:
        """The first process within the namespaces of `place`."""
        first = self._first[place].pid
        if place == HEAD:
            return first
        return int(Path(f"/proc/{first}/task/{first}/children").read_text().split()[0])


def _expect(name: str, first: subprocess.Popen[str], word: str) -> None:
    assert first.stdout is not None
    said = first.stdout.readline().strip()
    if said != word:
        raise RuntimeError(f"{name} cannot be made: it said {said!r}, not {word!r}; see its logs")


def _make_key(path: Path) -> str:
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(path.name + ".pub").read_text().strip()


def _command(pid: int | str) -> str:
    """Its words with spaces between, or the name that a kernel gives where it has none."""
    words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return words.strip() or Path(f"/proc/{pid}/comm").read_text().strip()


def _stat(pid: int) -> list[str]:
    """State, parent, ...: what follows the name in /proc/PID/stat; empty once it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _is_alive(pid: int) -> bool:
    return _stat(pid)[:1] not in ([], ["Z"], ["X"])


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _remove_stale_folders() -> None:
    """Folders of runs that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = re.match(rf"{_PREFIX}(\d+)-", path.name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):
            shutil.rmtree(path, ignore_errors=True)
