"""Append throughput of the queue against raw pipelined XADD of the same bytes.

``python tests/bench/append.py [--json FILE]`` starts its own server; rounds of the two
alternate, so that a busy machine slows both. Target: at least half of raw XADD.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from redis.asyncio import Redis

from cluster import codec
from cluster.stream import RedisQueue
from cluster.types import Order, Segment, Task, Turn
from cluster.valkey import ValkeyServer

PAYLOAD = 4096  # bytes of one encoded segment, nearly
BATCH = 64  # segments in one append, entries in one pipeline
BATCHES = 40
ROUNDS = 9
TARGET = 0.5


def batches_of(group: str) -> list[list[Segment]]:
    """BATCHES lists of BATCH segments for one trajectory, each about PAYLOAD bytes on the wire."""
    text = "x" * (PAYLOAD - 80)
    turns = [Turn(turn=n, calls=(), observation=text) for n in range(BATCH * BATCHES)]
    segments = [Segment(trajectory=f"{group}.0", group=group, attempt=0, turn=turn) for turn in turns]
    return [segments[first : first + BATCH] for first in range(0, len(segments), BATCH)]


async def ours(queue: RedisQueue, group: str) -> float:
    """Segments per second through ``RedisQueue.append``, encoding included."""
    order = Order(group=group, task=Task(id="t", env="e", seed=0), members=(f"{group}.0",))
    await queue.admit(order)
    batches = batches_of(group)
    start = time.perf_counter()
    for batch in batches:
        if await queue.append(batch) != len(batch):
            raise RuntimeError("a segment was not new: the measurement is void")
    seconds = time.perf_counter() - start
    await queue.close([group], "bench")
    return BATCH * BATCHES / seconds


async def raw(client: Redis, stream: str) -> float:
    """Entries per second through pipelined XADD of the same bytes, encoded beforehand."""
    batches = [[codec.encode(segment) for segment in batch] for batch in batches_of(stream)]
    start = time.perf_counter()
    for batch in batches:
        async with client.pipeline(transaction=False) as pipeline:
            for value in batch:
                pipeline.xadd(stream, {"segment": value})
            await pipeline.execute()
    seconds = time.perf_counter() - start
    await client.delete(stream)
    return BATCH * BATCHES / seconds


async def measure(url: str) -> dict[str, Any]:
    """Alternate the two; median of the rounds' ratios."""
    queue, client = RedisQueue(url, "bench", "queue"), Redis.from_url(url)
    rates: list[tuple[float, float]] = []
    for number in range(ROUNDS + 1):  # the first warms up
        rates.append((await ours(queue, f"g{number}"), await raw(client, f"s{number}")))
    await queue.aclose()
    await client.aclose()
    rates = rates[1:]
    return {
        "name": "queue_append_4kb",
        "ratio": round(statistics.median(a / b for a, b in rates), 3),
        "target": TARGET,
        "ours": round(statistics.median(a for a, _ in rates)),
        "reference": round(statistics.median(b for _, b in rates)),
        "unit": "segments/s",
    }


def run() -> dict[str, Any]:
    """Start a server (AOF everysec, as in a run), measure, stop it."""
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as folder:
        server = ValkeyServer(folder)
        server.start()
        try:
            return asyncio.run(measure(server.url))
        finally:
            server.stop()


def main() -> int:
    """Print and optionally write the result; status 1 below the target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = run()
    line = json.dumps(result)
    sys.stdout.write(line + "\n")
    if arguments.json:
        arguments.json.write_text(line + "\n")
    return 0 if result["ratio"] >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
