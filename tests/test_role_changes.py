"""Rank moves in a running controller: fake ports, a scripted loop, every way a move can end."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace
from test_controller import ScriptedGenerator, pull, task, weights
from test_fleet import Fakes

from cluster.config import Config, build
from cluster.controller import Controller
from cluster.errors import ConfigError
from cluster.memory import MemoryQueue
from cluster.messages import Barrier, GeneratorHealth, Move, Moved, RankRow
from cluster.roles import RoleMap

COSTS = {"generator>learner": 0.01, "learner>generator": 0.01, "generator>scorer": 0.01,
         "scorer>generator": 0.01}  # fmt: skip
LIFE = ("move_planned", "move_begun", "move_made", "move_done")
SCORING = {"objective": {"kl_coef": 0.1}}


def config(learners: int = 2, generators: int = 2, scorers: int = 0, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "env": {"name": "coin"},
        "model": {"path": "/nowhere"},
        "run": {"groups_per_step": 2, "group_size": 2, "steps": 1000},
        "generator": {"replicas": generators},
        "learner": {"ranks": learners},
        **({"scorer": {"replicas": scorers}, **SCORING} if scorers else {}),
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return build(tree)


class Busy(ScriptedGenerator):
    """It says that it was busy for a share of the time since the last report."""

    share = 1.0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.since = time.monotonic()

    async def health(self) -> GeneratorHealth:
        since, self.since = self.since, time.monotonic()
        return replace(await super().health(), busy=((since, since + self.share * (self.since - since)),))


class Idle(Busy):
    """It was idle most of the time."""

    share = 0.1


class Job:
    """A controller with a scripted loop and driver; it can be killed and started again."""

    def __init__(self, settings: Config) -> None:
        self.config = settings
        self.queue = MemoryQueue()
        self.fakes = Fakes()
        self.unready: set[str] = set()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.step = 0
        self.controller: Controller
        self._running: asyncio.Task[None] | None = None

    async def ready(self, name: str) -> bool:
        if name in self.unready:
            raise ConnectionError(f"{name} is not there yet")
        return True

    async def start(self, session: str = "") -> None:
        def trace(event: str, fields: dict[str, Any]) -> None:
            self.events.append((event, fields))

        self.controller = Controller(self.config, self.queue, task, self.fakes, trace, self.ready, COSTS)
        await self.controller.start(session)
        self._running = asyncio.create_task(self.controller.run())

    async def kill(self) -> None:
        """Nothing more is written, whatever was under way."""
        assert self._running is not None
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running

    async def barrier(self, **told: Any) -> Barrier:
        self.step += 1
        return await self.again(**told)

    async def again(self, **told: Any) -> Barrier:
        facts = {"step": self.step, "groups": 2, "learners": 1, "scorers": 0, "waits": {}, **told}
        return await self.controller.barrier(facts)

    async def until_move(self, limit: int = 40) -> Barrier:
        """Steps until one brings a move."""
        for _ in range(limit):
            answer = await self.barrier()
            if answer.move is not None:
                return answer
            await asyncio.sleep(0.05)
        raise AssertionError(f"no move in {limit} steps: {self.names()}")

    async def table(self, *names: str) -> None:
        """Waits until exactly these generators are healthy members."""
        while {r.name for r in self.controller.table().generators if r.healthy} != set(names):
            await asyncio.sleep(0.01)
        assert {r.name for r in self.controller.table().generators} == set(names)

    async def table_is_ill(self) -> None:
        """Waits until no generator is healthy."""
        while any(row.healthy for row in self.controller.table().generators):
            await asyncio.sleep(0.01)

    def names(self) -> list[str]:
        return [event for event, _ in self.events if event.startswith(("move", "ranks"))]

    def counts(self) -> dict[str, int]:
        return {role: n for role, n in self.controller.elastic.map.counts().items() if n}

    async def journal(self) -> RoleMap:
        raw = await self.queue.get("roles")
        assert raw is not None
        return RoleMap.decode(raw)


@asynccontextmanager
async def running(settings: Config, make: type[ScriptedGenerator] = ScriptedGenerator) -> AsyncIterator[Job]:
    job = Job(settings)
    job.fakes.make = make
    await job.start()
    try:
        async with asyncio.timeout(30):
            yield job
    finally:
        await job.kill()


async def test_a_static_job_writes_no_journal_and_answers_barriers_with_nothing() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        answers = [await job.barrier(waits={"data": 100.0}) for _ in range(5)]
        assert {answer.move for answer in answers} == {None}
        assert {answer.groups for answer in answers} == {0}
        assert [row.role for row in answers[0].roles.ranks] == ["learner"] * 2 + ["generator"] * 2
        assert await job.queue.get("roles") is None and await job.queue.get("ranks") is None
        assert job.names() == []
        wanted = await job.controller.wanted()
        assert wanted.actors == ("learner-0", "learner-1", "generator-0", "generator-1")
        assert (wanted.workers, wanted.ranks) == (1, 4)


async def test_a_learner_becomes_a_generator_and_comes_back() -> None:
    async with running(config()) as job:
        await job.controller.publish(weights(1))
        await job.controller.scale(generators=3)
        answer = await job.until_move()
        move = answer.move
        assert move is not None
        assert (move.rank, move.source, move.target, move.reason) == (1, "learner", "generator", "target")
        assert answer.roles.epoch == move.epoch == (await job.journal()).epoch
        name = job.controller.elastic.name("generator", 1)
        assert name not in {row.name for row in job.controller.table().generators}, "the loop is not done"
        assert (await job.again()).move == move, "asked again, the answer is the same"
        await job.controller.moved(Moved(move=move.id, ok=True, parts={"gather": 0.1}))
        await job.table("generator-0", "generator-1", name)
        assert job.fakes.ports[name].version == 1
        assert job.counts() == {"generator": 3, "learner": 1}
        await job.controller.moved(Moved(move=move.id, ok=False, error="late"))
        assert job.counts() == {"generator": 3, "learner": 1}, "an answer to an old move is ignored"
        ignored = next(fields for event, fields in job.events if event == "move_report_ignored")
        assert ignored == {"move": move.id, "ok": False, "why": "no move is committed: the map is settled"}

        await job.controller.scale(learners=2)
        back = (await job.until_move()).move
        assert back is not None and (back.source, back.target) == ("generator", "learner")
        left = job.controller.elastic.name("generator", back.rank)
        assert left not in {row.name for row in job.controller.table().generators}, "left before the resize"
        for ok in (True, False):
            await job.controller.moved(Moved(move=move.id, ok=ok))
            assert (await job.journal()).move == back, "a late report is not taken for the present move"
        await job.controller.moved(Moved(move=back.id, ok=True))
        assert job.counts() == {"generator": 2, "learner": 2}
        told = [(event, fields["move"]) for event, fields in job.events if event in LIFE]
        assert told == [(event, made.id) for made in (move, back) for event in LIFE]
        switches = (await job.controller.status())["roles"]["switches"]
        assert [(line["id"], line["state"]) for line in switches] == [(move.id, "done"), (back.id, "done")]
        assert all(line["cost_s"] >= 0 for line in switches)
        metrics = (await job.controller.step_facts({"step": job.step}))["switches"]
        assert set(metrics["switch_seconds"]) == {"learner>generator", "generator>learner"}


async def test_a_failed_resize_is_undone_and_the_generator_is_back() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.scale(learners=3)
        move = (await job.until_move()).move
        assert move is not None and move.rank == 3
        await job.table("generator-0")
        epoch = job.controller.elastic.map.epoch
        await job.controller.moved(Moved(move=move.id, ok=False, error="out of memory"))
        assert job.counts() == {"generator": 2, "learner": 2}
        assert job.controller.elastic.map.epoch > epoch
        await job.table("generator-0", "generator-1")
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert undone["error"] == "out of memory"
        answers = [await job.barrier() for _ in range(4)]
        assert {answer.move for answer in answers} == {None}, "it backs off"


async def test_a_new_role_that_never_gets_ready_is_given_up() -> None:
    settings = config(elastic={"prepare_timeout_s": 1.5})
    async with running(settings) as job:
        await job.table("generator-0", "generator-1")
        job.unready.add("learner-3")
        await job.controller.scale(learners=3)
        await job.barrier()
        await job.barrier()
        assert "learner-3" in (await job.controller.wanted()).actors
        while "move_undone" not in job.names():
            assert (await job.barrier()).move is None
            await asyncio.sleep(0.05)
        assert job.counts() == {"generator": 2, "learner": 2}
        assert "learner-3" not in (await job.controller.wanted()).actors
        await job.table("generator-0", "generator-1")


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("source", ["learner", "generator"])
async def test_a_restart_in_every_phase_finishes_or_undoes_the_move(source: str, ok: bool) -> None:
    """Killed when planned, when committed, and after the end: always one rank moved, or none."""
    target = {"learner": {"generators": 3}, "generator": {"learners": 3}}[source]
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        member = job.controller.elastic.name(*(("generator", 1) if source == "learner" else ("learner", 3)))
        job.unready.add(member)
        await job.controller.scale(**target)
        await job.barrier()
        await job.barrier()
        planned = (await job.journal()).move
        assert (await job.journal()).phase == "planned" and planned is not None
        await job.kill()
        await job.start()
        assert job.controller.elastic.map.phase == "planned"
        assert member in (await job.controller.wanted()).actors, "the driver still has to make it"
        job.unready.clear()
        move = (await job.until_move()).move
        assert move is not None and move.id == planned.id, "it had its time anew"

        await job.kill()
        await job.start()
        assert job.controller.elastic.map.phase == "committed"
        assert len(job.controller.table().generators) == (2 if source == "learner" else 1)
        assert (await job.barrier()).move == move, "the loop may not have heard of it"
        await job.controller.moved(Moved(move=move.id, ok=ok))
        moved = {"generator": 3, "learner": 1} if source == "learner" else {"generator": 1, "learner": 3}
        expected = moved if ok else {"generator": 2, "learner": 2}
        assert job.counts() == expected

        await job.kill()
        await job.start()
        assert job.counts() == expected
        assert len(job.controller.table().generators) == expected["generator"]
        assert (await job.journal()).move is None


async def test_another_driver_starts_from_the_recipe_with_the_operators_wish() -> None:
    async with running(config()) as job:
        await job.controller.scale(generators=3)
        move = (await job.until_move()).move
        assert move is not None
        await job.kill()
        await job.start("another driver")
        assert job.counts() == {"generator": 2, "learner": 2}
        assert job.controller.elastic.map.target == {"generator": 3}
        assert job.controller.elastic.map.move is None
        again = (await job.until_move()).move
        assert again is not None and again.id > move.id


async def test_scorer_and_generator_change_places_without_the_loop() -> None:
    settings = config(scorers=2, learners=1, scorer={"mode": "auto"})
    async with running(settings) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.scale(scorers=0)
        first = await job.until_move()
        assert first.move is not None and (first.move.source, first.move.target) == ("scorer", "generator")
        assert [r.role for r in first.roles.ranks if r.rank == first.move.rank] == ["generator"]
        await job.controller.moved(Moved(move=first.move.id, ok=True))  # harmless: nothing is under way
        second = await job.until_move()
        assert second.move is not None
        while job.counts() != {"generator": 4, "learner": 1} or len(job.controller.table().generators) < 4:
            await asyncio.sleep(0.01)
        assert (await job.barrier()).scoring == "colocated"
        await job.controller.scale(scorers=1)
        back = await job.until_move()
        assert back.move is not None and back.move.target == "scorer"
        assert job.counts() == {"generator": 3, "scorer": 1, "learner": 1}
        assert len(job.controller.table().generators) == 3


async def test_lost_ranks_leave_and_joined_ones_take_their_places() -> None:
    async with running(config(learners=1, generators=3)) as job:
        await job.table("generator-0", "generator-1", "generator-2")
        await job.controller.ranks_lost([2, 3], "node-b")
        await job.table("generator-0")
        await job.controller.ranks_lost([2, 3], "node-b")
        assert job.names() == ["ranks_lost"]
        assert job.counts() == {"generator": 1, "learner": 1}
        wanted = await job.controller.wanted()
        assert wanted.actors == ("learner-0", "generator-0") and wanted.ranks == 4
        assert (await job.barrier()).move is None
        await job.controller.ranks_joined([RankRow(2, "spare", "node-c"), RankRow(3, "spare", "node-c")])
        assert job.counts() == {"generator": 1, "learner": 1, "spare": 2}
        for _ in range(2):
            move = (await job.until_move()).move
            assert move is not None and (move.source, move.target) == ("spare", "generator")
        while len(job.controller.table().generators) < 3:
            await asyncio.sleep(0.01)
        await job.table("generator-0", "generator-1", "generator-2")
        assert not job.controller.elastic.active, "a static job is static again"


async def test_a_lost_rank_ends_its_move() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.scale(learners=3)
        move = (await job.until_move()).move
        assert move is not None and move.rank == 3
        await job.controller.ranks_lost([3])
        assert job.controller.elastic.map.move is None
        assert "move_undone" in job.names()
        await job.controller.moved(Moved(move=move.id, ok=True))
        assert job.counts() == {"generator": 1, "learner": 2}


async def test_a_role_that_nobody_serves_is_refilled_without_a_barrier() -> None:
    async with running(config(learners=1, generators=2)) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.ranks_lost([0])
        while job.counts() != {"generator": 1, "learner": 1}:
            await asyncio.sleep(0.05)
        roles = await job.controller.roles()
        assert [r.rank for r in roles.ranks if r.role == "learner" and not r.lost] == [2]
        await job.table("generator-0")
        await job.controller.ranks_lost([1])
        await job.controller.ranks_joined([RankRow(0, "spare")])
        while job.counts() != {"generator": 1, "learner": 1}:
            await asyncio.sleep(0.05)
        await job.table(job.controller.elastic.name("generator", 0))


async def test_scale_refuses_what_cannot_be() -> None:
    settings = config(elastic={"max_learners": 3, "min_generators": 2}, generators=3)
    async with running(settings) as job:
        scale = job.controller.scale
        for wish, message in (
            ({"generators": 1}, "generators = 1: at least 2 must stay"),
            ({"learners": 4}, r"learners = 4: elastic.max_learners is 3"),
            ({"scorers": 1}, "scorers = 1: this job scores nothing"),
            ({"env_workers": 0}, "env_workers = 0: at least 1"),
            ({"generators": 9}, "needs 5 more ranks than the 5 of this job, and the cluster has 0 free"),
        ):
            with pytest.raises(ConfigError, match=message):
                await scale(**wish)
        await job.controller.have(["learner-0"], 6)
        plan = await scale(generators=9, env_workers=3)
        assert plan["more_ranks"] == 5
        wanted = await job.controller.wanted()
        assert (wanted.ranks, wanted.workers) == (10, 3)
        await scale(env_workers=2)
        assert job.controller.elastic.map.target == {"generator": 9}
        await scale()
        assert job.controller.elastic.map.target == {}


async def waiting(job: Job, **wish: int) -> Move:
    """A move towards ``wish`` that is planned, and whose new actor is ready only now."""
    await job.controller.scale(**wish)
    for _ in range(2):
        assert (await job.barrier()).move is None
    move = job.controller.elastic.map.move
    assert move is not None
    job.unready.clear()
    while job.controller.elastic._prepared != move.id:
        await asyncio.sleep(0.02)
    return move


@pytest.mark.parametrize("wish", [{"generators": 3, "learners": 1}, {}])
async def test_a_planned_move_does_not_outlive_its_wish(wish: dict[str, int]) -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        job.unready.add("learner-3")
        move = await waiting(job, learners=3)
        await job.controller.scale(env_workers=2)
        assert (await job.journal()).move == move, "its target stays"
        await job.controller.scale(**wish)
        assert (await job.journal()).phase == "settled"
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert (undone["move"], undone["error"]) == (move.id, "the target was changed")
        if wish:
            found = (await job.until_move()).move
            assert found is not None and (found.source, found.target) == ("learner", "generator")
        else:
            assert [(await job.barrier()).move for _ in range(3)] == [None] * 3


async def test_a_planned_move_is_dropped_when_lost_ranks_fulfil_its_wish() -> None:
    async with running(config(learners=1, generators=3)) as job:
        await job.table("generator-0", "generator-1", "generator-2")
        job.unready.add("learner-3")
        await waiting(job, generators=2)
        await job.controller.ranks_lost([1])
        assert [(await job.barrier()).move for _ in range(3)] == [None] * 3
        assert job.counts() == {"generator": 2, "learner": 1}
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert undone["error"] == "the target has no use for it by now"


async def test_ranks_are_held_for_a_wish_only_while_it_stands() -> None:
    async with running(config()) as job:
        await job.controller.have(["learner-0"], 6)
        for wish, ranks in (({"generators": 8}, 9), ({"env_workers": 2}, 9), ({}, 4), ({"generators": 2}, 4)):
            await job.controller.scale(**wish)
            assert (await job.controller.wanted()).ranks == ranks
        await job.controller.ranks_lost([3])
        await job.controller.scale()
        assert (await job.controller.wanted()).ranks == 4, "a lost rank is to come back"


async def test_measured_waits_move_a_rank_and_the_ledger_is_remembered() -> None:
    """Learners wait for data, generators never: the machine moves a learner by itself."""
    settings = config(learners=3, generators=1, elastic={"enabled": True})
    async with running(settings, Busy) as job:
        await job.table("generator-0")
        await job.controller.open_admission(True)
        moves = []
        for _ in range(12):
            learners = job.counts()["learner"]
            await asyncio.sleep(0.05)
            answer = await job.barrier(waits={"data": 0.045}, learner_busy_s=0.004 * learners)
            if answer.move is not None:
                moves.append(answer.move)
                await job.controller.moved(Moved(move=answer.move.id, ok=True))
                while not all(r.healthy for r in job.controller.table().generators):
                    await asyncio.sleep(0.01)
        assert (moves[0].source, moves[0].target) == ("learner", "generator")
        assert moves[0].predicted_s > 0
        assert "generation deficit" in moves[0].reason
        assert job.counts()["learner"] >= 1
        await job.kill()
        await job.start()
        assert len(job.controller.elastic.machine.ledger) == len(moves)


async def test_a_planned_move_is_dropped_when_the_load_turns_meanwhile() -> None:
    settings = config(learners=2, generators=2, elastic={"enabled": True})
    async with running(settings, Busy) as job:
        await job.table("generator-0", "generator-1")
        job.unready.add(job.controller.elastic.name("generator", 1))
        while "move_planned" not in job.names():
            await asyncio.sleep(0.05)
            await job.barrier(waits={"data": 0.045}, learner_busy_s=0.008)
        for name in ("generator-0", "generator-1"):
            job.fakes.ports[name].share = 0.1  # type: ignore[attr-defined]
        while "move_undone" not in job.names():
            await asyncio.sleep(0.05)
            assert (await job.barrier(learner_busy_s=0.1)).move is None
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert undone["error"] == "the opposite is wanted by now"
        assert job.counts() == {"generator": 2, "learner": 2}


@pytest.mark.parametrize("evaluating", [False, True])
async def test_evaluation_keeps_ranks_from_training(evaluating: bool) -> None:
    settings = config(learners=1, generators=3, elastic={"enabled": True})
    async with running(settings, Idle) as job:
        await job.table("generator-0", "generator-1", "generator-2")
        suites = [job.controller.evaluate("s", "greedy", 1, 20.0)] if evaluating else []
        asking = [asyncio.create_task(suite) for suite in suites]
        moved = False
        for _ in range(8):
            await asyncio.sleep(0.05)
            moved |= (await job.barrier(learner_busy_s=0.05)).move is not None
        assert moved is not evaluating
        for suite in asking:
            suite.cancel()


async def test_batches_of_unequal_size_keep_the_bound() -> None:
    """The barrier tells the smallest batch: what was admitted early must be trained in time."""
    settings = config(run={"min_groups_per_step": 1, "groups_per_step": 4, "max_lag": 1})
    async with running(settings) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.open_admission(True)
        orders = (await job.controller.pull(pull(100))).orders
        assert len(orders) == 8
        assert job.controller.room() == 0
        assert (await job.barrier()).groups == 4, "none was trained: all eight are due at version 1"
