"""Hostfiles and filters in DeepSpeed's syntax, names treated as data; which hosts a start takes."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.launcher.command_line.hosts import by_site, filter_hosts, first_hosts, read_hostfile
from xds.launcher.job import Host, Restarts
from xds.launcher.ranks.failure import Failure
from xds.launcher.remote.deciding import Deciding, head_address
from xds.launcher.remote.start import choose_hosts
from xds.recovery.decider import End
from xds.utils.errors import UsageError


def host(name, num_slots):
    return Host(name, tuple(range(num_slots)))


THREE = [host("worker-0", 4), host("worker-1", 2), host("worker-2", 4)]


def test_hostfiles(tmp_path):
    for text, hosts in {
        "worker-0 slots=4": [host("worker-0", 4)],
        "a slots=2\nb slots=8\n": [host("a", 2), host("b", 8)],
        "# all\n\n  a \t slots=2 # old\r\n\t\n#b slots=1\nc slots=1": [host("a", 2), host("c", 1)],
        "a slots=2#x": [host("a", 2)],
        "\ufeffa slots=02": [host("a", 2)],
        "me@a.example.org slots=1": [host("me@a.example.org", 1)],
        "fe80::1 slots=1\n[::2] slots=1": [host("fe80::1", 1), host("::2", 1)],
        "me@[::3] slots=1": [host("me@::3", 1)],
        "10.0.0.1 slots=4 max_slots=8": [host("10.0.0.1", 4)],
        "$(reboot);'x\"&| slots=1": [host("$(reboot);'x\"&|", 1)],
        "größe slots=1": [host("größe", 1)],
        "a slots=1 spare": [Host("a", (0,), is_spare=True)],
    }.items():
        (tmp_path / "hosts").write_bytes(text.encode())
        assert read_hostfile(tmp_path / "hosts") == hosts


def test_hosts_of_a_site_are_next_to_each_other(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=2 site=x\nb slots=4 site=y max_slots=4\nc slots=2 site=x\n")
    found = by_site(read_hostfile(file))
    assert [(each.name, each.site) for each in found] == [("a", "x"), ("c", "x"), ("b", "y")]
    assert by_site(THREE) == THREE
    file.write_text("a slots=2 site=x\nb slots=2 site=y\nc slots=1 spare site=x\n")
    found_spare = by_site(read_hostfile(file))
    assert [(each.name, each.is_spare) for each in found_spare] == [
        ("a", False),
        ("c", True),
        ("b", False),
    ]
    with pytest.raises(
        UsageError, match="unequal numbers of slots \\('x' 2, 'y' 4\\); give each as many"
    ):
        by_site([found[0], found[2]])
    with pytest.raises(UsageError, match="host 'worker-0' has no site, and others have one"):
        by_site([*found, THREE[0]])


WRONG_LINES = {
    "a": "'a': needs `slots=N`",
    "a 4": "'4': needs `slots=N`",
    "a slot=4": "'slot=4': needs `slots=N`",
    "a slots=4 gpus=2": "'gpus=2': unexpected after slots=",
    "a slots=4 site=": "unexpected after slots=, where one site=NAME and the word spare may stand",
    "a slots=4 spare spare": "'spare': unexpected after slots=",
    "a slots=4 site=x site=y": "'site=y': unexpected after slots=",
    "a slots=": "slots=: must be a number from 1",
    "a slots=0": "slots=0: must be a number from 1 to 4096; to skip a host",
    "a slots=-1": "slots=-1: must be",
    "a slots=٣": "slots=٣: must be",
    "a slots=999999999999": "slots=999999999999: must be",
    "-oProxyCommand=reboot slots=1": "cannot begin with '-'",
    "me@-x slots=1": "cannot begin with '-'",
    "-me@x slots=1": "cannot begin with '-'",
    "a\x1b[2Jb slots=1": "'a\\x1b[2Jb': a host's name must not contain spaces or control",
    "a\xa0b slots=1": "must not contain spaces or control",
    "a\u202eb slots=1": "must not contain spaces or control",
    "@a slots=1": "must be a name, an address or user@name",
    "me@ slots=1": "must be a name, an address or user@name",
    "n[1-4] slots=1": "ranges of hosts are not supported",
}


def test_what_a_hostfile_cannot_say(tmp_path):
    for line, told in WRONG_LINES.items():
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


ALL = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1], "worker-2": [0, 1, 2, 3]}


def test_filters():
    def changed(**slots):
        return {"worker-" + name[1:]: each for name, each in slots.items()}

    for include, exclude, left in (
        ("", "", ALL),
        ("worker-0@worker-1:0", "", changed(w0=[0, 1, 2, 3], w1=[0])),
        ("worker-1:0@worker-0:2,1,2", "", changed(w0=[1, 2], w1=[0])),
        ("worker-2:1@worker-2:3", "", changed(w2=[1, 3])),
        ("worker-2:0,2-3", "", changed(w2=[0, 2, 3])),
        ("[worker-2]:0", "", changed(w2=[0])),
        ("[worker-1]", "", changed(w1=[0, 1])),
        ("", "worker-1:0@worker-0", changed(w1=[1], w2=[0, 1, 2, 3])),
        ("", "worker-1:0,1@worker-2:1-3", changed(w0=[0, 1, 2, 3], w2=[0])),
    ):
        filtered = filter_hosts(THREE, include, exclude)
        assert kept(filtered) == left
        assert [each.name for each in filtered] == sorted(left)  # the hostfile's order


IMPOSSIBLE = """
worker-0 | worker-1 | --include and --exclude cannot be combined
worker-3 | | --include = worker-3: unknown host 'worker-3'; did you mean 'worker-
x | | known hosts are 'worker-0', 'worker-1', 'worker-2'
worker-1:2 | | no slot 2 on host 'worker-1'; it has 0-1
| worker-1:7 | --exclude = worker-1:7: no slot 7
worker-0: | | slots must be numbers
worker-0:a | | slots must be numbers, such as 0,2 or 0-3
worker-0:3-1 | | slots must be numbers
worker-0:0, | | slots must be numbers
worker-0@@worker-1 | | an empty name
@ | | an empty name
| worker-0@worker-1@worker-2 | no host remains
"""


def test_filters_that_cannot_be_met():
    for row in IMPOSSIBLE.strip().splitlines():
        include, exclude, told = map(str.strip, row.split("|"))
        with pytest.raises(UsageError) as error:
            filter_hosts(THREE, include, exclude)
        assert told in str(error.value)


def test_filters_of_addresses_and_users():
    hosts = [host(name, 2) for name in ("fe80::1", "me@a", "b", "me@fe80::2")]
    for include, left in {
        "fe80::1": {"fe80::1": [0, 1]},
        "[fe80::1]:1": {"fe80::1": [1]},
        "fe80::1:1": {"fe80::1": [1]},
        "me@a:1@b:0": {"me@a": [1], "b": [0]},
        "b@me@a": {"b": [0, 1], "me@a": [0, 1]},
        "me@[fe80::2]:0@b": {"me@fe80::2": [0], "b": [0, 1]},
        "[me@a]:0": {"me@a": [0]},
    }.items():
        assert kept(filter_hosts(hosts, include)) == left
    # docs/launching.md has this file and this filter
    hosts = [host("node-1", 8), host("me@10.0.0.2", 8)]
    left = {"node-1": list(range(8)), "me@10.0.0.2": [0, 2, 3, 4]}
    assert kept(filter_hosts(hosts, "node-1@me@10.0.0.2:0,2-4")) == left


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


@given(text=st.text(st.sampled_from("ab0,-:@[] \n\x00é"), max_size=12))
def test_any_filter_is_met_or_refused(text):
    hosts = [host("a", 2), host("b@a", 1), host("::0", 1)]
    try:
        found = filter_hosts(hosts, text)
    except UsageError:
        return
    assert found and {each.name for each in found} <= {"a", "b@a", "::0"}


@given(data=st.binary(max_size=40))
def test_any_file_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("h") / "hosts"
    path.write_bytes(data)
    try:
        hosts = read_hostfile(path)
    except UsageError:
        return
    assert hosts and not any(each.name.startswith("-") for each in hosts)


# -- the hosts of a start -------------------------------------------------------------------------------


def numbered(*slots):
    return [host(f"h{at}", count) for at, count in enumerate(slots)]


def test_choices_of_hosts():
    for slots, num_all, restarts, expected in (
        ((2, 3, 1), 3, Restarts(), [2, 3, 1]),
        ((2,), 2, Restarts(), []),  # a host is gone, and all are needed
        ((2,), 2, Restarts(min_nodes=1), [2]),
        ((2, 2, 2), 3, Restarts(min_nodes=1, max_nodes=2), [2, 2]),  # one in reserve
        ((4, 4), 2, Restarts(fits=lambda n: n in (6, 4)), [4, 2]),
        ((4, 4), 2, Restarts(fits=lambda n: n == 3), [3]),
        ((4, 4), 2, Restarts(min_nodes=2, fits=lambda n: n == 3), []),
        ((4, 4), 2, Restarts(fits=lambda n: n == 9), []),
        ((), 2, Restarts(min_nodes=1), []),
    ):
        chosen = choose_hosts(numbered(*slots), num_all, restarts)
        assert [ranks for _, ranks in chosen] == expected


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sets(st.integers(1, 40)),
)
def test_a_choice_fits_and_no_larger_number_would(slots, least, valid):
    restarts = Restarts(min_nodes=least, fits=lambda n: n in valid)
    chosen = choose_hosts(numbered(*slots), len(slots), restarts)
    total = sum(ranks for _, ranks in chosen)
    assert all(1 <= ranks <= len(host.slots) for host, ranks in chosen)
    if chosen:
        assert total == max(n for n in valid if n <= sum(slots)) and len(chosen) >= least


def test_where_hosts_reach_a_head_that_decides():
    assert head_address({"a": "10.0.0.1", "b": "10.0.0.1"}, "") == "10.0.0.1"
    assert head_address({"a": "10.0.0.1", "b": ""}, "10.9.9.9") == "10.9.9.9"
    for seen, said in (
        ({"a": "10.0.0.1", "b": "10.0.0.2"}, "a 10.0.0.1, b 10.0.0.2"),
        ({"a": "10.0.0.1", "b": ""}, "a 10.0.0.1, b ?"),
        ({"a": ""}, "a ?"),
    ):
        with pytest.raises(UsageError, match=f"at different addresses \\({re.escape(said)}\\)"):
            head_address(seen, "")
    with pytest.raises(UsageError, match="cannot listen at 192.0.2.1:0, where its hosts would"):
        Deciding(THREE, [4, 2, 4], 0, "192.0.2.1:0", "key")
    deciding = Deciding([*THREE[:2], Host("spare", (0, 1))], [4, 2], 0, "127.0.0.1:0", "key")
    assert [place.ranks for place in deciding.decider.places] == [(0, 1, 2, 3), (4, 5), ()]
    assert deciding.endpoint.startswith("127.0.0.1:") and not deciding.endpoint.endswith(":0")
    deciding.take(1, {"kind": "ranks_stopped", "ranks": [4]})
    deciding.take(1, {"kind": "rank_ended", "rank": 5, "attempt": 0, "code": 3, "why": ""})
    assert deciding.look() == [End()]  # the ranks cannot recover yet
    failures = [Failure(5, 1, 3, 0.0, host="worker-1"), Failure(5, 1, 3, 0.0, host="worker-0")]
    assert deciding.counted(failures) == failures[:1]
