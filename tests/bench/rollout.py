"""Turns per second of an env worker against bare loops over the same sandboxes and the same queue.

``python tests/bench/rollout.py [--json FILE]`` starts its own server and sandboxes. The
policy is scripted and answers at once, so what is measured is the worker's own cost: rendering,
tokenising, parsing, records, streaming, ends and rewards. Rounds alternate, so that a busy machine
slows all of them.

- *bare*: as many coroutines as the worker has slots; each steps its environment and appends one
  segment around a ready-made call, turn after turn. Target: at least half of it.
- *batched*: the same, but segments go through the worker's own ``SegmentWriter``. No target; it tells
  what the worker costs when the saving by batches is left out.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from actors.scripted import ScriptedPolicy, character_tokenizer
from actors.tokenizer import Tokenizer
from actors.worker import Worker
from actors.writer import SegmentWriter
from cluster.config import Config, EnvConfig, HarnessConfig, RunConfig
from cluster.messages import EvalEpisode, Grant, Pull
from cluster.stream import RedisQueue
from cluster.types import Call, Order, Segment, StopReason, Task, Turn, VersionSpan, pack_floats, pack_ids
from cluster.valkey import ValkeyServer
from envs.pool import EnvPool
from envs.registry import builder

TURNS = 20  # of every trajectory
SLOTS = 32
GROUP = 8
TARGET = 0.5
DEADLINE_S = 120.0
REPLY = [20, 2]  # "0", end of turn: a guess that is never right
CONFIG = Config(
    env=EnvConfig(name="coin", params={"most": 1000, "guesses": TURNS}, slots=SLOTS, max_turns=TURNS),
    harness=HarnessConfig(max_context=2048, max_new_tokens=4),
    run=RunConfig(group_size=GROUP),
)
TASK = Task(id="t", env="coin", seed=0, data={"coins": 7})

_CALL = Call(
    call=1,
    keep=60,
    added=pack_ids([5] * 40),
    output=pack_ids(REPLY),
    logprobs=pack_floats([-0.5] * len(REPLY)),
    versions=(VersionSpan(0, 0, len(REPLY)),),
    stop=StopReason.STOP,
    temperature=1.0,
)


@dataclass(frozen=True, slots=True)
class Bench:
    """What the rounds share."""

    queue: RedisQueue
    pool: EnvPool
    tokenizer: Tokenizer
    groups: int


class Desk:
    """Hands out one round's orders as slots become free; stops the worker when all are through."""

    def __init__(self, orders: list[Order]) -> None:
        self.orders = orders
        self.done = asyncio.Event()

    async def pull(self, pull: Pull) -> Grant:
        """As many groups as fit."""
        if not self.orders and not pull.running:
            self.done.set()
        count = max(0, pull.free) // GROUP
        given, self.orders = self.orders[:count], self.orders[count:]
        return Grant(orders=tuple(given))

    async def report_eval(self, episodes: list[EvalEpisode]) -> None:
        """No evaluation here."""
        raise RuntimeError("an evaluation was reported")

    async def closed(self, groups: list[str]) -> None:
        """Every group must become ready."""
        raise RuntimeError(f"groups {groups} were closed: the measurement is void")


async def admit(queue: RedisQueue, name: str, groups: int) -> list[Order]:
    """Orders of one round, entered in the queue beforehand."""
    orders = []
    for index in range(groups):
        group = f"{name}-{index}"
        order = Order(group=group, task=TASK, members=tuple(f"{group}.{i}" for i in range(GROUP)))
        await queue.admit(order)
        orders.append(order)
    return orders


async def worker_round(bench: Bench, name: str) -> float:
    """Turns per second of a ``Worker``, from the first pull to the last group ready."""
    desk = Desk(await admit(bench.queue, name, bench.groups))
    policy = ScriptedPolicy(lambda prompt, rng: REPLY)
    worker = Worker("bench", CONFIG, bench.queue, policy, bench.pool, bench.tokenizer, desk)
    start = time.perf_counter()
    running = asyncio.create_task(worker.run())
    waiting = asyncio.create_task(desk.done.wait())
    await asyncio.wait([running, waiting], timeout=DEADLINE_S, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    worker.stop(0.0)
    await running
    seconds = time.perf_counter() - start
    expected = bench.groups * GROUP * TURNS
    if worker.metrics()["turns"] != expected:
        raise RuntimeError(f"{worker.metrics()['turns']} turns where {expected} were expected")
    return expected / seconds


async def bare_round(bench: Bench, name: str, batched: bool) -> float:
    """Turns per second of step and append alone, at the worker's concurrency."""
    orders = await admit(bench.queue, name, bench.groups)
    todo = [(order.group, member) for order in orders for member in order.members]
    writer = SegmentWriter(bench.queue)
    flusher = asyncio.create_task(writer.run())

    async def lane() -> None:
        while todo:
            group, trajectory = todo.pop()
            handle = await bench.pool.acquire()
            try:
                await handle.start(TASK, 0)
                for turn in range(TURNS):
                    result = await handle.step(["0"])
                    segment = Segment(
                        trajectory=trajectory, group=group, attempt=0, turn=_turn(turn, result.observation)
                    )
                    if batched:
                        writer.add(segment)
                    elif await bench.queue.append([segment]) != 1:
                        raise RuntimeError("a segment was not new: the measurement is void")
            finally:
                await handle.release()

    start = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(SLOTS)))
    await writer.flush()
    seconds = time.perf_counter() - start
    flusher.cancel()
    await asyncio.gather(flusher, return_exceptions=True)
    return bench.groups * GROUP * TURNS / seconds


def _turn(turn: int, observation: str) -> Turn:
    """A turn of the size that the worker writes; its call is ready-made."""
    return Turn(turn=turn, calls=(_CALL,), actions=("0",), observation=observation)


async def measure(url: str, folder: Path, rounds: int, groups: int) -> dict[str, Any]:
    """Alternate the three; the ratios are medians over rounds, the first round is warm-up."""
    queue = RedisQueue(url, run="bench")
    pool = EnvPool(builder(CONFIG.env.name, CONFIG.env.params), CONFIG.env, SLOTS)
    await queue.connect()
    await pool.start()
    bench = Bench(queue, pool, character_tokenizer(folder / "tokenizer"), groups)
    rates: dict[str, list[float]] = {"worker": [], "bare": [], "batched": []}
    try:
        for index in range(rounds + 1):
            found = {
                "worker": await worker_round(bench, f"w{index}"),
                "bare": await bare_round(bench, f"p{index}", batched=False),
                "batched": await bare_round(bench, f"b{index}", batched=True),
            }
            if index:
                for name, rate in found.items():
                    rates[name].append(rate)
    finally:
        await pool.close()
        await queue.aclose()
    return _summary(rates)


def _summary(rates: dict[str, list[float]]) -> dict[str, Any]:
    def ratio(other: str) -> float:
        return statistics.median(a / b for a, b in zip(rates["worker"], rates[other], strict=True))

    return {
        "name": "rollout",
        "worker_turns_s": statistics.median(rates["worker"]),
        "bare_turns_s": statistics.median(rates["bare"]),
        "batched_turns_s": statistics.median(rates["batched"]),
        "ratio": ratio("bare"),
        "ratio_batched": ratio("batched"),
        "target": TARGET,
        "passed": ratio("bare") >= TARGET,
        "rounds": len(rates["worker"]),
    }


def run(rounds: int = 5, groups: int = 8) -> dict[str, Any]:
    """Measure with a server and sandboxes of its own; about 20 s."""
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as folder:
        server = ValkeyServer(Path(folder) / "valkey")
        server.start()
        try:
            return asyncio.run(measure(server.url, Path(folder), rounds, groups))
        finally:
            server.stop()


def main(arguments: list[str]) -> int:
    """Print the result; exit status 1 when the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args(arguments)
    result = run()
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
