"""When a turn is served: the admission of each generator, and the looks at its engine that the world enters.

The decisions are those of cluster/admission.py as actors/gate.py makes them, one machine per generator
("request" needs none: all goes straight to the engine). An engine is looked at when it has said that
something ends; a look that finds nothing, since another one came first, is no event.
"""

from collections.abc import Callable
from heapq import heappush
from math import inf

from cluster.sim.engine_request import EngineRequest
from cluster.sim.tasks import Event, Generator, Task

REPORT_EVERY_S = 1.0  # a generator's health: pressure to its admission


class Serving:
    """``turn_done(now, generator, request)`` takes what an engine has finished; ``idle(now, index)`` and
    ``busy(now, index)`` are told that a generator ran dry or has work."""

    def __init__(
        self,
        heap: list[Event],
        serial: Callable[[], int],
        turn_done: Callable[[float, Generator, EngineRequest], None],
        idle: Callable[[float, int], None],
        busy: Callable[[float, int], None],
    ) -> None:
        self.looks = 0  # times a generator was looked at: no events
        self.parks = 0
        self._heap = heap
        self._serial = serial
        self._turn_done = turn_done
        self._idle = idle
        self._busy = busy
        self._looked, self._timed = self._on_generator, self._on_timer  # bound once: they are hot

    def decide(self, now: float, generator: Generator) -> None:
        """Let the admission of a generator start and park."""
        admission, queued = generator.admission, generator.queued
        assert admission is not None
        start, park = admission.decide(now)
        if park:
            self.parks += len(park)
        for name in start:
            del queued[name]
            self.serve(now, generator, generator.tasks[name])
        if not queued:
            return
        timer = admission.next_decision(now)
        if timer is not None and timer < generator.timer:
            generator.timer = timer
            heappush(self._heap, (timer, self._serial(), self._timed, generator))

    def _on_timer(self, now: float, generator: Generator) -> None:
        self.looks += 1
        if generator.timer == now:
            generator.timer = inf
            self.decide(now, generator)

    def ended(self, now: float, generator: Generator) -> None:
        """A turn has ended here, and the admission knows: report the engine's health if due, and decide."""
        admission, model = generator.admission, generator.model
        if admission is None:
            return
        if now >= generator.next_report:
            generator.next_report = now + REPORT_EVERY_S
            admission.pressure(model.kv_used / model.profile.kv_tokens, model.preemptions, now)
        if generator.queued:
            self.decide(now, generator)
        else:
            self.parks += len(admission.decide(now).park)

    def serve(self, now: float, generator: Generator, task: Task) -> None:
        """The turn goes to the engine."""
        group, model = task.group, generator.model
        was_idle = model.idle
        model.submit(
            now,
            task,
            task,
            task.prompt,
            task.asked.output,
            model.version,
            group=group,
            shared=task.first,
            prefix=task.kept if task.turn else -1,
            urgent=group.evaluation,
        )
        if was_idle:
            self._busy(now, generator.index)
        wake = model.next_event()
        if wake < generator.wake:
            generator.wake = wake
            heappush(self._heap, (wake, self._serial(), self._looked, generator))

    def _on_generator(self, now: float, generator: Generator) -> None:
        """The engine has something, or had when this was entered."""
        self.looks += 1
        if generator.wake != now:
            return
        generator.wake = inf
        model = generator.model
        for request in model.advance(now):
            self._turn_done(now, generator, request)
        wake = model.next_event()
        if wake < generator.wake:
            generator.wake = wake
            heappush(self._heap, (wake, self._serial(), self._looked, generator))
        elif wake == inf and model.idle and generator.alive:
            self._idle(now, generator.index)

    def look(self, generator: Generator) -> None:
        """Enter the engine's next event."""
        wake = generator.model.next_event()
        if wake < generator.wake:
            generator.wake = wake
            heappush(self._heap, (wake, self._serial(), self._looked, generator))
