"""The hosts of a start, and the number of ranks on each."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.launcher.job import Host, Restarts
from xds.launcher.remote.start import choose_hosts


def hosts(*slots):
    return [Host(f"h{at}", tuple(range(count))) for at, count in enumerate(slots)]


@pytest.mark.parametrize(
    "slots, num_all, restarts, expected",
    [
        ((2, 2), 2, Restarts(), [2, 2]),
        ((2, 3, 1), 3, Restarts(), [2, 3, 1]),
        ((2,), 2, Restarts(), []),  # a host is gone, and all are needed
        ((2,), 2, Restarts(min_nodes=1), [2]),
        ((2, 2, 2), 3, Restarts(min_nodes=1, max_nodes=2), [2, 2]),  # one in reserve
        ((4, 4), 2, Restarts(fits=lambda n: n in (6, 4)), [4, 2]),
        ((4, 4), 2, Restarts(fits=lambda n: n == 3), [3]),
        ((4, 4), 2, Restarts(min_nodes=2, fits=lambda n: n == 3), []),
        ((4, 4), 2, Restarts(fits=lambda n: n == 9), []),
        ((), 2, Restarts(min_nodes=1), []),
    ],
)
def test_choices(slots, num_all, restarts, expected):
    assert [ranks for _, ranks in choose_hosts(hosts(*slots), num_all, restarts)] == expected


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sets(st.integers(1, 40)),
)
def test_a_choice_fits_and_no_larger_number_would(slots, least, valid):
    restarts = Restarts(min_nodes=least, fits=lambda n: n in valid)
    chosen = choose_hosts(hosts(*slots), len(slots), restarts)
    total = sum(ranks for _, ranks in chosen)
    assert all(1 <= ranks <= len(host.slots) for host, ranks in chosen)
    if chosen:
        assert total == max(n for n in valid if n <= sum(slots)) and len(chosen) >= least
