"""A ring of slots: bounded, shared by threads, and never a thread that waits for itself."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from time_limit import limit_time  # noqa: F401

from xds.offload.ring import Ring
from xds.utils.errors import XdsError

SECONDS = 10  # for what could hang


def in_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(timeout=SECONDS)


def test_a_given_slot_is_taken_again():
    ring = Ring(4096, 2, pin=False)
    first, second = ring.take(), ring.take()
    ring.give(second)
    assert ring.take().data_ptr() == second.data_ptr()
    ring.give(first[:100])  # a part from its beginning names the slot as well
    assert ring.take().data_ptr() == first.data_ptr()


def test_a_thread_that_holds_all_slots_is_told_so():
    ring = Ring(4096, 2, pin=False)
    ring.take(), ring.take()
    with pytest.raises(XdsError, match="one thread holds all 2 slots"):
        ring.take()


def test_take_waits_for_the_slot_of_another_thread():
    ring = Ring(4096, 1, pin=False)
    slot = in_thread(ring.take)
    timer = threading.Timer(0.1, ring.give, [slot])
    timer.start()
    start = time.monotonic()
    assert ring.take().data_ptr() == slot.data_ptr()
    assert time.monotonic() - start > 0.05
    timer.join()


def test_a_slot_in_use_is_waited_for_in_the_order_of_giving():
    ring = Ring(4096, 2, pin=False)
    first, second = ring.take(), ring.take()
    waits = []
    ring.give(second, after=lambda: waits.append("second"))
    ring.give(first, after=lambda: waits.append("first"))
    assert ring.take().data_ptr() == second.data_ptr() and waits == ["second"]
    assert ring.take().data_ptr() == first.data_ptr() and waits == ["second", "first"]


def test_a_failed_use_is_raised_once_and_frees_the_slot():
    def fail():
        raise XdsError("the disk failed")

    ring = Ring(4096, 1, pin=False)
    ring.give(ring.take(), after=fail)
    with pytest.raises(XdsError, match="the disk failed"):
        ring.take()
    ring.take()


def test_a_slot_stays_in_use_when_the_wait_for_it_is_interrupted():
    interrupts = [KeyboardInterrupt(), None]

    def interrupted():
        error = interrupts.pop(0)
        if error is not None:
            raise error

    ring = Ring(4096, 1, pin=False)
    ring.give(ring.take(), after=interrupted)
    with pytest.raises(KeyboardInterrupt):
        ring.take()
    ring.take()
    assert not interrupts


def test_a_thread_waits_while_another_one_waits_for_a_pending_slot():
    """All other slots are held by the thread that takes; it does not wait for itself."""
    ring = Ring(4096, 2, pin=False)
    ring.take()
    pending, is_over = ring.take(), threading.Event()
    ring.give(pending, after=lambda: is_over.wait(SECONDS))
    taken = []
    other = threading.Thread(target=lambda: taken.append(ring.take()))
    other.start()
    while ring._pending:
        time.sleep(0.001)
    threading.Timer(0.05, is_over.set).start()
    threading.Timer(0.1, lambda: ring.give(taken[0])).start()
    assert ring.take().data_ptr() == pending.data_ptr()
    other.join(SECONDS)


@pytest.mark.parametrize("make", [lambda slot: torch.empty(8), lambda slot: slot[1:]])
def test_a_tensor_that_is_no_slot_is_refused(make):
    ring = Ring(4096, 2, pin=False)
    with pytest.raises(XdsError, match="no taken slot"):
        ring.give(make(ring.take()))


def test_many_threads_never_share_a_slot():
    ring = Ring(4096, 3, pin=False)

    def work(number):
        for _ in range(50):
            slot = ring.take()
            slot.fill_(number)
            time.sleep(0)
            assert slot.unique().tolist() == [number]
            ring.give(slot, after=None if number % 2 else lambda: time.sleep(0))

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6), timeout=SECONDS))
    assert sorted(ring.take().data_ptr() for _ in range(3))
