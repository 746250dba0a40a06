"""A seeded interleaving of tasks in one process: one baton, and at each turn a seeded draw of who takes it.

A task is a thread that runs only while it holds the baton and gives it away at its own turning points, so any code
that blocks through `wait_until` can be a task unchanged. An event is something that happens by itself once its
condition holds: a message arrives, a client leaves. Weights, redrawn now and then, let one participant lag far behind
the others, which evenly drawn turns almost never do. Everything follows from the seed: no clock is read and nothing
sleeps. When neither a task nor an event can go on and a task has not ended, that is a deadlock, at once.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

WEIGHTS = (1.0, 1.0, 1.0, 0.2, 0.01)
"""What a participant's share of the turns is drawn from."""
REDRAW_TURNS = 48
"""Mean number of turns between two draws of the weights."""
MAX_TURNS = 200_000
"""More turns than this are a livelock."""


T = TypeVar("T")


class DeadlockError(Exception):
    """Nobody can go on; says what each task waits for."""


class _AbandonedError(BaseException):
    """Unwinds a task when another one has failed; not an `Exception`, so that no task mistakes it for its own."""


@dataclass(slots=True)
class _Event:
    name: str
    ready: Callable[[], bool]
    fire: Callable[[], None]
    weight: float = 1.0


@dataclass(slots=True)
class _Task:
    name: str
    body: Callable[[], None]
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is not this task's turn."""
    may_run: Callable[[], bool] | None = None
    """None: whenever it is drawn."""
    waits_for: str = ""
    ended: bool = False
    weight: float = 1.0

    @property
    def ready(self) -> bool:
        """Whether the task can go on now."""
        return not self.ended and (self.may_run is None or self.may_run())

    @property
    def standing(self) -> str:
        """Where the task stands, in words."""
        if self.ended:
            return "ended"
        return "could go on" if self.may_run is None else f"waits for {self.waits_for}"


class Interleaving:
    """Tasks and events of one run. Set up, then `run` once."""

    def __init__(self, seed: int, *, max_turns: int = MAX_TURNS) -> None:
        self._random = Random(seed)
        self._max_turns = max_turns
        self._tasks: list[_Task] = []
        self._events: list[_Event] = []
        self._by_thread: dict[int, _Task] = {}
        self._failure: BaseException | None = None
        self._everyone_ended = threading.Event()
        self.turns = 0
        """Turns taken so far: the only clock there is."""

    def add_task(self, name: str, body: Callable[[], None]) -> None:
        """A task, before `run`; it runs in a thread of its own."""
        self._tasks.append(_Task(name, body))

    def add_event(self, name: str, ready: Callable[[], bool], fire: Callable[[], None]) -> None:
        """Something that may happen, any number of times, whenever `ready()`; `fire` must not block."""
        self._events.append(_Event(name, ready, fire))

    def run(self) -> None:
        """Run all tasks to their ends and let all events happen that still can.

        Raises:
            DeadlockError: nobody could go on, or there was no end in sight.
            Exception: the first that a task or an event raised.
        """
        threads = [threading.Thread(target=self._live, args=(task,), daemon=True) for task in self._tasks]
        for task, thread in zip(self._tasks, threads, strict=True):
            task.turn.acquire()
            thread.start()
        self._hand_on()
        self._everyone_ended.wait()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def choose(self, options: Sequence[T]) -> T:
        """Draw one of `options` (not empty) from the run's randomness."""
        return self._random.choice(options)

    def give_way(self) -> None:
        """Called by a task that could go on: others may go first."""
        self.wait_until(None, "")

    def wait_until(self, condition: Callable[[], bool] | None, waits_for: str) -> None:
        """Called by a task: return in a turn of its own in which `condition()` holds."""
        task = self._by_thread[threading.get_ident()]
        task.may_run = condition
        task.waits_for = waits_for
        if self._hand_on() is not task:
            task.turn.acquire()
        if self._failure is not None:
            raise _AbandonedError

    def _live(self, task: _Task) -> None:
        self._by_thread[threading.get_ident()] = task
        task.turn.acquire()
        try:
            if self._failure is None:
                task.body()
        except _AbandonedError:
            pass
        except BaseException as error:
            self._fail(error)
        task.ended = True
        self._hand_on()

    def _hand_on(self) -> _Task | None:
        """Let events happen and draw the next task; None when all have ended. The caller must hold the baton."""
        try:
            task = self._draw() if self._failure is None else None
        except BaseException as error:
            self._fail(error)
            task = None
        if self._failure is not None:
            task = next((task for task in self._tasks if not task.ended), None)
        if task is None:
            self._everyone_ended.set()
        elif self._by_thread.get(threading.get_ident()) is not task:
            task.turn.release()
        return task

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _draw(self) -> _Task | None:
        while True:
            self.turns += 1
            if self.turns > self._max_turns:
                raise DeadlockError(f"no end in sight after {self._max_turns} turns\n{self.report()}")
            self._redraw_weights()
            candidates: list[_Task | _Event] = [task for task in self._tasks if task.ready]
            candidates += [event for event in self._events if event.ready()]
            if not candidates and all(task.ended for task in self._tasks):
                return None
            if not candidates:
                raise DeadlockError(f"nobody can go on\n{self.report()}")
            (chosen,) = self._random.choices(candidates, [candidate.weight for candidate in candidates])
            if isinstance(chosen, _Task):
                return chosen
            chosen.fire()

    def _redraw_weights(self) -> None:
        if self.turns == 1 or self._random.randrange(REDRAW_TURNS) == 0:
            participants: list[_Task | _Event] = [*self._tasks, *self._events]
            for participant in participants:
                participant.weight = self._random.choice(WEIGHTS)

    def report(self) -> str:
        """What each task waits for, one a line."""
        return "\n".join(f"{task.name}: {task.standing}" for task in self._tasks)
