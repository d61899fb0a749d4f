"""Events that attention waits on: per layer, reusable, and raising when a restore failed."""

from __future__ import annotations

import threading

import pytest

from sglang_kvtc.errors import RestoreError
from sglang_kvtc.integration.controller import LayerDoneCounter


def test_a_batch_without_a_restore_waits_for_nothing() -> None:
    LayerDoneCounter(num_layers=3, num_counters=3).wait_until(2)


def test_a_layer_is_released_before_later_layers_are_done() -> None:
    counter = LayerDoneCounter(num_layers=4, num_counters=3)
    index = counter.update_producer()
    counter.set_consumer(index)
    counter.events[index].complete(range(2))
    counter.wait_until(1)
    released = threading.Event()
    waiter = threading.Thread(target=lambda: (counter.wait_until(3), released.set()))
    waiter.start()
    assert not released.wait(0.05)
    counter.events[index].complete(range(2, 4))
    waiter.join(10)
    assert released.is_set()


def test_a_failed_restore_raises_in_every_layer_that_was_not_done() -> None:
    counter = LayerDoneCounter(num_layers=3, num_counters=3)
    index = counter.update_producer()
    counter.set_consumer(index)
    counter.events[index].complete(range(1))
    counter.events[index].fail(RestoreError("out of memory"))
    counter.wait_until(0)
    with pytest.raises(RestoreError, match="out of memory"):
        counter.wait_until(1)


def test_a_race_04_events_of_a_running_restore_are_not_reused() -> None:
    counter = LayerDoneCounter(num_layers=2, num_counters=2)
    first = counter.update_producer()
    second = counter.update_producer()
    counter.events[second].complete(range(2))
    with pytest.raises(RuntimeError, match=f"load-back {first} is still running"):
        counter.update_producer()
    counter.events[first].complete(range(2))
    assert counter.update_producer() == first
    assert not counter.events[first].finish_event.query()
