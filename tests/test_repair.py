"""How a learner group is rebuilt and a controller replaced: the small decisions behind recovery."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from learner_tiny import make_config
from test_controller import config, pull, running, two, weights

from cluster import codec
from cluster.errors import LearnerLost
from cluster.memory import MemoryQueue
from cluster.messages import EvalEpisode
from cluster.orders import FORGOTTEN_S
from cluster.types import Weights
from learner import group as groups
from learner.group import FRESH, UNUSABLE, LearnerGroup
from learner.state import Gathered, State


class Rank:
    """A rank port whose process can be ended; each process has its own instance."""

    def __init__(self, name: str, version: int = FRESH, returns: bool = True) -> None:
        self.name, self.version, self.returns = name, version, returns
        self.lives = 0
        self.joined = 0

    async def address(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    async def info(self) -> tuple[str, int]:
        return f"{self.name}-{self.lives}", self.version

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        if self.version != FRESH:
            raise RuntimeError("a process joins once")
        self.joined += 1
        self.version = 3
        return self.version

    async def replace(self) -> None:
        asyncio.get_running_loop().call_later(0.05, self._next)  # it answers for a moment still

    def _next(self) -> None:
        if self.returns:
            self.lives += 1
            self.version = FRESH

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        return {}

    async def publish(self) -> Weights | None:
        return None

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        return None

    async def ready(self) -> bool:
        return True

    async def place(self) -> tuple[str, int, int]:
        return "", 0, 0

    async def offer(self, scored: Any) -> None:
        return None

    async def gather(self) -> Gathered:
        return Gathered(version=self.version, skipped=0, random=b"")

    async def part(self, index: int) -> Any:
        raise IndexError(index)

    async def adopt(self, state: State) -> int:
        self.version = state.version
        return self.version


def group(ranks: list[Rank], timeout_s: float = 5.0) -> LearnerGroup:
    settings = make_config(Path("/nowhere"), learner={"ranks": len(ranks), "start_timeout_s": timeout_s})
    return LearnerGroup(settings, ranks, Path("/nowhere"))


@pytest.mark.parametrize("left", [7, UNUSABLE])
async def test_only_ranks_that_joined_before_are_replaced(left: int) -> None:
    """A rank whose try to join failed cannot try again; one that has just been restarted can."""
    old, fresh = Rank("old", left), Rank("fresh")
    assert await group([old, fresh]).form("") == 3
    assert (old.lives, fresh.lives) == (1, 0)
    assert (old.joined, fresh.joined) == (1, 1)


async def test_a_rank_that_stays_away_is_named_after_the_deadline() -> None:
    with pytest.raises(LearnerLost, match="did not come back"):
        await group([Rank("old", 7, returns=False)], timeout_s=1.0).form("")


async def test_weights_without_a_place_wait_for_being_published_again() -> None:
    """A resumed run knows a version whose file is gone: no generator is blamed for that."""
    queue, ports = MemoryQueue(), two()
    gone = Weights(version=5, location="", checksum="", nbytes=0)
    await queue.put("weights", codec.encode(gone))
    for port in ports.values():
        port.version = 4  # within the bound, so they count as healthy
    async with running(config(), queue, ports) as controller:
        await asyncio.sleep(0.3)
        assert controller.acknowledged() == 4
        await controller.publish(weights(5))
        async with asyncio.timeout(10):
            while controller.acknowledged() < 5:
                await asyncio.sleep(0.01)
    assert not any(port.restarts for port in ports.values())


async def test_an_evaluation_order_that_never_arrived_is_given_again() -> None:
    async with running(config(), MemoryQueue(), two()) as controller:
        asking = asyncio.create_task(controller.evaluate("before", "greedy", 1, 30.0))
        await asyncio.sleep(0.05)
        (order,) = (await controller.pull(pull(4))).orders  # the reply is lost
        assert not (await controller.pull(pull(4))).orders
        await asyncio.sleep(FORGOTTEN_S)
        assert [o.group for o in (await controller.pull(pull(4))).orders] == [order.group]
        running_now = pull(3, running={order.group: 0})
        await asyncio.sleep(FORGOTTEN_S)
        assert not (await controller.pull(running_now)).orders  # reported: it is under way
        await controller.report_eval([EvalEpisode(suite="before", group=order.group, success=1.0)])
        assert (await asking).success == 1.0


async def test_a_rank_that_ends_without_an_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Rank):
        async def replace(self) -> None:
            await super().replace()
            await asyncio.Event().wait()

    monkeypatch.setattr(groups, "INFO_DEADLINE_S", 0.2)
    async with asyncio.timeout(10):
        assert await group([silent := Silent("silent", 7), Rank("fresh")]).form("") == 3
    assert silent.lives == 1


async def test_a_call_that_was_cancelled_elsewhere_is_a_lost_learner() -> None:
    class Cancelled(Rank):
        async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
            raise asyncio.CancelledError

    with pytest.raises(LearnerLost, match="learner rank 1: ConnectionError"):
        await group([Rank("a"), Cancelled("b")]).step([None] * 2, [None] * 2, 8)
