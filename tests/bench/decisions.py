"""Cost of one decision of the controller's side at 1,024 ranks and 20,000 live tasks.

``python tests/bench/decisions.py [--json FILE]``. No process, no network: the in-memory
queue and generators that exist only as rows. Measured are

- ``ranks``: the rank machine sees a step and decides, and the rank that moves is chosen;
- ``barrier``: the controller's whole barrier (facts, decision, plan, journal), its generators not asked;
- ``pull``: an env worker reports what it runs and asks for more, 20,000 trajectories being open;
- ``admission``: one event of one task, then ``decide``, all 20,000 tasks at a single generator.

Times are of the processor, so that other work on the machine does not count. Target: the 99th percentile
of each below 5 ms.
"""

import argparse
import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from cluster.admission import Admission, Limits
from cluster.config import Config, build
from cluster.controller import Controller
from cluster.fleet import Slot
from cluster.memory import MemoryQueue
from cluster.messages import GeneratorHealth, Moved, Pull, RankRow
from cluster.ranks import Bounds, RankMachine, StepFacts, choose_rank
from cluster.types import Task

GENERATORS, LEARNERS, SCORERS = 704, 256, 64
TASKS, GROUP = 20_000, 8
WORKERS = 64
ROUNDS = 400
TARGET_S = 0.005
COSTS = {"generator>learner": 10.0, "learner>generator": 12.0, "generator>scorer": 2.0,
         "scorer>generator": 2.0}  # fmt: skip


def timed(call: Callable[[int], Any], rounds: int) -> list[float]:
    """Seconds of each call; the collector is off, as its pauses belong to nobody."""
    spent = []
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            begun = time.thread_time()
            call(i)
            spent.append(time.thread_time() - begun)
    finally:
        gc.enable()
    return spent


def ranks(rounds: int) -> list[float]:
    """A load that shifts every twenty steps, so that moves are proposed all the time."""
    counts = {"generator": GENERATORS, "learner": LEARNERS, "scorer": SCORERS, "spare": 0}
    roles = [role for role, count in counts.items() for _ in range(count)]
    rows = [RankRow(rank, role, f"node-{rank // 8}") for rank, role in enumerate(roles)]
    machine = RankMachine(Bounds(horizon_steps=1000, scoring="auto"), COSTS)
    proposed = 0

    def step(i: int) -> None:
        nonlocal proposed
        hard = i // 20 % 2 == 0
        facts = StepFacts(
            step=i + 1, step_s=60.0, rwt_s=0.0 if hard else 30.0 * GENERATORS,
            twt_s=30.0 * LEARNERS if hard else 0.0, generator_busy_s=(60.0 if hard else 30.0) * GENERATORS,
            learner_busy_s=(30.0 if hard else 60.0) * LEARNERS, scorer_busy_s=20.0 * SCORERS,
        )  # fmt: skip
        proposal = machine.decide(facts, counts)
        if proposal is not None:
            proposed += 1
            choose_rank(rows, proposal.source, proposal.target)
            machine.begun(proposal)
            machine.undone(proposal)

    spent = timed(step, rounds)
    if not proposed:
        raise RuntimeError("no move was proposed: the measurement is void")
    return spent


def config() -> Config:
    return build(
        {
            "env": {"name": "coin"},
            "model": {"path": "/nowhere"},
            "run": {"groups_per_step": TASKS // GROUP, "group_size": GROUP, "steps": 10**6, "max_lag": 0},
            "generator": {"replicas": GENERATORS},
            "learner": {"ranks": LEARNERS},
            "scorer": {"replicas": SCORERS},
            "objective": {"kl_coef": 0.1},
            "elastic": {"enabled": True, "horizon_steps": 1000},
        }
    )


class Rows:
    """A generator that is only a row in the table."""

    async def health(self) -> GeneratorHealth:
        raise ConnectionError("never asked")

    async def load_weights(self, weights: Any, epoch: int) -> int:
        raise ConnectionError("never asked")

    async def clear(self, epoch: int) -> None:
        raise ConnectionError("never asked")

    async def restart(self, reason: str) -> None:
        raise ConnectionError("never asked")


async def controller() -> Controller:
    """All generators healthy, nobody watched, admission open."""

    async def ready(name: str) -> bool:
        return True

    made = Controller(
        config(), MemoryQueue(), lambda split, i: Task(id=f"{split}-{i}", env="coin", seed=i),
        lambda name: Rows(), ready=ready, costs=COSTS,
    )  # fmt: skip
    await made.start()
    for slot in made.fleet.slots.values():
        row(slot)
    a_minute_ago(made)
    await made.open_admission(True)
    return made


def a_minute_ago(made: Controller) -> None:
    """As if the step had taken a minute: reports are recent enough, nobody is asked."""
    made.watch._since = time.monotonic() - 60.0


def row(slot: Slot) -> None:
    health = GeneratorHealth(name=slot.name, instance="one", ready=True, version=0, busy=((0.0, 1.0),))
    slot.note(health, "no_work")
    slot.healthy = True


async def barriers(rounds: int) -> list[float]:
    """Barriers with a consumption deficit: a generator is planned to train, committed, undone, again."""
    made, spent, moves = await controller(), [], 0
    for step in range(1, rounds + 1):
        for slot in made.fleet.slots.values():
            row(slot)
        told = {"step": step, "groups": TASKS // GROUP, "waits": {"data": 0.0}, "scorer_busy_s": 0.0,
                "learner_busy_s": 59.0 * LEARNERS, "learners": LEARNERS, "scorers": SCORERS}  # fmt: skip
        begun = time.thread_time()
        answer = await made.barrier(told)
        spent.append(time.thread_time() - begun)
        if answer.move is not None:
            moves += 1
            await made.moved(Moved(move=answer.move.id, ok=False))
        a_minute_ago(made)
    if not moves:
        raise RuntimeError("no rank was moved: the measurement is void")
    return spent


async def pulls(rounds: int) -> list[float]:
    """Workers in turn, each with its share of the open groups."""
    made = await controller()
    shares: list[dict[str, int]] = [{} for _ in range(WORKERS)]
    for i, share in enumerate(shares):
        grant = await made.pull(Pull(worker=f"w{i}", incarnation="a", slots=TASKS // WORKERS + GROUP,
                                     free=-(-TASKS // WORKERS // GROUP) * GROUP))  # fmt: skip
        share |= {order.group: order.attempt for order in grant.orders}
    spent = []
    for i in range(rounds):
        worker = i % WORKERS
        pull = Pull(
            worker=f"w{worker}", incarnation="a", slots=TASKS // WORKERS, free=0, running=shares[worker]
        )
        begun = time.thread_time()
        await made.pull(pull)
        spent.append(time.thread_time() - begun)
    return spent


def admission(rounds: int) -> list[float]:
    """A quarter of the tasks hold a place, the others wait for one; turns end and tasks come back."""
    rng = random.Random(0)
    ledger = Admission(Limits(capacity_tokens=TASKS // 4 * 4096))
    state: dict[str, int] = {}
    running: list[str] = []
    waiting: list[str] = []
    now = 0.0

    def decide() -> None:
        decision = ledger.decide(now)
        running.extend(decision.start)

    for i in range(TASKS):
        name = f"g{i // GROUP}.{i % GROUP}"
        state[name] = rng.randrange(1000, 6000)
        ledger.ask(name, group=f"g{i // GROUP}", tokens=state[name], growth=256, now=now)
    decide()

    def event(i: int) -> None:
        nonlocal now
        now += 0.01
        if i % 2 == 0 and running:
            name = running.pop(rng.randrange(len(running)))
            state[name] += 200
            ledger.turn_ended(name, state[name], now, tool="search")
            waiting.append(name)
        elif waiting:
            name = waiting.pop(rng.randrange(len(waiting)))
            ledger.ask(
                name, group=name.partition(".")[0], tokens=state[name], growth=256, tool="search", now=now
            )
        decide()

    return timed(event, rounds)


def summary(spent: list[float]) -> dict[str, float]:
    """Milliseconds."""
    ordered = sorted(spent)
    return {
        "median_ms": statistics.median(ordered) * 1e3,
        "p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


def run(rounds: int = ROUNDS) -> dict[str, Any]:
    """All four; ``ratio`` is the target over the slowest 99th percentile (above 1: met)."""
    results = {
        "ranks": summary(ranks(rounds)),
        "barrier": summary(asyncio.run(barriers(rounds))),
        "pull": summary(asyncio.run(pulls(rounds))),
        "admission": summary(admission(5 * rounds)),
    }
    worst = max(result["p99_ms"] for result in results.values())
    return {"ratio": TARGET_S * 1e3 / worst, "target": 1.0, "ranks": GENERATORS + LEARNERS + SCORERS,
            "tasks": TASKS, "decisions": results}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run()
    for name, row in result["decisions"].items():
        print(f"{name:<10} median {row['median_ms']:7.3f} ms   p99 {row['p99_ms']:7.3f} ms   "
              f"max {row['max_ms']:7.3f} ms")  # fmt: skip
    print(f"target / slowest p99: {result['ratio']:.1f} (at least {result['target']:.0f})")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["ratio"] >= result["target"] else 1


if __name__ == "__main__":
    sys.exit(main())
