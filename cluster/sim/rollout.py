"""The producing side of a simulation: groups, their tasks, and the generators that they ask.

A task plays the turns of its plan: environment starts -> (ask -> sampled -> environment) ... -> ended.
Where a turn is asked for is in table.py, when it is served in serving.py.
"""

from collections.abc import Callable
from heapq import heappush
from math import inf

from cluster.admission import Admission, Limits, ToolWaits
from cluster.sim.engine_request import EngineRequest
from cluster.sim.profile import GeneratorProfile
from cluster.sim.scenario import Plan, Scenario
from cluster.sim.service import GeneratorModel
from cluster.sim.serving import Serving
from cluster.sim.table import Table
from cluster.sim.tasks import Event, Generator, Group, Task

KINDS = ("first_turn", "same_rank", "migrated", "post_sync")
WATCH_EVERY_S = 1.0  # tasks without a place are looked at: would another generator have them sooner?
EVALUATION = 1_000_000_000
"""Evaluation tasks are planned from group numbers above this one: never the same as training tasks."""


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
        policy = scenario.policy
        self._gated = policy.admission != "request"
        self._by_task = policy.admission == "task"
        # verl clears sticky routes when a replica joins
        self.table = Table(rooms=self._by_task, loose=policy.roles == "lending")
        self.serving = Serving(heap, serial, self._turn_done, idle, busy)
        self.generators = self.table.generators
        self.gone: list[GeneratorModel] = []  # of ranks that left: their counters stay
        self.version = 0  # newest published
        self.in_flight = 0  # trajectories in training groups
        self.groups_open = 0  # training groups
        self.kv: list[list[int]] = [[0, 0] for _ in KINDS]  # cached, prompt
        self.largest = scenario.max_new_tokens or 256  # what an asker may grow; else the largest seen
        self.rerouted = 0  # tasks that went where there was room
        self.sampled = 0  # tokens, all
        self.grown = 0  # tokens that training rows gained
        self.discarded = 0  # tokens sampled in turns that had to start again
        self._watches = 0
        self._demand_s = 0.0  # of generators that left
        self._heap = heap
        self._serial = serial
        self._ready = ready
        self._ended = ended  # a trajectory's environment is free
        self.turned: Callable[[float, Group, int], None] | None = None  # hears of training turns that ended
        self._orphans: list[Task] = []  # nobody generates
        self._waits = ToolWaits()
        self._release = scenario.release
        self._grows = not scenario.max_new_tokens
        self._answered = self.ask  # bound once: it is hot

    @property
    def looks(self) -> int:
        """Entries of the world's queue that were no events."""
        return self.serving.looks + self._watches

    @property
    def parks(self) -> int:
        """Tasks that lost their place."""
        return self.serving.parks

    def queued(self) -> float:
        """Requests that wait for a place at generators, per running one."""
        running = sum(one.model.running for one in self.generators.values())
        queued = sum(one.model.waiting + len(one.queued) for one in self.generators.values())
        return queued / max(1, running)

    def demand_s(self, now: float) -> float:
        """Generator-seconds times the share of KV memory that tasks wanted, until now."""
        told = [one.admission.demand_s(now) for one in self.generators.values() if one.admission is not None]
        return self._demand_s + sum(told)

    # -- generators come and go ---------------------------------------------------------------

    def join(self, now: float, index: int) -> Generator:
        """A generator with the newest weights enters the table."""
        admission = None
        if self._gated:
            admission = Admission(self._limits(), self._waits)
        generator = Generator(index, GeneratorModel(self.profile, now, self.version), admission)
        self.table.enter(generator)
        orphans, self._orphans = self._orphans, []
        for task in orphans:
            self.ask(now, task)
        if self.table.loose:
            self._spread(now)
        return generator

    def _spread(self, now: float) -> None:
        """Requests that wait at busy engines go to the least busy one."""
        table = self.table
        for generator in list(self.generators.values()):
            for key in reversed(generator.model.waiting_keys()):
                if not table.crowded(generator):
                    break
                task: Task = key  # type: ignore[assignment]
                if not generator.model.cancel(now, task):
                    continue
                del generator.tasks[task.name]
                table.loads[generator.index] -= 1
                self.ask(now, task)
            self.serving.look(generator)

    def leave(self, now: float, index: int) -> None:
        """A generator leaves the table: turns in flight start again elsewhere, groups survive."""
        generator = self.table.leave(index)
        generator.alive = False
        generator.wake = generator.timer = inf
        model = generator.model
        for request in model.advance(now):
            self._turn_done(now, generator, request)
        model.settle(now)
        self.gone.append(model)
        if generator.admission is not None:
            self._demand_s += generator.admission.demand_s(now)
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
            plan: Plan = scenario.workload.plan(scenario.seed, first, member)
            task = Task(f"{group.name}.{member}", group, plan.turns)
            group.kind = plan.kind
            task.began = now + plan.start_s
            heappush(self._heap, (task.began, self._serial(), self._answered, task))
        if not evaluation:
            self.in_flight += members
            self.groups_open += 1
        return group

    def ask(self, now: float, task: Task) -> None:
        """The environment has answered (or a generator is gone): ask for the task's turn."""
        task.asked = turn = task.turns[task.turn]
        kept = turn.kept
        task.kept = kept = task.context if kept < 0 else kept
        task.prompt = kept + turn.added
        generator = self.table.choose(now, task, task.prompt + self.largest)
        if generator is None:
            self._orphans.append(task)
            return
        self._ask_at(now, task, generator)

    def _ask_at(self, now: float, task: Task, generator: Generator) -> None:
        task.gen = generator
        generator.tasks[task.name] = task
        self.table.loads[generator.index] += 1
        admission = generator.admission
        if admission is None:
            self.serving.serve(now, generator, task)
            return
        if task.last is not generator:
            self.table.rooms[generator.index] -= task.prompt + self.largest
        group = task.group
        generator.queued[task.name] = now
        admission.ask(
            task.name, group=group.name, tokens=task.prompt, growth=self.largest, evaluation=group.evaluation,
            group_done=1.0 - group.left / group.members, kind=group.kind,
            tool=task.turns[task.turn - 1].tool if task.turn else "", waited=now - task.began, now=now,
        )  # fmt: skip
        self.serving.decide(now, generator)
        if generator.queued and self._by_task and not generator.watched:
            self._watch_later(now, generator)

    def _watch_later(self, now: float, generator: Generator) -> None:
        generator.watched = True
        heappush(self._heap, (now + WATCH_EVERY_S, self._serial(), self._watch, generator))

    def _watch(self, now: float, generator: Generator) -> None:
        """Send those elsewhere that have waited longer than their context takes to compute again."""
        self._watches += 1
        generator.watched = False
        admission = generator.admission
        if admission is None or not generator.alive:
            return
        for name, since in list(generator.queued.items()):
            task = generator.tasks[name]
            waited = now - since
            if (
                task.moved == task.turn
                or waited <= WATCH_EVERY_S
                or waited <= admission.recompute_s(task.prompt)
                or admission.has_place(name)
            ):
                continue
            other = self.table.elsewhere(now, generator, admission.footprint(name))
            if other is None:
                continue
            admission.ended(name, now)
            del generator.tasks[name], generator.queued[name]
            self.table.loads[generator.index] -= 1
            self.rerouted += 1
            task.moved = task.turn
            self._ask_at(now, task, other)
        self.serving.decide(now, generator)
        if generator.queued:
            self._watch_later(now, generator)

    def _turn_done(self, now: float, generator: Generator, request: EngineRequest) -> None:
        """The engine has sampled a turn: its environment works on it, or the task is over."""
        task: Task = request.key  # type: ignore[assignment]
        turn = task.asked
        self._book(task, generator, request)
        if self.turned is not None and not task.group.evaluation:
            self.turned(now, task.group, turn.added + turn.output)
        del generator.tasks[task.name]
        admission = generator.admission
        ended = task.turn == len(task.turns)
        if generator.alive:
            self.table.loads[generator.index] -= 1
            if admission is not None:
                if ended:
                    admission.ended(task.name, now)
                    if self._release:
                        generator.model.release(now, task)
                else:
                    admission.turn_ended(task.name, task.context, now)
                self.serving.ended(now, generator)
        if ended:
            self._task_ended(now, task)
        else:
            task.began = now + turn.env_s
            heappush(self._heap, (task.began, self._serial(), self._answered, task))

    def _book(self, task: Task, generator: Generator, request: EngineRequest) -> None:
        """Count the turn: tokens, cache hits, versions, training rows."""
        group, turn, last = task.group, task.asked, task.last
        before = task.row
        if turn.kept >= 0 and task.row:
            group.rows.append(task.row)
            task.row, before = task.kept, 0
        if last is None:
            kind = 0
        elif last is not generator:
            kind = 2
        else:
            kind = 1 if task.done_version == request.first_version else 3
        hit = self.kv[kind]
        hit[0] += request.cached_tokens
        hit[1] += task.prompt
        output = turn.output
        if output > self.largest and self._grows:
            self.largest = output
        self.sampled += output
        group.sampled += output
        if request.first_version < group.oldest:
            group.oldest = request.first_version
        task.row += turn.added + output
        if not group.evaluation:
            self.grown += task.row - before
        task.context = task.prompt + output
        task.last, task.gen, task.done_version = generator, None, request.last_version
        task.turn += 1

    def _task_ended(self, now: float, task: Task) -> None:
        group = task.group
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
                self.serving.decide(now, generator)
            self.serving.look(generator)

    def acknowledged(self) -> int:
        """Lowest version among the generators; -1 if there is none."""
        return min((g.model.version for g in self.generators.values()), default=-1)

    def models(self) -> list[GeneratorModel]:
        """Every engine that ever ran, for the counters."""
        return [*self.gone, *(g.model for g in self.generators.values())]
