"""Ranks when something goes wrong: nobody is left in a role, a generator does not come back, some are ill."""

import asyncio
from typing import Any

import pytest
from test_controller import pull
from test_role_changes import COSTS, Job, config, running

from cluster.balance import StepFacts
from cluster.fleet import Slot
from cluster.messages import Move, Moved, RankRow
from cluster.ranks import Bounds, RankMachine, choose_rank, toward
from cluster.targets import refilling

FLOORS = {"generator": 1, "learner": 1, "scorer": 1}


async def moved(job: Job, **target: int) -> Move:
    """A move towards ``target``, made by the loop."""
    await job.controller.scale(**target)
    move = (await job.until_move()).move
    assert move is not None
    await job.controller.moved(Moved(move=move.id, ok=True))
    return move


async def planned(job: Job) -> Move:
    """The first barrier of a controller has no step to read; the second plans."""
    for _ in range(2):
        assert (await job.barrier()).move is None
    move = (await job.journal()).move
    assert move is not None and (await job.journal()).phase == "planned"
    return move


async def ledger(job: Job) -> list[tuple[str, str, float | None]]:
    lines = (await job.controller.status())["roles"]["switches"]
    return [(line["move"], line["state"], line["cost_s"]) for line in lines]


def make_ill(job: Job, name: str) -> Any:
    """Its process does not answer; the answer of this gives it back."""
    port = job.fakes.ports[name]
    port.alive = False

    def heal() -> None:
        port.alive = True

    return heal


# -- nobody is left -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generators", "learners", "scorers", "spares", "pair"),
    [
        (1, 1, 1, 3, None),
        (0, 3, 2, 1, ("spare", "generator")),
        (0, 3, 2, 0, ("scorer", "generator")),
        (0, 3, 1, 0, ("learner", "generator")),
        (0, 1, 1, 0, None),
        (2, 0, 1, 0, ("generator", "learner")),
        (1, 0, 1, 0, None),
        (0, 0, 1, 1, ("spare", "generator")),
    ],
)
def test_who_fills_a_role_that_nobody_serves(
    generators: int, learners: int, scorers: int, spares: int, pair: tuple[str, str] | None
) -> None:
    counts = {"generator": generators, "learner": learners, "scorer": scorers, "spare": spares}
    assert refilling(counts, FLOORS) == pair


async def test_without_a_generator_a_learner_gives_its_rank_at_the_barrier() -> None:
    """Its group has to hand it over, and waits for data: it is called, and asks about the same step again."""
    async with running(config(learners=3, generators=1)) as job:
        await job.table("generator-0")
        await job.barrier()
        await job.controller.ranks_lost([3], "node-b")

        async def awaited() -> None:
            while not (await job.controller.roles()).awaited:
                await asyncio.sleep(0.02)

        await awaited()
        assert job.counts() == {"learner": 3}, "nothing is taken from a group that does not know"
        await job.kill()
        await job.start()
        await awaited()
        move = (await job.again()).move
        assert move is not None and (move.rank, move.source, move.target) == (2, "learner", "generator")
        assert move.cost_s == COSTS["learner>generator"]
        await job.kill()
        await job.start()
        assert (await job.controller.roles()).awaited, "the loop may die before it hears of it"
        assert (await job.again()).move == move
        await job.controller.moved(Moved(move=move.id, ok=True))
        await job.table(job.controller.elastic.name("generator", 2))
        assert not (await job.controller.roles()).awaited
        assert (await job.again()).move is None, "it is over"
        assert job.counts() == {"generator": 1, "learner": 2}


async def test_a_planned_move_gives_way_to_a_role_that_nobody_serves() -> None:
    async with running(config(learners=2, generators=1, scorers=1)) as job:
        await job.table("generator-0")
        name = job.controller.elastic.name("scorer", 1)
        job.unready.add(name)
        await job.controller.scale(learners=1, scorers=2)
        first = await planned(job)
        assert (first.source, first.target) == ("learner", "scorer")
        job.unready.clear()
        await job.controller.ranks_lost([2])
        while not (await job.controller.roles()).awaited:
            await asyncio.sleep(0.02)
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert (undone["move"], undone["error"]) == (first.id, "no generator is left")
        move = (await job.again()).move
        assert move is not None and (move.source, move.target) == ("learner", "generator")


async def test_a_move_without_which_nobody_generates_is_not_regretted() -> None:
    """Batches that were ready are still trained: they tell of generators that are not needed."""
    async with running(config(learners=3, generators=1, elastic={"enabled": True})) as job:
        await job.table("generator-0")
        await job.barrier()
        await job.controller.ranks_lost([3])
        job.controller.elastic.machine.regrets = lambda *_: True  # type: ignore[method-assign]
        while not (await job.controller.roles()).awaited:
            await asyncio.sleep(0.02)
        move = (await job.barrier()).move
        assert move is not None and move.target == "generator"


async def test_without_a_learner_the_rank_that_does_not_generate_yet_trains() -> None:
    async with running(config(generators=2, learners=2)) as job:
        await job.table("generator-0", "generator-1")
        job.fakes.missing.add(job.controller.elastic.name("generator", 1))
        move = await moved(job, generators=3)
        await job.controller.ranks_lost([0])
        while job.counts() != {"generator": 2, "learner": 1}:
            await asyncio.sleep(0.02)
        assert (await job.journal()).of("learner") == [1], "not one of those that are at work"
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert (undone["move"], undone["error"]) == (move.id, "no learner is left")


async def test_the_last_learner_is_kept_though_it_was_about_to_leave() -> None:
    """The loop may have died with the other one: nobody says how the move ended."""
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.scale(generators=3, learners=1)
        move = (await job.until_move()).move
        assert move is not None and (move.rank, move.source) == (1, "learner")
        await job.controller.ranks_lost([0])
        while (await job.journal()).phase != "settled":
            await asyncio.sleep(0.02)
        assert (await job.journal()).of("learner") == [1]
        await job.controller.moved(Moved(move=move.id, ok=True))
        assert job.counts() == {"generator": 2, "learner": 1}, "a late report changes nothing"


async def test_a_refill_that_the_group_has_not_heard_of_teaches_no_cost() -> None:
    async with running(config(learners=1, generators=2)) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.ranks_lost([0])
        while "move_done" not in job.names():
            await asyncio.sleep(0.02)
        assert await ledger(job) == [("generator>learner", "done", None)]
        assert job.controller.elastic.machine.switches.cost("generator>learner") == COSTS["generator>learner"]


# -- a generator that is to come back -------------------------------------------------------


async def test_a_generator_that_does_not_become_healthy_is_no_switch_and_its_rank_is_used_again() -> None:
    async with running(config(elastic={"prepare_timeout_s": 2.0})) as job:
        await job.table("generator-0", "generator-1")
        name = job.controller.elastic.name("generator", 1)
        job.fakes.missing.add(name)
        move = await moved(job, generators=3)
        while "move_undone" not in job.names():
            told = await ledger(job)
            assert told == [("learner>generator", "begun", None)] or "move_undone" in job.names()
            await asyncio.sleep(0.05)
        assert await ledger(job) == [("learner>generator", "undone", None)]
        assert job.controller.elastic.machine.switches.cost("learner>generator") == COSTS["learner>generator"]
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert undone["move"] == move.id and "not healthy within" in undone["error"]
        assert (await job.journal()).counts() == {"generator": 2, "scorer": 0, "learner": 1, "spare": 1}
        await job.table("generator-0", "generator-1")
        job.fakes.missing.clear()
        again = (await job.until_move()).move
        assert again is not None and (again.rank, again.source) == (1, "spare")
        await job.table("generator-0", "generator-1", name)


@pytest.mark.parametrize("heals", [True, False])
async def test_a_restarted_controller_goes_on_waiting_for_the_generator(heals: bool) -> None:
    async with running(config(elastic={"prepare_timeout_s": 3.0})) as job:
        await job.table("generator-0", "generator-1")
        name = job.controller.elastic.name("generator", 1)
        job.fakes.missing.add(name)
        await moved(job, generators=3)
        await job.kill()
        await job.start()
        assert await ledger(job) == [("learner>generator", "begun", None)]
        if heals:
            job.fakes.missing.clear()
        end = "move_done" if heals else "move_undone"
        async with asyncio.timeout(20):
            while end not in job.names():
                await asyncio.sleep(0.05)
        await job.kill()
        await job.start()
        ((_, state, cost),) = await ledger(job)
        assert (state, cost is not None) == (("done", True) if heals else ("undone", False))
        assert (await job.journal()).counts()["spare"] == (0 if heals else 1)


async def test_a_move_is_done_once_the_generator_is_healthy_and_costs_all_that_time() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        name = job.controller.elastic.name("generator", 1)
        job.fakes.missing.add(name)
        await moved(job, generators=3)
        await asyncio.sleep(1.0)
        assert (await job.barrier()).move is None
        assert await ledger(job) == [("learner>generator", "begun", None)]
        job.fakes.missing.clear()
        while "move_done" not in job.names():
            await asyncio.sleep(0.05)
        ((_, state, cost),) = await ledger(job)
        assert state == "done" and cost is not None and cost > 1.0


async def test_a_rank_that_is_lost_before_it_generates_ends_its_move() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        job.fakes.missing.add(job.controller.elastic.name("generator", 1))
        await moved(job, generators=3)
        await job.controller.ranks_lost([1])
        assert await ledger(job) == [("learner>generator", "undone", None)]
        await job.table("generator-0", "generator-1")
        assert job.counts() == {"generator": 2, "learner": 1}
        await job.controller.ranks_joined([RankRow(1, "spare")])
        again = (await job.until_move()).move
        assert again is not None and again.rank == 1, "another move may begin"


# -- a node that comes back -----------------------------------------------------------------


@pytest.mark.parametrize("enabled", [False, True])
async def test_a_node_that_comes_back_is_used_though_the_target_names_other_roles(enabled: bool) -> None:
    async with running(config(learners=1, generators=3, elastic={"enabled": enabled})) as job:
        await job.controller.scale(learners=1)
        await job.controller.ranks_lost([2, 3])
        await job.controller.ranks_joined([RankRow(2, "spare"), RankRow(3, "spare")])
        for _ in range(2):
            move = (await job.until_move()).move
            assert move is not None and (move.source, move.target) == ("spare", "generator")
        assert job.counts() == {"generator": 3, "learner": 1}


def test_spares_stay_where_the_target_leaves_no_room() -> None:
    counts = {"generator": 2, "scorer": 0, "learner": 2, "spare": 1}
    assert toward({"generator": 2}, counts, Bounds()) == ("spare", "learner")
    assert toward({"generator": 2}, counts, Bounds(ceilings={"learner": 2})) is None
    assert toward({"generator": 2, "learner": 2, "scorer": 0}, counts, Bounds()) is None


# -- health ---------------------------------------------------------------------------------


async def test_a_generator_that_is_ill_goes_first() -> None:
    async with running(config(learners=1, generators=2)) as job:
        await job.table("generator-0", "generator-1")
        make_ill(job, "generator-0")
        while sum(row.healthy for row in job.controller.table().generators) > 1:
            await asyncio.sleep(0.02)
        await job.controller.scale(learners=2)
        move = (await job.until_move()).move
        assert move is not None and job.controller.elastic.name("generator", move.rank) == "generator-0"
        assert job.controller.acknowledged() >= 0, "groups are still admitted"


@pytest.mark.parametrize("when", ["before the plan", "before the barrier"])
async def test_floors_count_healthy_generators(when: str) -> None:
    async with running(config(learners=1, generators=2, elastic={"prepare_timeout_s": 20.0})) as job:
        await job.table("generator-0", "generator-1")
        job.unready.add("learner-2")
        if when == "before the barrier":
            await job.controller.scale(learners=2)
            await planned(job)
        heal = [make_ill(job, name) for name in ("generator-0", "generator-1")]
        await job.table_is_ill()
        job.unready.clear()
        await job.controller.scale(learners=2)
        await asyncio.sleep(0.7)
        assert [(await job.barrier()).move for _ in range(3)] == [None] * 3
        heal[0]()
        move = (await job.until_move()).move
        assert move is not None and move.source == "generator"


async def test_a_move_that_health_holds_up_is_given_up_in_time() -> None:
    async with running(config(learners=1, generators=2)) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.scale(learners=2)
        job.unready.add("learner-2")
        move = await planned(job)
        for name in ("generator-0", "generator-1"):
            make_ill(job, name)
        await job.table_is_ill()
        job.unready.clear()
        while job.controller.elastic._prepared != move.id:
            await asyncio.sleep(0.02)
        job.controller.elastic._since -= 1000.0
        assert (await job.barrier()).move is None
        undone = next(fields for event, fields in job.events if event == "move_undone")
        assert "too few generators were healthy within elastic.prepare_timeout_s = 300 s" in undone["error"]
        assert job.controller.elastic.map.phase == "settled"


async def made_ready(job: Job) -> Move:
    """A generator is to become a second learner; its new actor has answered, its barrier has not come."""
    await job.table("generator-0", "generator-1")
    job.unready.add("learner-2")
    await job.controller.scale(learners=2)
    move = await planned(job)
    job.unready.clear()
    while job.controller.elastic._prepared != move.id:
        await asyncio.sleep(0.02)
    return move


async def test_a_move_that_is_ready_waits_for_its_barrier_however_long_a_step_takes() -> None:
    async with running(config(learners=1, generators=2)) as job:
        move = await made_ready(job)
        job.controller.elastic._since -= 1000.0
        await asyncio.sleep(0.7)  # the background looks, too
        assert not [event for event, _ in job.events if event == "move_undone"]
        found = (await job.barrier()).move
        assert found is not None and found.id == move.id


async def test_a_new_actor_that_has_died_since_it_was_ready_is_not_begun_with() -> None:
    async with running(config(learners=1, generators=2)) as job:
        move = await made_ready(job)
        job.unready.add("learner-2")
        assert (await job.barrier()).move is None
        assert (await job.journal()).move == move, "it may come back"
        job.unready.clear()
        assert (await job.until_move()).move is not None


def test_the_machine_leaves_the_floor_of_healthy_generators() -> None:
    rows = [RankRow(0, "generator", "a"), RankRow(1, "generator", "b"), RankRow(2, "learner", "b")]
    assert choose_rank(rows, "generator", "learner") == 1
    assert choose_rank(rows, "generator", "learner", {0}) == 0
    bounds = Bounds(floors={"generator": 2, "learner": 1})
    counts = {"generator": 4, "learner": 1, "scorer": 3, "spare": 0}
    for ill, pair in ((0, ("generator", "learner")), (2, ("generator", "learner")), (3, None)):
        assert toward({"learner": 2, "scorer": 3}, counts, bounds, ill) == pair
        machine = RankMachine(bounds, {"generator>learner": 0.1})
        held = RankMachine(bounds, {"generator>learner": 0.1})
        held.target = {"learner": 2, "scorer": 3}
        found = None
        for step in range(1, 5):
            facts = StepFacts(step=step, step_s=10.0, rwt_s=28.0, twt_s=0.0, generator_busy_s=12.0,
                              learner_busy_s=10.0, unhealthy=ill, scoring="colocated")  # fmt: skip
            found = found or machine.decide(facts, counts)
            assert (held.decide(facts, counts) is not None) == (pair is not None)
        assert (found is not None) == (pair is not None)
    assert toward({"learner": 2}, counts, bounds, 3) == ("scorer", "learner"), "another role gives"


# -- what the moves are told ----------------------------------------------------------------


async def test_a_moves_way_of_scoring_is_taken_over_with_it() -> None:
    settings = config(scorers=2, learners=1, generators=1, scorer={"mode": "auto"})
    async with running(settings) as job:
        await job.table("generator-0")
        assert (await job.barrier()).scoring == "decoupled"
        await job.controller.scale(scorers=1)
        while not (answer := await job.barrier(scoring="colocated")).move:
            await asyncio.sleep(0.05)
        assert answer.scoring == job.controller.elastic.scoring() == "colocated"


async def test_what_swapping_models_takes_counts_in_predictions() -> None:
    settings = config(scorers=1, learners=1, scorer={"mode": "auto"})
    async with running(settings) as job:
        costs = {"score_s": 1.0, "train_s": 3.0, "swap_s": 0.25}
        await job.barrier(scoring_active=True, scorers=1, micro_batches=2, ras=1, tprm_s=0.1, **costs)
        assert job.controller.elastic.machine.balance.swap_s == 0.5, "to the scorer and back"


@pytest.mark.parametrize(("ahead", "mode"), [(None, "colocated"), (0.9, "decoupled")])
async def test_what_is_scored_ahead_decides_who_scores(ahead: float | None, mode: str) -> None:
    """Swaps are free: learners would score themselves, were segments not scored as they stream."""
    settings = config(scorers=1, learners=2, generators=1, scorer={"mode": "auto"})
    async with running(settings) as job:
        costs = {"score_s": 2.0, "train_s": 4.0, "swap_s": 0.0, "ahead": ahead}
        ready = {"micro_batches": 2, "ras": 2, "tprm_s": 0.0}
        for _ in range(3):
            answer = await job.barrier(scoring_active=True, scorers=1, learners=2, **ready, **costs)
        assert answer.scoring == mode


async def test_a_step_is_told_with_what_rolls_out_and_what_could() -> None:
    async with running(config()) as job:
        await job.table("generator-0", "generator-1")
        await job.controller.open_admission(True)
        orders = (await job.controller.pull(pull(6))).orders
        assert len(orders) == 3
        told: list[StepFacts | None] = []
        elastic, answer = job.controller.elastic, job.controller.elastic.barrier

        async def barrier(facts: StepFacts | None, *rest: Any) -> Any:
            told.append(facts)
            return await answer(facts, *rest)

        elastic.barrier = barrier  # type: ignore[method-assign]
        job.controller.fleet.slots["generator-9"] = Slot("generator-9")
        await job.barrier()
        (facts,) = told
        assert facts is not None
        assert (facts.open, facts.most) == (3, 64 // 2), "64 slots, 2 trajectories to a group"
        assert facts.unhealthy == 1
