"""Slots of a device: batches that run, and batches that wait for a slot."""

from __future__ import annotations

from staged_pool.stages.device_slots import DeviceSlots
from staged_pool.stages.meter import StageMeter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def slots(count: int = 1) -> tuple[DeviceSlots, Clock]:
    clock = Clock()
    return DeviceSlots(count, 1, StageMeter("batch", count), clock), clock


def test_a_batch_holds_its_slot_for_the_block() -> None:
    device, clock = slots(2)
    with device.hold(10):
        assert (device.running, device.free, device.tokens) == (1, 1, 10)
        clock.now = 3.0
    assert (device.running, device.free, device.tokens) == (0, 2, 0)


def test_a_batch_ahead_gets_the_slot_when_the_earlier_one_ends() -> None:
    device, clock = slots()
    with device.hold(10) as first, device.hold(20) as second:
        assert (device.running, device.ahead, device.tokens) == (1, 1, 10)
        assert not device.may_go_ahead
        clock.now = 2.0
        assert device.end(first, 2.0) == 2.0
        assert (device.running, device.ahead, device.tokens) == (1, 0, 20)
        assert second.began_at == 2.0
        assert device.end(first, 9.0) == 0.0  # a second time it changes nothing
        clock.now = 5.0
        assert device.end(second, 5.0) == 3.0


def test_forwards_at_once_share_the_time_of_the_device() -> None:
    device, clock = slots(2)
    with device.hold(1) as first, device.hold(1) as second:
        clock.now = 4.0
        assert (device.end(first, 4.0), device.end(second, 4.0)) == (2.0, 2.0)


def test_a_batch_that_ran_before_its_slot_was_counted_has_the_time_of_its_forward() -> None:
    device, clock = slots()
    with device.hold(10) as first:
        with device.hold(20) as second:
            second.forward_begins(3.0)  # a device thread went on with it; the event loop has not heard of the end
            clock.now = 4.0
        assert second.began_at == 3.0
        device.end(first, 4.0)
    assert (device.running, device.tokens) == (0, 0)


def test_only_the_first_forward_marks_the_begin() -> None:
    device, _ = slots()
    with device.hold(1) as execution:
        execution.forward_begins(1.0)
        execution.forward_begins(2.0)
    assert (execution.first_at, execution.forwards) == (1.0, 2)


def test_utilization_is_the_part_of_the_slots_that_was_taken_of_late() -> None:
    device, clock = slots(2)
    with device.hold(1):
        clock.now = 60.0
        assert round(device.utilization, 3) == 0.5
        with device.hold(1):
            clock.now = 120.0
            assert round(device.utilization, 3) == 1.0
    clock.now = 180.0
    assert round(device.utilization, 3) == 0.0
    assert not device.held
