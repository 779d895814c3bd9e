"""The signals that ranks get after a request to stop, and when."""

import signal
import time

import pytest

from xds.launcher.job import Job, Order, Rendezvous
from xds.launcher.ranks.stop import Stop


def due_after(seconds, signum, grace_seconds=0.0, **how):
    stop = Stop()
    stop.request(signum, **how)
    stop.since_seconds = time.monotonic() - seconds
    return stop.due(grace_seconds)


@pytest.mark.parametrize(
    "seconds, signum, grace, expected",
    [
        (0.1, signal.SIGINT, 0.0, signal.SIGINT),
        (2.0, signal.SIGINT, 0.0, signal.SIGTERM),
        (4.0, signal.SIGINT, 0.0, signal.SIGKILL),
        (4.0, signal.SIGTERM, 0.0, signal.SIGKILL),
        (4.0, signal.SIGTERM, 30.0, signal.SIGTERM),  # the ranks save
        (31.0, signal.SIGTERM, 30.0, signal.SIGKILL),
        (4.0, signal.SIGINT, 30.0, signal.SIGKILL),  # Ctrl-C does not
    ],
)
def test_the_signal_gets_harder(seconds, signum, grace, expected):
    assert due_after(seconds, signum, grace) == expected


def test_ranks_whose_peer_failed_elsewhere_are_gone_within_five_seconds_whatever_they_asked_for():
    assert due_after(1.0, signal.SIGTERM, 30.0, is_for_peer=True) == signal.SIGTERM
    assert due_after(3.5, signal.SIGTERM, 30.0, is_for_peer=True) == signal.SIGKILL


def test_asking_twice_is_urgent_and_nothing_is_due_before():
    stop = Stop()
    assert stop.due(0.0) == 0
    assert stop.request(signal.SIGINT) and not stop.request(signal.SIGINT)
    assert stop.due(0.0) == signal.SIGKILL


def test_sigterm_that_comes_twice_at_once_is_one_request():
    stop = Stop()
    assert stop.request(signal.SIGTERM) and not stop.request(signal.SIGTERM)
    assert stop.due(30.0) == signal.SIGTERM
    stop.since_seconds -= 3.0
    stop.request(signal.SIGTERM)
    assert stop.due(30.0) == signal.SIGKILL


def test_a_peer_that_fails_after_the_users_signal_makes_nothing_urgent():
    stop = Stop()
    assert stop.request(signal.SIGINT) and not stop.request(signal.SIGTERM, is_for_peer=True)
    assert stop.due(0.0) == signal.SIGINT


def test_a_follower_gets_the_same_requests():
    follower = Stop()
    stop = Stop(follower)
    stop.request(signal.SIGTERM)
    stop.forward(signal.SIGUSR1)
    assert follower.signum == signal.SIGTERM and follower.forwards == [signal.SIGUSR1]


def test_a_signal_while_torch_is_imported_starts_no_rank_that_nobody_would_stop():
    """The main thread leaves the agent alone as long as it knows no number of ranks."""
    from xds.launcher.ranks.supervise import _Agent

    known = []

    class Asked(Stop):
        @property
        def signum(self):
            known.append(agent.num_ranks)
            return signal.SIGTERM

        @signum.setter
        def signum(self, value): ...

    order = Order(Job("script", "train.py"), Rendezvous(), 1)
    agent = _Agent(order, None, Asked(), {})
    agent.run()
    assert known == [1] and not agent.fault and agent.ranks() == {}
