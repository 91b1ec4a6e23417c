"""The training loop at the barrier: moves that work or fail, ranks that are gone; nothing lost by any."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from ray.exceptions import RayActorError

from cluster.errors import LearnerLost
from cluster.memory import MemoryQueue
from cluster.messages import Barrier, Move, Moved, Published, RankRow, Roles
from cluster.types import End, EndKind, Order, Segment, StepRecord, Task, Turn, Weights
from learner.batch import BatchPlan, RankBatch
from learner.drive.remote import Members
from learner.feed import Batch, Feed, Pace
from learner.form import Formed
from learner.group import LearnerGroup
from learner.late import Late
from learner.loop import TrainLoop
from learner.pace import StepFacts, holders
from learner.scoring import Scoring, Spent
from tests.learner_tiny import make_call, make_config
from tests.test_resize import Rank

STEPS = 6
TASK = Task(id="x", env="frozenlake", seed=0)


class LearnerFake(Rank):
    """Its state is a digest of the steps it made; checkpoints are numbers in a shared dictionary."""

    def __init__(self, number: int, stored: dict[int, float]) -> None:
        super().__init__(f"learner-{number}")
        self.number = number
        self.stored = stored
        self.gone = False
        self.late: list[Late | None] = []
        self.dies_in_step = 0
        self.waits_for_scores = False

    def _enter(self, call: str) -> None:
        if self.gone:
            raise ConnectionError(f"{self.name} is gone")
        super()._enter(call)

    async def info(self) -> tuple[str, int]:
        if self.gone:
            raise ConnectionError(f"{self.name} is gone")
        return await super().info()

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        version = await super().join(host, port, checkpoint, rank, world)
        self.value = self.stored[version]
        return version

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        self._enter("step")
        assert isinstance(batch, RankBatch) and batch.rank == self.at[1]
        if self.waits_for_scores and signal is not None and signal.mode == "offered":
            await asyncio.Event().wait()
        if step == self.dies_in_step:
            self.gone = True
            raise ConnectionError(f"{self.name} died in step {step}")
        if self.version != step:
            assert self.version == step - 1
            self.version, self.value = step, (self.value * 31 + batch.global_tokens + step) % 1e9
        self.late.append(signal)
        return {"spent": {"train": 0.5, "signal": 0.1}, "update_applied": 1.0}

    async def publish(self) -> Weights | None:
        self._enter("publish")
        return Weights(version=self.version, location="", checksum=str(self.value), nbytes=0)

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        await super().save(folder, extra)
        if self.at[1] == 0:
            self.stored[self.version] = self.value


def roles_of(
    epoch: int, learners: Sequence[int], scorers: Sequence[int] = (), lost: Sequence[int] = ()
) -> Roles:
    rows = [RankRow(n, "learner", lost=n in lost) for n in {*learners, *lost}]
    rows += [RankRow(n, "scorer") for n in scorers]
    return Roles(epoch=epoch, ranks=(*rows, RankRow(9, "generator")))


class Controller:
    """Answers barriers from a script and keeps what it is told."""

    def __init__(self, roles: Roles, script: dict[int, Callable[[], Barrier]]) -> None:
        self.now = roles
        self.script = script
        self.events: list[Any] = []
        self.told: list[dict[str, Any]] = []
        self.published: list[Published] = []
        self.on_roles: Callable[[int], Roles] | None = None
        self.asked = 0

    async def publish(self, published: Published) -> None:
        self.published.append(published)

    async def closed(self, groups: list[str]) -> None:
        self.events.append(groups)

    async def step_facts(self, record: dict[str, Any]) -> dict[str, Any]:
        return {}

    async def barrier(self, facts: dict[str, Any]) -> Barrier:
        self.told.append(facts)
        if answer := self.script.get(facts["step"]):
            barrier = answer()
            self.now = barrier.roles
            return barrier
        return Barrier(roles=self.now)

    async def moved(self, moved: Moved) -> None:
        self.events.append(moved)

    async def roles(self) -> Roles:
        self.asked += 1
        self.events.append("roles")
        return self.on_roles(self.asked) if self.on_roles else self.now


class Effects:
    """Checkpoints by number; records kept."""

    def __init__(self, stored: dict[int, float]) -> None:
        self.stored = stored
        self.records: list[tuple[StepRecord, dict[str, Any]]] = []
        self.traced: list[tuple[str, dict[str, Any]]] = []

    def share(self, formed: Formed) -> Sequence[Any]:
        return formed.plan.ranks

    def checkpoint(self) -> tuple[str, int]:
        newest = max(self.stored)
        return (str(newest), newest) if newest else ("", 0)

    def covered(self) -> int:
        return 0

    def recorded(self, record: StepRecord, groups: Sequence[Any], metrics: dict[str, Any]) -> None:
        self.records.append((record, metrics))

    def measured(self, step: int, metrics: dict[str, Any], facts: dict[str, Any]) -> None:
        return None

    def trace(self, event: str, fields: dict[str, Any]) -> None:
        self.traced.append((event, fields))


class ScorerFake:
    """A scorer that counts what it is asked and never answers, or is gone."""

    def __init__(self) -> None:
        self.asked = 0
        self.gone = False

    async def score(self, batch: Any, keys: Any) -> Any:
        self.asked += 1
        if self.gone:
            raise ConnectionError("its node is gone")
        await asyncio.Event().wait()


class Job:
    """A whole training side on fakes; ``roles`` are those at the start."""

    def __init__(self, roles: Roles, script: dict[int, Callable[[], Barrier]], **sections: Any) -> None:
        run = {"steps": STEPS, "groups_per_step": 2, "group_size": 2, "max_lag": 20, "checkpoint_every": 100,
               "deadline_s": 20.0}  # fmt: skip
        learner = {"start_timeout_s": 2.0, "micro_rows": 2} | sections.get("learner", {})
        self.config = make_config(
            Path("/nowhere"),
            **sections | {"run": run | sections.get("run", {}), "learner": learner},
        )
        self.stored: dict[int, float] = {0: 0.0}
        self.ranks = {n: LearnerFake(n, self.stored) for n in range(4)}
        self.queue = MemoryQueue()
        self.controller = Controller(roles, script)
        self.effects = Effects(self.stored)
        self.scorers = {n: ScorerFake() for n in range(10)}

    async def fill(self, groups: int, first: int = 0) -> None:
        """Ready groups, of different lengths."""
        for g in range(first, first + groups):
            name = f"g{g:02d}"
            members = tuple(f"{name}.{i}" for i in range(2))
            await self.queue.admit(Order(group=name, task=TASK, members=members))
            for i, member in enumerate(members):
                call = make_call(0, 0, [1, 2, 3], [4] * (1 + (g + i) % 5))
                await self.queue.append(
                    [Segment(trajectory=member, group=name, attempt=0, turn=Turn(turn=0, calls=(call,)))]
                )
                end = End(trajectory=member, group=name, attempt=0, kind=EndKind.FINISHED, turns=1,
                          outcome=float(i))  # fmt: skip
                await self.queue.end([end])
            assert await self.queue.ready(name, 0, 1)

    def loop(self) -> TrainLoop:
        scoring = Scoring(self.config, self.scorers.__getitem__, self.effects.trace)
        feed = Feed(self.config, self.queue, "feeder", self.controller.closed, self.effects.trace,
                    scoring.arrived)  # fmt: skip
        group = LearnerGroup(self.config, [self.ranks[0]], Path("/nowhere"))
        return TrainLoop(self.config, self.queue, feed, group, self.controller, self.effects, scoring,
                         self.ranks.__getitem__)  # fmt: skip

    async def train(self, groups: int = 2 * STEPS) -> TrainLoop:
        """Fill, train to the end, and check that every trajectory was trained once."""
        await self.fill(groups)
        loop = self.loop()
        try:
            assert await asyncio.wait_for(loop.run(), 60) == STEPS
        finally:
            await loop.feed.stop()
            await loop.scoring.stop()
        ledger = await self.queue.ledger()
        assert ledger.balanced and ledger.pending == 0 and ledger.trained == ledger.admitted
        trained = [t for record, _ in self.effects.records for t in record.trajectories]
        assert len(trained) == len(set(trained)) == ledger.trained
        return loop

    @property
    def moves(self) -> list[Moved]:
        return [event for event in self.controller.events if isinstance(event, Moved)]

    @property
    def worlds(self) -> list[int]:
        return [metrics["learners"] for _, metrics in self.effects.records]

    def digests(self) -> list[str]:
        """Checksums of the published weights, newest of each version."""
        return list({p.step: p.weights.checksum for p in self.controller.published}.values())


def move_to(number: int, epoch: int, learners: Sequence[int], source: str = "generator", **more: Any) -> Any:
    target = "learner" if number in learners else "generator"
    move = Move(id=epoch, epoch=epoch, rank=number, source=source, target=target)
    return lambda: Barrier(roles=roles_of(epoch, learners), move=move, **more)


async def test_a_controller_without_anything_to_say_changes_nothing() -> None:
    job = Job(Roles(epoch=0), {})
    await job.train()
    assert job.worlds == [1] * STEPS and not job.moves
    assert [p.step for p in job.controller.published] == list(range(1, STEPS + 1))
    facts = job.controller.told[-1]
    assert facts["step"] == STEPS and facts["learners"] == 1 and facts["scorers"] == 0
    assert facts["fill"] == 1.0 and facts["groups"] == 2 and facts["learner_busy_s"] == 0.5
    assert facts["train_s"] > 0 and facts["score_s"] is None and facts["scoring_active"] is False
    assert facts["step_s"] > 0 and facts["twt_s"] >= facts["waits"]["signal"] == pytest.approx(0.1)


async def fixed_digests() -> list[str]:
    job = Job(roles_of(1, [0]), {})
    await job.train()
    return job.digests()


async def test_growing_and_shrinking_gives_the_weights_of_a_fixed_world() -> None:
    script = {2: move_to(3, 2, [0, 3]), 4: move_to(3, 3, [0], source="learner")}
    job = Job(roles_of(1, [0]), script)
    loop = await job.train()
    assert job.worlds == [1, 1, 2, 2, 1, 1]
    assert [(m.move, m.ok) for m in job.moves] == [(2, True), (3, True)]
    assert all(m.parts.keys() == {"gather", "regroup", "reshard", "total"} for m in job.moves)
    assert loop.group.numbers == [0]
    assert job.digests() == await fixed_digests()
    assert job.stored.keys() == {0, STEPS}, "no checkpoint was needed on the way"
    assert job.controller.told[2]["sync_s"] >= job.moves[0].parts["total"]


async def test_the_first_rank_may_leave() -> None:
    """World rank 0 is wherever the lowest rank is."""
    job = Job(roles_of(1, [0, 1]), {3: move_to(0, 2, [1], source="learner")})
    loop = await job.train()
    assert job.worlds == [2, 2, 2, 1, 1, 1] and loop.group.numbers == [1]
    assert job.digests() == await fixed_digests()


async def test_a_move_that_fails_leaves_the_old_world_and_says_so() -> None:
    job = Job(roles_of(1, [0]), {2: move_to(3, 2, [0, 3])})
    job.ranks[3].fails = ["join"]

    async def undone(moved: Moved) -> None:
        job.controller.events.append(moved)
        job.controller.now = roles_of(3, [0])

    job.controller.moved = undone  # type: ignore[method-assign]
    await job.train()
    (moved,) = job.moves
    assert not moved.ok and "learner-3 cannot join" in moved.error
    assert job.worlds == [1] * STEPS and job.digests() == await fixed_digests()
    assert job.stored.keys() == {0, STEPS}, "the old world came back from memory"


async def test_a_world_that_dies_in_the_move_is_rebuilt_after_the_controller_was_told() -> None:
    job = Job(roles_of(1, [0]), {2: move_to(3, 2, [0, 3])})
    job.ranks[0].fails = ["gather", "save"]

    async def undone(moved: Moved) -> None:
        job.controller.events.append(moved)
        job.controller.now = roles_of(3, [0])

    job.controller.moved = undone  # type: ignore[method-assign]
    await job.train()
    told = job.controller.events.index(job.moves[0])
    assert not job.moves[0].ok and "roles" in job.controller.events[told:]
    assert job.worlds == [1] * STEPS and job.digests() == await fixed_digests()
    assert ("executed_again", {"step": 2}) in job.effects.traced


async def test_a_learner_that_is_gone_for_good_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node died in step 4; the controller hears of it a little later than the loop."""
    monkeypatch.setattr("learner.keeper.ROLES_POLL_S", 0.02)
    job = Job(roles_of(1, [0, 1]), {})
    job.ranks[1].dies_in_step = 4
    first = roles_of(1, [0, 1])

    def roles(asked: int) -> Roles:
        if job.ranks[1].gone and asked > 6:
            job.controller.now = roles_of(2, [0], lost=[1])
            return job.controller.now
        return first

    job.controller.on_roles = roles
    loop = await job.train()
    assert loop.group.numbers == [0] and job.worlds == [2, 2, 2, 1, 1, 1]
    assert job.digests() == await fixed_digests()


async def test_ranks_that_the_barrier_calls_lost_are_left_without_a_handover() -> None:
    job = Job(roles_of(1, [0, 1]), {3: lambda: Barrier(roles=roles_of(2, [0], lost=[1]))})
    await job.train()
    assert job.worlds == [2, 2, 2, 1, 1, 1] and job.digests() == await fixed_digests()
    assert "gather" not in job.ranks[0].calls


async def test_a_rank_that_is_lost_while_it_joins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node dies as the move begins: the old world goes on as soon as the controller knows."""
    monkeypatch.setattr("learner.keeper.ROLES_POLL_S", 0.02)
    job = Job(roles_of(1, [0]), {2: move_to(3, 2, [0, 3])}, learner={"start_timeout_s": 30.0})
    job.ranks[3].gone = True

    def roles(asked: int) -> Roles:
        if job.controller.now.epoch == 2 and asked > 4:
            job.controller.now = roles_of(3, [0], lost=[3])
        return job.controller.now

    job.controller.on_roles = roles
    begun = time.monotonic()
    await job.train()
    assert time.monotonic() - begun < 10.0
    (moved,) = job.moves
    assert not moved.ok and "ranks [3] were taken away" in moved.error
    assert job.worlds == [1] * STEPS and job.digests() == await fixed_digests()


async def test_a_rank_that_is_lost_while_it_hands_over_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("learner.keeper.ROLES_POLL_S", 0.02)
    job = Job(roles_of(1, [0, 1]), {2: move_to(3, 2, [0, 1, 3])})

    async def hangs() -> Any:
        job.ranks[1].gone = True
        job.controller.now = roles_of(3, [0, 3], lost=[1])
        await asyncio.Event().wait()

    job.ranks[1].gather = hangs  # type: ignore[method-assign]
    await job.train()
    assert not job.moves[0].ok and "ranks [1] were taken away" in job.moves[0].error
    assert job.worlds == [2] * STEPS and job.digests() == await fixed_digests()


@pytest.mark.parametrize("version", [0, 2])
async def test_a_loop_that_waits_for_data_comes_to_the_barrier_when_it_is_called(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only generator is lost: groups come again once a learner has become one."""
    monkeypatch.setattr("learner.feed.LOOK_EVERY_S", 0.02)
    job = Job(roles_of(1, [0, 1]), {})
    loop, controller = job.loop(), job.controller
    handed_over, give = asyncio.Event(), move_to(1, 2, [0], source="learner")
    calls = 1 + (version > 0)  # the barrier of that step, if there was one, and again

    async def barrier(facts: dict[str, Any]) -> Barrier:
        controller.told.append(facts)
        called = [told["step"] for told in controller.told].count(version) == calls
        return give() if called and facts["step"] == version else Barrier(roles=controller.now)

    async def moved(answer: Moved) -> None:
        assert answer.ok and loop.group.numbers == [0]
        controller.now = roles_of(2, [0])
        handed_over.set()

    def roles(asked: int) -> Roles:
        waits = loop.version == version and not handed_over.is_set()
        return replace(controller.now, awaited=waits)

    controller.barrier, controller.moved, controller.on_roles = barrier, moved, roles  # type: ignore[method-assign]
    await job.fill(2 * version)
    running = asyncio.create_task(loop.run())
    async with asyncio.timeout(20):
        await handed_over.wait()
        await job.fill(2 * (STEPS - version), 2 * version)
        assert await running == STEPS
    await loop.feed.stop()
    assert job.worlds == [2] * version + [1] * (STEPS - version)
    assert [facts["step"] for facts in controller.told].count(version) == calls
    assert job.digests() == await fixed_digests()


async def test_without_any_learner_the_loop_gives_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.keeper.ROLES_POLL_S", 0.02)
    monkeypatch.setattr("learner.keeper.MAX_REBUILDS_IN_A_ROW", 1)
    job = Job(roles_of(1, [], lost=[0]), {})
    await job.fill(2)
    loop = job.loop()
    with pytest.raises(LearnerLost, match="no rank is a learner"):
        await asyncio.wait_for(loop.run(), 30)
    await loop.feed.stop()


async def test_a_feeder_that_died_while_it_resized_starts_from_one_group() -> None:
    """Both ranks hold the committed version, but in groups of their own."""
    job = Job(roles_of(1, [0]), {})
    await job.train()
    job.effects.records.clear()
    job.config = make_config(
        Path("/nowhere"),
        run={"steps": STEPS, "groups_per_step": 2, "group_size": 2, "max_lag": 20},
        learner={"start_timeout_s": 2.0},
    )
    job.controller.now = roles_of(2, [0, 1])
    await job.ranks[1].join("elsewhere", 1, str(STEPS), 0, 1)
    assert job.ranks[0].version == job.ranks[1].version == STEPS
    loop = job.loop()
    assert await asyncio.wait_for(loop.run(), 30) == STEPS
    await loop.feed.stop()
    assert await loop.group.whole() and loop.group.numbers == [0, 1]


async def test_the_barrier_sets_the_smallest_batch() -> None:
    """With one group ready and nothing to gain by waiting, the step takes one."""
    script = {n: lambda: Barrier(roles=roles_of(1, [0]), groups=1) for n in range(1, STEPS)}
    job = Job(roles_of(1, [0]), script)
    await job.fill(2)
    loop = job.loop()
    running = asyncio.create_task(loop.run())
    for number in range(2, STEPS + 1):
        async with asyncio.timeout(20):
            while loop.version < number - 1:
                await asyncio.sleep(0.01)
        await job.fill(1, number)
    assert await asyncio.wait_for(running, 60) == STEPS
    await loop.feed.stop()
    assert [len(record.groups) for record, _ in job.effects.records] == [2] + [1] * (STEPS - 1)
    assert [facts["fill"] for facts in job.controller.told] == [1.0] + [0.5] * (STEPS - 1)


async def test_scorers_and_their_mode_come_from_the_barrier() -> None:
    kl = {"objective": {"kl_coef": 0.1}, "scorer": {"mode": "auto", "replicas": 1, "timeout_s": 1.0}}
    first = roles_of(1, [0], scorers=[5])
    script = {
        2: lambda: Barrier(roles=roles_of(2, [0], scorers=[5]), scoring="colocated"),
        3: lambda: Barrier(roles=roles_of(2, [0], scorers=[5]), scoring="colocated"),
        4: lambda: Barrier(roles=roles_of(3, [0]), scoring="colocated"),
        5: lambda: Barrier(roles=roles_of(4, [0], scorers=[6, 7]), scoring="decoupled"),
    }
    job = Job(first, script, **kl)
    loop = await job.train()
    modes = [late.mode for late in job.ranks[0].late if late is not None]
    assert modes == ["offered", "offered", "here", "here", "here", "offered"]
    assert [metrics["scoring"] for _, metrics in job.effects.records][2:] == ["colocated"] * 3 + ["decoupled"]
    assert loop.scoring.scorers == [6, 7] and job.scorers[5].asked and job.scorers[6].asked
    assert job.controller.told[-1]["scoring_active"] is True


async def test_scorers_that_are_gone_for_good_are_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only scorer's node dies; the step that waits for it is made again, scored by the learner."""
    monkeypatch.setattr("learner.keeper.ROLES_POLL_S", 0.02)
    monkeypatch.setattr("learner.scoring.RETRY_S", 0.02)
    kl = {"objective": {"kl_coef": 0.1}, "scorer": {"replicas": 1}}
    job = Job(roles_of(1, [0], scorers=[5]), {}, **kl)
    job.scorers[5].gone = True
    job.ranks[0].waits_for_scores = True

    def roles(asked: int) -> Roles:
        if asked > 4:
            job.controller.now = roles_of(2, [0], lost=[5])
        return job.controller.now

    job.controller.on_roles = roles
    await job.train()
    assert {metrics["scoring"] for _, metrics in job.effects.records} == {"colocated"}
    assert job.digests() == await fixed_digests()


async def test_a_delivery_of_scores_that_fails_ends_the_step() -> None:
    """The step would wait ``scorer.timeout_s`` for what nobody hands to it."""
    keeper = Job(Roles(epoch=0), {}).loop().keeper

    async def step() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    async def deliver() -> None:
        raise KeyError("g0000001")

    with pytest.raises(KeyError, match="g0000001"):
        async with asyncio.timeout(5.0):
            await keeper._with_scores(step(), deliver())


async def test_a_step_goes_on_when_all_scores_are_delivered() -> None:
    keeper = Job(Roles(epoch=0), {}).loop().keeper
    delivered = asyncio.Event()

    async def step() -> dict[str, Any]:
        await delivered.wait()
        await asyncio.sleep(0.05)
        return {"loss": 1.0}

    async def deliver() -> None:
        delivered.set()

    assert await keeper._with_scores(step(), deliver()) == {"loss": 1.0}


def test_holders_reads_a_move_as_made_or_not() -> None:
    roles = roles_of(3, [0, 1], scorers=[4], lost=[2])
    move = Move(id=1, epoch=3, rank=1, source="generator", target="learner")
    assert holders(roles, "learner") == [0, 1]
    assert holders(roles, "learner", move, True) == [0, 1]
    assert holders(roles, "learner", move, False) == [0]
    assert holders(roles, "generator", move, False) == [1, 9]
    lost = replace(move, rank=2, source="scorer")
    assert holders(roles, "scorer", lost, False) == [4]


# -- the feed -------------------------------------------------------------------------------


async def formed_size(ready: int, pace: Pace) -> tuple[int, float]:
    """(groups, seconds waited) of a batch that may form from 1 of 4, with no group to come."""
    job = Job(Roles(epoch=0), {}, run={"groups_per_step": 4})
    await job.fill(ready)
    loop = job.loop()
    await loop.feed.start(set())
    try:
        batch = await asyncio.wait_for(loop.feed.form(0, 1, pace), 20)
        return len(batch.groups), batch.waited_s
    finally:
        await loop.feed.stop()


async def test_a_batch_waits_while_that_pays_and_no_longer() -> None:
    size, waited = await formed_size(2, Pace(0.0, 0.0))
    assert size == 2 and waited < 1.0
    size, waited = await formed_size(2, Pace(0.0, 3.0))
    assert size == 2 and 1.0 < waited < 4.0  # 2 groups are worth starting with once gaps exceed 1.5 s
    size, waited = await formed_size(4, Pace(0.0, 1e9))
    assert size == 4 and waited < 1.0


async def test_readiness_is_told_in_micro_batches() -> None:
    """Full micro-batch: 64 x 2 tokens; a group here has 2 x (3 + 1..5) of them."""
    job = Job(Roles(epoch=0), {}, run={"groups_per_step": 24})
    await job.fill(24)
    loop = job.loop()
    await loop.feed.start(set())
    async with asyncio.timeout(10):
        while loop.feed.depth() < 24:
            await asyncio.sleep(0.01)
    batch = await loop.feed.form(0)
    await loop.feed.stop()
    tokens = sum(len(c.added) + len(c.output) for g in batch.groups for m in g.members
                 for t in m.turns for c in t.calls) // 4  # fmt: skip
    assert batch.micro_batches == -(-tokens // 128) > 2 and batch.ras == batch.micro_batches
    assert batch.tprm_s == 0.0


# -- facts ----------------------------------------------------------------------------------


def test_costs_are_told_per_full_micro_batch_on_one_rank() -> None:
    """64 x 2 tokens make a full micro-batch; 2 ranks trained 320 tokens, so 2.5 of them."""
    facts = StepFacts(make_config(Path("/nowhere"), learner={"row_tokens": 64, "micro_rows": 2}))
    record = StepRecord(step=3, groups=("a", "b"), trajectories=("a.0",), lags=(0, 1))
    formed = Formed(BatchPlan((), 320, 100, 4, 0.5), {}, 0)
    batch = Batch(record, (None, None), waited_s=2.0, micro_batches=3, ras=1, tprm_s=0.5)  # type: ignore[arg-type]
    spent = {"train": 5.0, "signal": 0.4, "score": 2.5, "swap": 0.8}
    facts.committed(batch, formed, {"learners": 2, "spent": spent}, Spent(), 7, 100.0)
    scoring = Scoring(facts.config, {}.__getitem__, lambda *_: None)
    told = facts.told(2, scoring)
    assert (told["train_s"], told["score_s"], told["swap_s"]) == (2.0, 1.0, 0.2)
    assert told["ahead"] is None, "learners scored it"
    assert told["twt_s"] == pytest.approx((2.0 + 0.2) * 2) and told["scorer_busy_s"] == 2.5
    assert (told["micro_batches"], told["ras"], told["tprm_s"], told["depth"]) == (3, 1, 0.5, 7)
    assert told["step_s"] == 0.0 and facts.pace() == Pace(5.0 / 2 / 2, 0.0)
    facts.published(0.25)
    facts.switched({"gather": 1.0, "total": 3.0})
    decoupled = {"learners": 2, "spent": {"train": 5.0, "signal": 0.0}, "scored_ahead": 0.8}
    facts.committed(batch, formed, decoupled, Spent(seconds=6.0, tokens=256), 7, 104.0)
    told = facts.told(2, scoring)
    assert told["score_s"] == pytest.approx(1.0 + 0.3 * (3.0 - 1.0)) and told["swap_s"] == 0.2
    assert told["ahead"] == 0.8
    assert told["step_s"] == 4.0 and told["sync_s"] == 3.25 and told["scorer_busy_s"] == 6.0
    assert facts.pace().fixed_s == 0.25


def test_seconds_of_a_rank_whose_clock_stepped_back_count_for_nothing() -> None:
    facts = StepFacts(make_config(Path("/nowhere")))
    record = StepRecord(step=1, groups=("a",), trajectories=("a.0",), lags=(0,))
    batch = Batch(record, (None,))  # type: ignore[arg-type]
    spent = {"train": -1.0, "signal": 0.0}
    formed = Formed(BatchPlan((), 320, 100, 4, 0.5), {}, 0)
    facts.committed(batch, formed, {"learners": 1, "spent": spent}, Spent(), 0, 1.0)
    told = facts.told(1, Scoring(facts.config, {}.__getitem__, lambda *_: None))
    assert told["train_s"] is None and told["learner_busy_s"] == 0.0 and facts.pace() == Pace(0.0, 0.0)


async def test_an_actor_that_died_is_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of a machine that came back have new actors under the old names."""
    looked_up: list[str] = []

    class Handle:
        def __init__(self, dead: bool) -> None:
            self.dead = dead
            self.info = self

        async def remote(self) -> tuple[str, int]:
            if self.dead:
                raise RayActorError()
            return "instance", 4

    def get_actor(name: str) -> Handle:
        looked_up.append(name)
        return Handle(dead=len(looked_up) == 1)

    monkeypatch.setattr("learner.drive.remote.ray.get_actor", get_actor)
    members = Members("learner", make_config(Path("/nowhere"), generator={"replicas": 2}))
    with pytest.raises(RayActorError):
        await members.call(2, "info")
    assert await members.call(2, "info") == await members.call(2, "info") == ("instance", 4)
    assert looked_up == ["learner-2", "learner-2"]
