"""The producing side of a simulation: groups, their tasks, and the generators that they ask.

A task plays the turns of its plan: environment starts -> (ask -> sampled -> environment) ... -> ended.
Where a turn is asked for follows actors/router.py: the generator that holds the task's prefix, else the one
where its group is unless that is clearly busier, else the least busy (or, admitting by task, the one with
most room). When it is served follows cluster/admission.py and actors/gate.py, one machine per generator
("request" needs none: all goes straight to the engine).
"""

from collections.abc import Callable
from heapq import heappush
from math import inf

from cluster.admission import Admission, Limits, ToolWaits
from cluster.affinity import GROUP_SLACK, place
from cluster.sim.profile import GeneratorProfile
from cluster.sim.scenario import Plan, Scenario
from cluster.sim.service import Done, GeneratorModel
from cluster.sim.tasks import Event, Generator, Group, Task

KINDS = ("first_turn", "same_rank", "migrated", "post_sync")
REPORT_EVERY_S = 1.0  # a generator's health: pressure to its admission, room to the routers
WATCH_EVERY_S = 1.0  # tasks without a place are looked at: would another generator have them sooner?
AWAY = 1 << 60  # load of a generator that is not in the table


class Rollout:
    """``idle(now, index)`` and ``busy(now, index)`` tell the world that a generator ran dry or has work;
    ``ready(now, group)`` that a group ended."""

    def __init__(
        self,
        scenario: Scenario,
        heap: list[Event],
        serial: Callable[[], int],
        ready: Callable[[float, Group], None],
        idle: Callable[[float, int], None],
        busy: Callable[[float, int], None],
        ended: Callable[[float], None],
    ) -> None:
        self.scenario = scenario
        self.profile: GeneratorProfile = scenario.profile.generator
        self.generators: dict[int, Generator] = {}
        self.gone: list[GeneratorModel] = []  # of ranks that left: their counters stay
        self.version = 0  # newest published
        self.in_flight = 0  # trajectories in training groups
        self.groups_open = 0  # training groups
        self.looks = 0  # times a generator was looked at: no events
        self.kv: list[list[int]] = [[0, 0] for _ in KINDS]  # cached, prompt
        self.parks = 0
        self.largest = scenario.max_new_tokens or 256  # what an asker may grow; else the largest seen
        self.rerouted = 0  # tasks that went where there was room
        self.sampled = 0  # tokens, all
        self.discarded = 0  # tokens sampled in turns that had to start again
        self._heap = heap
        self._serial = serial
        self._ready = ready
        self._idle = idle
        self._busy = busy
        self._ended = ended  # a trajectory's environment is free
        self._loads: list[int] = []  # open requests by rank
        self._rooms: list[int] = []  # tokens that its ledger could promise, by rank, as last reported
        self._reported_at = 0.0
        self._orphans: list[Task] = []  # nobody generates
        self._waits = ToolWaits()
        self._gated = scenario.policy.admission != "request"
        self._by_task = scenario.policy.admission == "task"
        self._release = scenario.release
        self._answered, self._looked = self.on_environment, self.on_generator  # bound once: they are hot
        self._loose = scenario.policy.roles == "lending"  # verl clears sticky routes when a replica joins
        self._plan = scenario.workload.plan

    # -- generators come and go ---------------------------------------------------------------

    def join(self, now: float, index: int) -> Generator:
        """A generator with the newest weights enters the table."""
        admission = None
        if self._gated:
            admission = Admission(self._limits(), self._waits)
        generator = Generator(index, GeneratorModel(self.profile, now, self.version), admission)
        self.generators[index] = generator
        if index >= len(self._loads):
            more = index + 1 - len(self._loads)
            self._loads += [AWAY] * more
            self._rooms += [-AWAY] * more
        self._loads[index] = 0
        self._rooms[index] = admission.figures().free if admission is not None else 0
        orphans, self._orphans = self._orphans, []
        for task in orphans:
            self.ask(now, task)
        if self._loose:
            self._spread(now)
        return generator

    def _spread(self, now: float) -> None:
        """Requests that wait at busy engines go to the least busy one."""
        for generator in list(self.generators.values()):
            for key in reversed(generator.model.waiting_keys()):
                if self._loads[generator.index] <= min(self._loads) + GROUP_SLACK:
                    break
                task: Task = key  # type: ignore[assignment]
                if not generator.model.cancel(now, task):
                    continue
                del generator.tasks[task.name]
                self._loads[generator.index] -= 1
                self.ask(now, task)
            self.look(generator)

    def leave(self, now: float, index: int) -> None:
        """A generator leaves the table: turns in flight start again elsewhere, groups survive."""
        generator = self.generators.pop(index)
        generator.alive = False
        generator.wake = generator.timer = inf
        self._loads[index], self._rooms[index] = AWAY, -AWAY
        model = generator.model
        for done in model.advance(now):
            self._turn_done(now, generator, done)
        model.settle(now)
        self.gone.append(model)
        moved = list(generator.tasks.values())
        self.discarded += sum(model.sampled(task) for task in moved)
        generator.tasks.clear()
        generator.queued.clear()
        for task in moved:
            task.gen = None
            self.ask(now, task)

    def _limits(self) -> Limits:
        config, scenario = self.scenario.admission, self.scenario
        policy = scenario.policy.admission
        return Limits(
            capacity_tokens=self.profile.kv_tokens,
            headroom=config.headroom,
            max_tasks=config.max_tasks,
            diversity=config.diversity,
            prefill_tok_s=self.profile.prefill_tok_s,
            context=config.context,
            policy=policy,
            forget_s=inf,
        )

    # -- a task's life ------------------------------------------------------------------------

    def start(self, now: float, number: int, evaluation: bool = False) -> Group:
        """A group is admitted: its environments start."""
        scenario = self.scenario
        members = 1 if evaluation else scenario.group_size
        group = Group(number, members, now, evaluation)
        first = number if not evaluation else EVALUATION + number
        for member in range(members):
            plan: Plan = self._plan(scenario.seed, first, member)
            task = Task(f"{group.name}.{member}", group, plan.turns)
            group.kind = plan.kind
            heappush(self._heap, (now + plan.start_s, self._serial(), self._answered, task))
        if not evaluation:
            self.in_flight += members
            self.groups_open += 1
        return group

    def on_environment(self, now: float, task: Task) -> None:
        """The environment has answered: ask for the next turn."""
        self.ask(now, task)

    def ask(self, now: float, task: Task) -> None:
        """Ask a generator for the task's turn."""
        turn = task.turns[task.turn]
        tokens = (task.context if turn.kept < 0 else turn.kept) + turn.added
        generator = self._choose(now, task, tokens)
        if generator is None:
            self._orphans.append(task)
            return
        self._ask_at(now, task, generator, tokens)

    def _ask_at(self, now: float, task: Task, generator: Generator, tokens: int) -> None:
        task.gen = generator
        generator.tasks[task.name] = task
        self._loads[generator.index] += 1
        admission = generator.admission
        if admission is None:
            self._serve(now, generator, task)
            return
        if task.last is not generator:
            self._rooms[generator.index] -= tokens + self.largest
        group = task.group
        generator.queued[task.name] = now
        admission.ask(
            task.name, group=group.name, tokens=tokens, growth=self.largest, evaluation=group.evaluation,
            group_done=1.0 - group.left / group.members, kind=group.kind, now=now,
        )  # fmt: skip
        self._decide(now, generator)
        if generator.queued and self._by_task and not generator.watched:
            generator.watched = True
            heappush(self._heap, (now + WATCH_EVERY_S, self._serial(), self._watch, generator))

    def _choose(self, now: float, task: Task, tokens: int) -> Generator | None:
        last, loads = task.last, self._loads
        if last is not None and last.alive and not self._loose:
            return last
        least = min(loads, default=AWAY)
        if least >= AWAY:
            return None
        if last is not None and last.alive and loads[last.index] <= least + GROUP_SLACK:
            return last
        rooms = None
        if self._by_task:
            if now >= self._reported_at + REPORT_EVERY_S:
                self._tell_rooms(now)
            rooms = self._rooms
        home = task.group.home
        at = place(
            loads, rooms, tokens + self.largest, home.index if home is not None and home.alive else -1
        )
        task.group.home = generator = self.generators[at]
        return generator

    def _watch(self, now: float, generator: Generator) -> None:
        """Send those elsewhere that have waited longer than their context takes to compute again."""
        self.looks += 1
        generator.watched = False
        admission = generator.admission
        if admission is None or not generator.alive:
            return
        for name, since in list(generator.queued.items()):
            task = generator.tasks[name]
            turn = task.turns[task.turn]
            tokens = (task.context if turn.kept < 0 else turn.kept) + turn.added
            waited = now - since
            if (
                waited <= WATCH_EVERY_S
                or waited <= admission.recompute_s(tokens)
                or admission.has_place(name)
            ):
                continue
            if now >= self._reported_at + REPORT_EVERY_S:
                self._tell_rooms(now)
            rooms = self._rooms
            own, rooms[generator.index] = rooms[generator.index], -AWAY
            room = max(rooms)
            at = rooms.index(room)
            rooms[generator.index] = own
            if room < admission.footprint(name):
                continue
            admission.ended(name, now)
            del generator.tasks[name], generator.queued[name]
            self._loads[generator.index] -= 1
            self.rerouted += 1
            self._ask_at(now, task, self.generators[at], tokens)
        self._decide(now, generator)
        if generator.queued:
            generator.watched = True
            heappush(self._heap, (now + WATCH_EVERY_S, self._serial(), self._watch, generator))

    def _decide(self, now: float, generator: Generator) -> None:
        """Let the admission of a generator start and park."""
        admission, queued = generator.admission, generator.queued
        assert admission is not None
        start, park = admission.decide(now)
        if park:
            self.parks += len(park)
        for name in start:
            del queued[name]
            self._serve(now, generator, generator.tasks[name])
        if not queued:
            return
        timer = admission.next_decision(now)
        if timer is not None and timer < generator.timer:
            generator.timer = timer
            heappush(self._heap, (timer, self._serial(), self._on_timer, generator))

    def _on_timer(self, now: float, generator: Generator) -> None:
        self.looks += 1
        if generator.timer == now:
            generator.timer = inf
            self._decide(now, generator)

    def _report(self, now: float, generator: Generator, admission: Admission) -> None:
        generator.next_report = now + REPORT_EVERY_S
        model = generator.model
        admission.pressure(model.kv_used / self.profile.kv_tokens, model.preemptions, now)

    def _tell_rooms(self, now: float) -> None:
        """The table as routers get it: at most a second old."""
        self._reported_at = now
        for index, generator in self.generators.items():
            assert generator.admission is not None
            self._rooms[index] = generator.admission.figures().free

    def _serve(self, now: float, generator: Generator, task: Task) -> None:
        """The turn goes to the engine."""
        turn = task.turns[task.turn]
        kept = task.context if turn.kept < 0 else turn.kept
        group, model = task.group, generator.model
        was_idle = model.idle
        model.submit(
            now,
            task,
            task,
            kept + turn.added,
            turn.output,
            model.version,
            group=group,
            shared=task.first,
            prefix=kept if task.turn else -1,
            urgent=group.evaluation,
        )
        if was_idle:
            self._busy(now, generator.index)
        wake = model.next_event()
        if wake < generator.wake:
            generator.wake = wake
            heappush(self._heap, (wake, self._serial(), self._looked, generator))

    def on_generator(self, now: float, generator: Generator) -> None:
        """The engine has something, or had when this was entered."""
        self.looks += 1
        if generator.wake != now:
            return
        generator.wake = inf
        model = generator.model
        for done in model.advance(now):
            self._turn_done(now, generator, done)
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

    def _turn_done(self, now: float, generator: Generator, done: Done) -> None:
        task: Task = done.key  # type: ignore[assignment]
        group = task.group
        turn = task.turns[task.turn]
        kept = task.context if turn.kept < 0 else turn.kept
        if turn.kept >= 0 and task.row:
            group.rows.append(task.row)
            task.row = kept
        prompt = kept + turn.added
        last = task.last
        if last is None:
            kind = 0
        elif last is not generator:
            kind = 2
        else:
            kind = 1 if task.done_version == done.first_version else 3
        hit = self.kv[kind]
        hit[0] += done.cached_tokens
        hit[1] += prompt
        output = turn.output
        if output > self.largest and not self.scenario.max_new_tokens:
            self.largest = output
        self.sampled += output
        group.sampled += output
        if done.first_version < group.oldest:
            group.oldest = done.first_version
        task.row += turn.added + output
        task.context = prompt + output
        task.last, task.gen, task.done_version = generator, None, done.last_version
        del generator.tasks[task.name]
        if generator.alive:
            self._loads[generator.index] -= 1
        task.turn += 1
        admission = generator.admission
        ended = task.turn == len(task.turns)
        if admission is not None and generator.alive:
            if ended:
                admission.ended(task.name, now)
                if self._release:
                    generator.model.release(now, task)
            else:
                admission.turn_ended(task.name, task.context, now, turn.tool)
            if now >= generator.next_report:
                self._report(now, generator, admission)
            self._decide(now, generator)
        if not ended:
            heappush(self._heap, (now + turn.env_s, self._serial(), self._answered, task))
            return
        group.rows.append(task.row)
        group.left -= 1
        if not group.evaluation:
            self.in_flight -= 1
        if group.left == 0:
            group.ready_at = now
            group.train_tokens = sum(group.rows)
            self.groups_open -= not group.evaluation
            self._ready(now, group)
        elif self.scenario.env_slots:
            self._ended(now)

    # -- weights ------------------------------------------------------------------------------

    def pause(self, now: float) -> None:
        """All generators stand still to load weights."""
        for generator in self.generators.values():
            generator.model.pause(now)

    def sync(self, now: float, version: int) -> None:
        """All generators have loaded ``version`` and go on."""
        self.version = version
        keep = self.scenario.policy.kv_on_sync == "keep"
        for generator in list(self.generators.values()):
            model = generator.model
            model.sync(now, version, keep)
            model.resume(now)
            if generator.admission is not None:
                generator.admission.synced(now)
                self._decide(now, generator)
            self.look(generator)

    def acknowledged(self) -> int:
        """Lowest version among the generators; -1 if there is none."""
        return min((g.model.version for g in self.generators.values()), default=-1)

    def models(self) -> list[GeneratorModel]:
        """Every engine that ever ran, for the counters."""
        return [*self.gone, *(g.model for g in self.generators.values())]


EVALUATION = 1_000_000_000
"""Evaluation tasks are planned from group numbers above this one: never the same as training tasks."""
