"""Starts a gateway's workers, watches over them, passes signals on, and ends when they have.

It serves nothing and imports nothing that serves, so it is small, and no client can make it busy. Workers are forked
from it. One that ends unasked is started anew, after a pause that grows while its place keeps being lost; meanwhile the
others serve. The gateway ends when none of its workers can start, or when each of them keeps being lost: then nobody
is served anyway, and whoever started the gateway should see it. One that has said nothing for `SILENCE_SECONDS`, though
the supervisor ran all that time, is killed: clients whose connections the kernel gave to it would wait for good.

When the supervisor ends, however it does, the workers' sockets to it do too, and they drain as after SIGTERM.
"""

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from stageline_api.errors import UserError
from stageline_gateway.workers.channel import Channel
from stageline_gateway.workers.messages import (
    Alive,
    Ask,
    Begin,
    Drain,
    Failed,
    FrameError,
    FromWorker,
    Message,
    Serving,
    Stop,
    Told,
)
from stageline_gateway.workers.rounds import Rounds

logger = logging.getLogger(__name__)

SILENCE_SECONDS: Final = 30.0
START_SECONDS: Final = 120.0
"""How long a new worker may take to say its first word: on a busy machine what it imports takes long."""
STEADY_SECONDS: Final = 60.0
"""Who has served for so long is no worker that keeps being lost."""
SHORTEST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 10.0
MOST_LOSSES: Final = 6
"""In a row, of every place."""
END_MARGIN_SECONDS: Final = 8.0
"""What workers may take to end beyond their grace, before they are killed."""
_LOOK_SECONDS: Final = 0.5
_MOST_LAST_READS: Final = 64
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(slots=True)
class Place:
    """One worker after another."""

    index: int
    pid: int = 0
    """0 while there is none."""
    channel: Channel | None = None
    is_serving: bool = False
    failure: Failed | None = None
    """Why it can't start, if it said so."""
    began_at: float = 0.0
    silent_seconds: float = 0.0
    has_spoken: bool = False
    losses: int = 0
    """In a row."""
    times_lost: int = 0
    start_at: float = 0.0


@dataclass(slots=True)
class Supervisor:
    """`run_worker` is what a forked process does with its place and its end of the socket; it returns an exit code.

    `forget` is told of each place whose worker has ended, before the next is started.
    """

    workers: int
    run_worker: Callable[[int, socket.socket], int]
    forget: Callable[[int], None]
    on_serving: Callable[[], None]
    """Called once, when all serve."""
    grace_seconds: float
    """How long workers may take to end when they are asked to."""
    _places: list[Place] = field(init=False)
    _rounds: Rounds = field(init=False)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _signals: list[int] = field(default_factory=list)
    """Those that came and ask for the end; the first `_num_taken` were looked at."""
    _num_taken: int = 0
    _is_known: bool = False
    """Whether `on_serving` was called."""
    _is_draining: bool = False
    _kill_at: float | None = None
    """When those that were asked to end are killed; None while nobody was asked."""
    _failure: UserError | None = None
    _looked_at: float = 0.0

    def __post_init__(self) -> None:
        self._places = [Place(index) for index in range(self.workers)]
        self._rounds = Rounds(self._send, self._send)

    def run(self) -> int:
        """Until all workers have ended, which they do when they are asked to by a signal; returns the exit code.

        Raises:
            UserError: none of them can be made to serve.
        """
        reader, writer = socket.socketpair()
        for each in (reader, writer):
            each.setblocking(False)
        self._selector.register(reader, selectors.EVENT_READ)
        before = {number: signal.signal(number, self._note(signal.getsignal(number))) for number in _SIGNALS}
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._looked_at = time.monotonic()
        try:
            while not self._is_over:
                self._step(reader)
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)
        if self._failure is not None:
            raise self._failure
        return int(len(self._signals) > 1)

    @property
    def _is_over(self) -> bool:
        return self._kill_at is not None and not any(place.pid for place in self._places)

    def _note(self, inner: object) -> Callable[[int, object], None]:
        def handle(number: int, frame: object) -> None:
            if number in (signal.SIGUSR1, signal.SIGUSR2):
                if callable(inner):
                    inner(number, frame)
                self._signal_all(number)
            elif number != signal.SIGCHLD:  # that one only wakes
                self._signals.append(number)

        return handle

    def _step(self, woken: socket.socket) -> None:
        now = time.monotonic()
        if self._kill_at is None:
            for place in self._places:
                if not place.pid and now >= place.start_at:
                    self._start(place, now)
        for key, _ in self._selector.select(_LOOK_SECONDS):
            if key.fileobj is woken:
                with suppress(BlockingIOError):
                    woken.recv(4096)
            elif isinstance(key.data, Place):
                self._hear(key.data)
        while self._num_taken < len(self._signals):
            self._num_taken += 1
            self._end_by(self._signals[self._num_taken - 1], self._num_taken > 1)
        self._reap()
        self._look(time.monotonic())
        self._watch_unsent()

    def _start(self, place: Place, now: float) -> None:
        try:
            ours, theirs = socket.socketpair()
            pid = os.fork()
        except OSError as error:  # no memory or no process to be had: the others serve on
            logger.error("worker %d can't be started, which is tried again: %s", place.index, error.strerror)
            place.start_at = now + LONGEST_PAUSE_SECONDS
            return
        if not pid:
            self._be_worker(place.index, ours, theirs)
        theirs.close()
        place.pid, place.channel, place.began_at = pid, Channel(ours), now
        place.is_serving = place.has_spoken = False
        place.failure, place.silent_seconds = None, 0.0
        self._selector.register(ours, selectors.EVENT_READ, place)
        place.channel.send(Begin(self._rounds.last_of(place.index), place.times_lost))
        if self._is_draining:
            place.channel.send(Drain())

    def _be_worker(self, index: int, ours: socket.socket, theirs: socket.socket) -> None:
        """In the forked process, which never returns from here."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                # A person's Ctrl-C reaches the whole group, and the supervisor tells what follows from it.
                signal.signal(number, signal.SIG_DFL if number in (signal.SIGTERM, signal.SIGCHLD) else signal.SIG_IGN)
            ours.close()
            self._selector.close()
            for place in self._places:
                if place.channel is not None:
                    place.channel.close()
            code = self.run_worker(index, theirs)
        except BaseException:
            logger.exception("worker %d failed", index)
        finally:
            logging.shutdown()
            os._exit(code)

    def _hear(self, place: Place) -> None:
        if place.channel is None:
            return
        try:
            if place.channel.has_unsent:
                place.channel.flush()
            for message in place.channel.messages():
                self._take(place, message)
        except (EOFError, FrameError) as error:
            if isinstance(error, FrameError):
                logger.error("worker %d is killed, since it said what can't be understood: %s", place.index, error)
                self._kill(place)
            self._hang_up(place)

    def _take(self, place: Place, message: FromWorker) -> None:
        match message:
            case Alive():
                place.silent_seconds, place.has_spoken = 0.0, True
            case Serving():
                place.is_serving = True
                if not self._is_known and all(each.is_serving for each in self._places):
                    self._is_known = True
                    self.on_serving()
            case Failed():
                place.failure = message
            case Told():
                self._rounds.told(place.index, message)
            case Ask():
                serving = {each.index: each.is_serving and each.channel is not None for each in self._places}
                self._rounds.begin(place.index, message, serving, time.monotonic())
            case Drain():
                self._is_draining = True
                self._send_all(message)

    def _end_by(self, number: int, at_once: bool) -> None:
        if at_once:
            logger.warning("second signal: ending at once signal=%s", signal.Signals(number).name)
        self._ask_to_end(withdraw=number == signal.SIGTERM, at_once=at_once)

    def _ask_to_end(self, withdraw: bool, at_once: bool = False) -> None:
        grace_seconds = 1.0 if at_once else self.grace_seconds + END_MARGIN_SECONDS
        self._kill_at = min(time.monotonic() + grace_seconds, self._kill_at or float("inf"))
        self._send_all(Stop(withdraw, at_once))

    def _reap(self) -> None:
        for place in self._places:
            if place.pid:
                pid, status = os.waitpid(place.pid, os.WNOHANG)
                if pid:
                    self._has_ended(place, os.waitstatus_to_exitcode(status))

    def _has_ended(self, place: Place, code: int) -> None:
        for _ in range(_MOST_LAST_READS):  # what it said at last
            self._hear(place)
        self._hang_up(place)
        now, was_steady = time.monotonic(), place.is_serving and time.monotonic() - place.began_at > STEADY_SECONDS
        place.pid, place.is_serving = 0, False
        self.forget(place.index)
        self._rounds.has_ended(place.index)
        if self._kill_at is not None:
            return
        place.losses = 1 if was_steady else place.losses + 1
        place.times_lost += 1
        pause_seconds = min(SHORTEST_PAUSE_SECONDS * 2.0 ** (place.losses - 1), LONGEST_PAUSE_SECONDS)
        place.start_at = now + pause_seconds
        why = place.failure.message if place.failure else _words_of(code)
        self._give_up_if_all_are_lost(place, why)
        if self._failure is None:
            logger.error("worker %d was lost: %s; a new one is started in %g s", place.index, why, pause_seconds)

    def _give_up_if_all_are_lost(self, place: Place, why: str) -> None:
        is_first_start = not self._is_known
        if is_first_start and place.failure is not None:
            self._failure = UserError(place.failure.message, place.failure.exit_code)
        elif is_first_start or all(each.losses >= MOST_LOSSES and not each.is_serving for each in self._places):
            when = "while it started" if is_first_start else f"as all did {MOST_LOSSES} times in a row"
            self._failure = UserError(f"A worker of the gateway was lost {when}: {why}.")
        if self._failure is not None:
            self._ask_to_end(withdraw=False)

    def _look(self, now: float) -> None:
        """What only time shows."""
        elapsed_seconds, self._looked_at = now - self._looked_at, now
        self._rounds.expire(now)
        for place in self._places:
            if place.pid:
                # Time in which this process stood still as well (a frozen container) says nothing of the workers.
                place.silent_seconds += min(elapsed_seconds, 2 * _LOOK_SECONDS)
                most = SILENCE_SECONDS if place.has_spoken else START_SECONDS
                if place.silent_seconds > most and self._kill_at is None:
                    logger.error("worker %d is killed: it has said nothing for %g s", place.index, most)
                    self._kill(place)
                    place.silent_seconds = 0.0
                elif self._kill_at is not None and now > self._kill_at:
                    logger.error("worker %d is killed: it has not ended in its time", place.index)
                    self._kill(place)

    def _kill(self, place: Place) -> None:
        if place.pid:
            with suppress(ProcessLookupError):
                os.kill(place.pid, signal.SIGKILL)

    def _signal_all(self, number: int) -> None:
        for place in self._places:
            if place.pid and place.is_serving:
                with suppress(ProcessLookupError):
                    os.kill(place.pid, number)

    def _send_all(self, message: Message) -> None:
        for place in self._places:
            self._send(place.index, message)

    def _send(self, worker: int, message: Message) -> None:
        channel = self._places[worker].channel
        if channel is not None:
            channel.send(message)

    def _watch_unsent(self) -> None:
        for place in self._places:
            if place.channel is not None:
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if place.channel.has_unsent else 0)
                self._selector.modify(place.channel.socket, wanted, place)

    def _hang_up(self, place: Place) -> None:
        if place.channel is not None:
            self._selector.unregister(place.channel.socket)
            place.channel.close()
            place.channel = None


def _words_of(code: int) -> str:
    return f"it ended by {signal.Signals(-code).name}" if code < 0 else f"it ended with the exit code {code}"
