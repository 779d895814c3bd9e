"""Hostfiles and filters: DeepSpeed's syntax, all errors in one message, names treated as data."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xds.launcher.command_line.hosts import filter_hosts, first_hosts, read_hostfile
from xds.launcher.job import Host
from xds.utils.errors import UsageError


def host(name, num_slots):
    return Host(name, tuple(range(num_slots)))


THREE = [host("worker-0", 4), host("worker-1", 2), host("worker-2", 4)]


@pytest.mark.parametrize(
    "text, hosts",
    [
        ("worker-0 slots=4", [host("worker-0", 4)]),
        ("a slots=2\nb slots=8\n", [host("a", 2), host("b", 8)]),
        (
            "# all\n\n  a \t slots=2 # old\r\n\t\n#b slots=1\nc slots=1",
            [host("a", 2), host("c", 1)],
        ),
        ("a slots=2#x", [host("a", 2)]),
        ("\ufeffa slots=02", [host("a", 2)]),
        ("me@a.example.org slots=1", [host("me@a.example.org", 1)]),
        ("fe80::1 slots=1\n[::2] slots=1", [host("fe80::1", 1), host("::2", 1)]),
        ("me@[::3] slots=1", [host("me@::3", 1)]),
        ("10.0.0.1 slots=4 max_slots=8", [host("10.0.0.1", 4)]),
        ("$(reboot);'x\"&| slots=1", [host("$(reboot);'x\"&|", 1)]),
        ("größe slots=1", [host("größe", 1)]),
    ],
)
def test_hostfiles(tmp_path, text, hosts):
    (tmp_path / "hosts").write_bytes(text.encode())
    assert read_hostfile(tmp_path / "hosts") == hosts


@pytest.mark.parametrize(
    "line, told",
    [
        ("a", "'a': needs `slots=N`"),
        ("a 4", "'4': needs `slots=N`"),
        ("a slot=4", "'slot=4': needs `slots=N`"),
        ("a slots=4 gpus=2", "'gpus=2': unexpected after slots="),
        ("a slots=", "slots=: must be a number from 1"),
        ("a slots=0", "slots=0: must be a number from 1 to 4096; to skip a host"),
        ("a slots=-1", "slots=-1: must be"),
        ("a slots=٣", "slots=٣: must be"),
        ("a slots=999999999999", "slots=999999999999: must be"),
        ("-oProxyCommand=reboot slots=1", "cannot begin with '-'"),
        ("me@-x slots=1", "cannot begin with '-'"),
        ("-me@x slots=1", "cannot begin with '-'"),
        ("a\x1b[2Jb slots=1", r"'a\x1b[2Jb': a host's name must not contain spaces or control"),
        ("a\u00a0b slots=1", "must not contain spaces or control"),
        ("a\u202eb slots=1", "must not contain spaces or control"),
        ("@a slots=1", "must be a name, an address or user@name"),
        ("me@ slots=1", "must be a name, an address or user@name"),
        ("n[1-4] slots=1", "ranges of hosts are not supported"),
    ],
)
def test_what_a_hostfile_cannot_say(tmp_path, line, told):
    (tmp_path / "hosts").write_bytes(f"good slots=1\n# x\n{line}\n".encode())
    with pytest.raises(UsageError) as error:
        read_hostfile(tmp_path / "hosts")
    assert "line 3: " in str(error.value) and told in str(error.value)


def test_a_host_in_two_lines_is_refused(tmp_path):
    (tmp_path / "hosts").write_text("a slots=1\n\na slots=2\nb\n")
    with pytest.raises(UsageError, match="line 3: 'a' is already in an earlier line") as error:
        read_hostfile(tmp_path / "hosts")
    assert str(error.value).startswith(f"hostfile = {str(tmp_path / 'hosts')!r}: line 3")


def test_files_that_are_none(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(UsageError, match="Is a directory"):
        read_hostfile(tmp_path)
    (tmp_path / "hosts").write_text("# none\n")
    with pytest.raises(UsageError, match="no host in it"):
        read_hostfile(tmp_path / "hosts")
    (tmp_path / "hosts").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_hostfile(tmp_path / "hosts")


def kept(hosts):
    return {each.name: list(each.slots) for each in hosts}


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1], "worker-2": [0, 1, 2, 3]}),
        ("worker-0@worker-1:0", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0]}),
        ("worker-1:0@worker-0:2,1,2", "", {"worker-0": [1, 2], "worker-1": [0]}),
        ("worker-2:1@worker-2:3", "", {"worker-2": [1, 3]}),
        ("worker-2:0-2", "", {"worker-2": [0, 1, 2]}),
        ("worker-2:0,2-3", "", {"worker-2": [0, 2, 3]}),
        ("[worker-2]:0", "", {"worker-2": [0]}),
        ("[worker-1]", "", {"worker-1": [0, 1]}),
        ("", "worker-1", {"worker-0": [0, 1, 2, 3], "worker-2": [0, 1, 2, 3]}),
        ("", "worker-1:0@worker-0", {"worker-1": [1], "worker-2": [0, 1, 2, 3]}),
        ("", "worker-1:0,1@worker-2:1-3", {"worker-0": [0, 1, 2, 3], "worker-2": [0]}),
    ],
)
def test_filters(include, exclude, left):
    filtered = filter_hosts(THREE, include, exclude)
    assert kept(filtered) == left
    assert [each.name for each in filtered] == sorted(left)  # the hostfile's order


@pytest.mark.parametrize(
    "include, left",
    [
        ("me@10.0.0.2", {"me@10.0.0.2": [0, 1, 2, 3, 4, 5, 6, 7]}),
        ("node-1@me@10.0.0.2:0,2-4", {"node-1": list(range(8)), "me@10.0.0.2": [0, 2, 3, 4]}),
        ("me@10.0.0.2:1@node-1:0", {"node-1": [0], "me@10.0.0.2": [1]}),
    ],
)
def test_a_line_with_a_user_is_selected_as_it_is_written(include, left):
    """docs/launching.md has this file and the second filter."""
    assert kept(filter_hosts([host("node-1", 8), host("me@10.0.0.2", 8)], include)) == left


@pytest.mark.parametrize(
    "include, exclude, told",
    [
        ("worker-0", "worker-1", "--include and --exclude cannot be combined"),
        ("worker-3", "", "--include = worker-3: unknown host 'worker-3'; did you mean 'worker-"),
        ("x", "", "known hosts are 'worker-0', 'worker-1', 'worker-2'"),
        ("worker-1:2", "", "no slot 2 on host 'worker-1'; it has 0-1"),
        ("", "worker-1:7", "--exclude = worker-1:7: no slot 7"),
        ("worker-0:", "", "slots must be numbers"),
        ("worker-0:a", "", "slots must be numbers, such as 0,2 or 0-3"),
        ("worker-0:3-1", "", "slots must be numbers"),
        ("worker-0:-1", "", "slots must be numbers"),
        ("worker-0:0,", "", "slots must be numbers"),
        ("worker-0@@worker-1", "", "an empty name"),
        ("worker-0@", "", "an empty name"),
        ("@", "", "an empty name"),
        ("", "worker-0@worker-1@worker-2", "no host remains"),
    ],
)
def test_filters_that_cannot_be_met(include, exclude, told):
    with pytest.raises(UsageError) as error:
        filter_hosts(THREE, include, exclude)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "include, left",
    [
        ("fe80::1", {"fe80::1": [0, 1]}),
        ("[fe80::1]:1", {"fe80::1": [1]}),
        ("fe80::1:1", {"fe80::1": [1]}),
        ("me@a:1@b:0", {"me@a": [1], "b": [0]}),
        ("b@me@a", {"b": [0, 1], "me@a": [0, 1]}),
        ("me@a@me@fe80::2:0", {"me@a": [0, 1], "me@fe80::2": [0]}),
        ("me@[fe80::2]:0@b", {"me@fe80::2": [0], "b": [0, 1]}),
        ("[me@a]:0", {"me@a": [0]}),
    ],
)
def test_filters_of_addresses_and_users(include, left):
    names = ["fe80::1", "me@a", "b", "me@fe80::2"]
    assert kept(filter_hosts([host(name, 2) for name in names], include)) == left


def test_the_first_hosts_and_slots():
    assert first_hosts(THREE) == THREE
    assert kept(first_hosts(THREE, 2)) == {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}
    assert kept(first_hosts(THREE, 0, 1)) == {f"worker-{number}": [0] for number in range(3)}
    with pytest.raises(UsageError, match="--num-nodes = 4: there are only 3 hosts"):
        first_hosts(THREE, 4)
    with pytest.raises(UsageError, match="host 'worker-1' has 2 slots"):
        first_hosts(THREE, 0, 3)
    assert kept(first_hosts(THREE, 1, 3)) == {"worker-0": [0, 1, 2]}


NAMES = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,6}[a-z0-9])?", fullmatch=True)
FILES = st.dictionaries(NAMES, st.integers(1, 9), min_size=1, max_size=6)


@settings(deadline=None)
@given(slots=FILES, data=st.data())
def test_include_and_exclude_of_the_same_text_share_the_slots(tmp_path_factory, slots, data):
    path = tmp_path_factory.mktemp("h") / "hosts"
    path.write_text("".join(f"{name} slots={number} # x\n" for name, number in slots.items()))
    hosts = read_hostfile(path)
    assert kept(hosts) == {name: list(range(number)) for name, number in slots.items()}
    chosen = {
        name: data.draw(st.sets(st.integers(0, slots[name] - 1), min_size=1))
        for name in data.draw(st.sets(st.sampled_from(sorted(slots)), min_size=1))
    }
    text = "@".join(f"{name}:{','.join(map(str, picked))}" for name, picked in chosen.items())
    included = kept(filter_hosts(hosts, text))
    assert included == {name: sorted(chosen[name]) for name in slots if name in chosen}
    rest = {name: set(range(number)) - chosen.get(name, set()) for name, number in slots.items()}
    if any(rest.values()):
        excluded = kept(filter_hosts(hosts, "", text))
        assert excluded == {name: sorted(left) for name, left in rest.items() if left}


@settings(deadline=None)
@given(text=st.text(st.sampled_from("ab0,-:@[] \n\x00é"), max_size=12))
def test_any_filter_is_met_or_refused(text):
    hosts = [host("a", 2), host("b@a", 1), host("::0", 1)]
    try:
        found = filter_hosts(hosts, text)
    except UsageError:
        return
    assert found and {each.name for each in found} <= {"a", "b@a", "::0"}


@settings(deadline=None)
@given(data=st.binary(max_size=40))
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("h") / "hosts"
    path.write_bytes(data)
    try:
        hosts = read_hostfile(path)
    except UsageError:
        return
    assert hosts and not any(each.name.startswith("-") for each in hosts)
