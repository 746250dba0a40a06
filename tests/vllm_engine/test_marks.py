"""When changes of state take effect on a device that runs behind the host, with a clock of its own."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from stageline_vllm.plugin.marks import DeviceMarks


@dataclass
class Device:
    """A device's stream: work is queued, and events are passed when the work before them is done."""

    now: int = 0
    """The host's clock."""
    busy_until: int = 0
    drift: float = 0.0
    """By how much the device's own clock is fast."""
    passed: dict[int, int] = field(default_factory=dict)
    counted: int = 0

    def queue(self, nanoseconds: int) -> None:
        self.busy_until = max(self.busy_until, self.now) + nanoseconds

    def new_event(self) -> "Event":
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.at: int | None = None

    def record(self) -> None:
        self.at = max(self._device.busy_until, self._device.now)

    def query(self) -> bool:
        assert self.at is not None
        return self.at <= self._device.now

    def elapsed_time(self, end_event: "Event", /) -> float:
        assert self.at is not None
        assert end_event.at is not None
        return (end_event.at - self.at) * (1 + self._device.drift) / 1e6


def test_a_change_holds_from_when_the_device_gets_there() -> None:
    device, seen = Device(), list[tuple[str, int | None]]()
    marks = DeviceMarks(device.new_event, lambda: device.now)
    marks.make(lambda at: seen.append(("begin", at)))
    device.queue(5_000_000)
    marks.make(lambda at: seen.append(("forward over", at)))
    device.queue(2_000_000)
    marks.make(lambda at: seen.append(("sampled", at)))
    device.now = 4_000_000
    marks.apply_passed()
    assert seen == [("begin", 0)]
    device.now = 9_000_000
    marks.apply_passed()
    assert seen == [("begin", 0), ("forward over", 5_000_000), ("sampled", 7_000_000)]


def test_what_the_device_has_not_passed_is_not_told() -> None:
    device, seen = Device(), list[str]()
    marks = DeviceMarks(device.new_event, lambda: device.now)
    marks.make(lambda _: seen.append("begin"))
    device.queue(10**18)
    marks.make(lambda _: seen.append("over"))
    device.now = 10**12
    marks.apply_passed()
    assert seen == ["begin"]


@given(
    work=st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 2 * 10**7)), min_size=1, max_size=60),
    drift=st.floats(-0.2, 0.2),
)
def test_moments_ascend_and_stay_between_record_and_sight_however_the_device_clock_drifts(
    work: list[tuple[int, int]], drift: float
) -> None:
    device, seen = Device(drift=drift), list[tuple[int, int, int]]()
    marks = DeviceMarks(device.new_event, lambda: device.now)
    for computing, host in work:
        recorded = device.now

        def change(at: int | None, recorded: int = recorded) -> None:
            assert at is not None
            seen.append((recorded, at, device.now))

        marks.make(change)
        device.queue(computing)
        device.now += host
        marks.apply_passed()
    device.now = device.busy_until
    marks.apply_passed()
    assert len(seen) == len(work)
    assert [at for _, at, _ in seen] == sorted(at for _, at, _ in seen)
    assert all(recorded <= at <= sight for recorded, at, sight in seen)


def test_a_drifting_clock_is_put_right_whenever_the_device_was_idle() -> None:
    """A day of steps on a clock that is 1 % slow: the last step's beginning is where the host queued it."""
    device, begins = Device(drift=-0.01), list[int]()
    marks = DeviceMarks(device.new_event, lambda: device.now)
    for _ in range(200):
        marks.make(lambda at: begins.append(at or 0))
        device.queue(5_000_000)
        device.now += 60_000_000
    marks.apply_passed()
    assert begins[-1] == 199 * 60_000_000
