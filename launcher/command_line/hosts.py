"""Selects machines and their slots: hostfiles and filters in DeepSpeed's syntax.

A hostfile has a line for each host: `worker-1 slots=8`, or `worker-1 slots=8 site=paris spare`. A filter names
hosts and slots of it: `worker-1@worker-2:0,2-4`. A name with a colon or an @ in it may be put in brackets:
`[fe80::1]:0`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ...utils.errors import UsageError
from ...utils.quoting import printable, quoted
from ...utils.small_files import read_small_text
from ..job import Host

_MAX_SLOTS = 4096
_NEAR = 3  # number of known names that an error lists if none is similar
_NEAR_CHARS = 64  # length of a name that is compared with the known ones


def read_hostfile(path: str | Path) -> list[Host]:
    """The hosts of a hostfile, in its order.

    Raises:
        UsageError: the file cannot be read, or a line is wrong.
    """
    try:
        text = read_small_text(path)
    except OSError as error:
        raise UsageError(
            f"hostfile = {quoted(path)}: {error.strerror}; give a text file of lines such as `worker-1 slots=8`"
        ) from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(re.split("\r\n|\n|\r", text), 1):
        fields = re.split("[ \t]+", line.partition("#")[0].strip(" \t"))
        if fields == [""]:
            continue
        try:
            name, (num_slots, site, is_spare) = host_name(fields[0]), _words(fields)
            if name in hosts:
                raise UsageError(
                    f"{quoted(name)} is already in an earlier line; name each host once, with all of its slots"
                )
        except UsageError as error:
            raise UsageError(f"hostfile = {quoted(path)}: line {number}: {error}") from None
        hosts[name] = Host(name, tuple(range(num_slots)), site, is_spare)
    if not hosts:
        raise UsageError(
            f"hostfile = {quoted(path)}: no host in it; write a line such as `worker-1 slots=8` for each"
        )
    return list(hosts.values())


def host_name(text: str) -> str:
    """`text` as a host's name or address, optionally `user@name`; brackets around it are removed.

    The name is always quoted, so nearly every text is accepted. A name that begins with a dash is refused,
    because ssh and similar programs take it for an option. Spaces are refused too.
    """
    user, at, name = text.rpartition("@")
    if name.startswith("[") and name.endswith("]"):
        name = name[1:-1]
    if not name or (at and not user):
        raise UsageError(f"host = {quoted(text)}: must be a name, an address or user@name")
    if user.startswith("-") or name.startswith("-"):
        raise UsageError(
            f"host = {quoted(text)}: a host's name cannot begin with '-' (it would be taken for an"
            " option); give its address"
        )
    if not text.isprintable() or any(char.isspace() for char in text):
        raise UsageError(
            f"host = {quoted(text)}: a host's name must not contain spaces or control characters"
        )
    if "[" in name or "]" in name:
        raise UsageError(
            f"host = {quoted(text)}: ranges of hosts are not supported; write a line for each host"
        )
    return f"{user}{at}{name}"


def _words(fields: list[str]) -> tuple[int, str, bool]:
    """The number of slots; the site, which is "" if none is named; whether the host is spare."""
    need = "needs `slots=N`, such as `worker-1 slots=8`"
    if len(fields) < 2:
        raise UsageError(f"{quoted(fields[0])}: {need}")
    name, _, number = fields[1].partition("=")
    if name != "slots":
        raise UsageError(f"{quoted(fields[1])}: {need}")
    if not re.fullmatch("[0-9]{1,9}", number) or not 1 <= int(number) <= _MAX_SLOTS:
        raise UsageError(
            f"slots={printable(number)}: must be a number from 1 to {_MAX_SLOTS}"
            "; to skip a host, begin its line with #"
        )
    site, is_spare = "", False
    for word in fields[2:]:
        if word.startswith("site=") and word != "site=" and not site:
            site = word.removeprefix("site=")
        elif word == "spare" and not is_spare:
            is_spare = True
        elif not re.fullmatch(r"max[-_]slots=[0-9]+", word):  # of Open MPI, not used here
            raise UsageError(
                f"{quoted(word)}: unexpected after slots=, where one site=NAME and the word spare may stand; "
                "comments begin with #"
            )
    return int(number), site, is_spare


def by_site(hosts: Sequence[Host]) -> list[Host]:
    """The hosts of each site one after the other, sites in the order of their first hosts.

    Raises:
        UsageError: some hosts have a site and others have none, or sites have unequal numbers of slots.
    """
    sites = dict.fromkeys(host.site for host in hosts)
    ordered = [host for site in sites for host in hosts if host.site == site]
    if "" in sites and len(sites) > 1:
        name = next(host.name for host in hosts if not host.site)
        raise UsageError(
            f"host {quoted(name)} has no site, and others have one; write site=NAME in all lines, or in none"
        )
    with_ranks = [host for host in hosts if not host.is_spare]
    counts = {s: sum(len(host.slots) for host in with_ranks if host.site == s) for s in sites}
    if len(set(counts.values())) > 1:
        said = ", ".join(f"{quoted(site)} {count}" for site, count in counts.items())
        raise UsageError(
            f"sites have unequal numbers of slots ({said}); give each as many: every group of ranks has the "
            "same number"
        )
    return ordered


def filter_hosts(hosts: Sequence[Host], include: str = "", exclude: str = "") -> list[Host]:
    """The hosts and slots that `include` names, or all except those that `exclude` names, in order.

    A host named without slots means all of its slots. A host without remaining slots is dropped.

    Raises:
        UsageError: both are given, or one names an unknown host or slot, or no host remains.
    """
    if include and exclude:
        raise UsageError("--include and --exclude cannot be combined; remove one of them")
    if not (include or exclude):
        return list(hosts)
    named = _named("--include" if include else "--exclude", include or exclude, hosts)
    kept = []
    for host in hosts:
        is_kept = named.get(host.name, set()).__contains__
        slots = tuple(slot for slot in host.slots if is_kept(slot) == bool(include))
        if slots:
            kept.append(replace(host, slots=slots))
    if not kept:
        raise UsageError(f"--exclude = {printable(exclude)}: no host remains; exclude fewer")
    return kept


def first_hosts(hosts: Sequence[Host], num_nodes: int = 0, num_gpus: int = 0) -> list[Host]:
    """The first `num_nodes` of `hosts`, each with its first `num_gpus` slots; 0 means all.

    Raises:
        UsageError: there are fewer hosts, or one of them has fewer slots.
    """
    if num_nodes > len(hosts):
        raise UsageError(
            f"--num-nodes = {num_nodes}: there are only {len(hosts)} hosts; set a smaller number"
        )
    taken = list(hosts[: num_nodes or None])
    for host in taken if num_gpus else ():
        if num_gpus > len(host.slots):
            raise UsageError(
                f"--num-gpus = {num_gpus}: host {quoted(host.name)} has {len(host.slots)} slots;"
                " set a smaller number, or name the slots with --include"
            )
    return [replace(host, slots=host.slots[: num_gpus or None]) for host in taken]


def _named(setting: str, text: str, hosts: Sequence[Host]) -> dict[str, set[int]]:
    """The slots that `text` names, by host."""
    known = {host.name: host for host in hosts}
    found: dict[str, set[int]] = {}
    for spec in _specs(text, known):
        if not spec:
            raise UsageError(
                f"{setting} = {printable(text)}: an empty name; write host:slot,slot@host"
            )
        name, slots = _name_and_slots(spec, known)
        if name not in known:
            raise UsageError(
                f"{setting} = {printable(text)}: unknown host {quoted(name)}; {_nearest(name, list(known))}"
            )
        try:
            named = set(numbers(slots)) if slots is not None else set(known[name].slots)
        except ValueError:
            raise UsageError(
                f"{setting} = {printable(text)}: {quoted(slots)}: slots must be numbers, such as 0,2 or 0-3"
            ) from None
        unknown = sorted(named.difference(known[name].slots))
        if unknown:
            raise UsageError(
                f"{setting} = {printable(text)}: no slot {unknown[0]} on host {quoted(name)}; it has"
                f" {_ranges(known[name].slots)}"
            )
        found.setdefault(name, set()).update(named)
    return found


def _specs(text: str, known: dict[str, Host]) -> Iterator[str]:
    """Split `text` at each @ that is neither in brackets nor in a known user@host."""
    parts = re.findall(r"(?:\[[^\]]*\]|[^@\[]|\[)+|(?<=@)(?=@|$)|^(?=@|$)", text)
    position = 0
    while position < len(parts):
        spec = parts[position]
        joined = "@".join(parts[position : position + 2])
        is_user = _name_and_slots(spec, known)[0] not in known
        if is_user and joined != spec and _name_and_slots(joined, known)[0] in known:
            spec = joined
            position += 1
        position += 1
        yield spec


def _name_and_slots(spec: str, known: dict[str, Host]) -> tuple[str, str | None]:
    """The host and the slots of `host:slots`; None if no slots are named."""
    if spec in known:  # an IPv6 address contains colons
        return spec, None
    bracketed = re.fullmatch(r"(.*@)?\[(.*)\](?::(.*))?", spec, re.DOTALL)
    if bracketed:
        return (bracketed[1] or "") + bracketed[2], bracketed[3]
    name, colon, slots = spec.rpartition(":")
    return (name, slots) if colon else (spec, None)


def numbers(text: str) -> Iterator[int]:
    """The numbers in "0,2,4-7".

    Raises:
        ValueError: the text is not such a list.
    """
    for part in text.split(","):
        found = re.fullmatch("([0-9]{1,6})(?:-([0-9]{1,6}))?", part.strip(" "))
        if not found or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(part)
        yield from range(int(found[1]), int(found[2] or found[1]) + 1)


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as text: 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name[:_NEAR_CHARS], known, n=1)
    if near:
        return f"did you mean {quoted(near[0])}?"
    more = ", ..." if len(known) > _NEAR else ""
    return "known hosts are " + ", ".join(map(quoted, known[:_NEAR])) + more
