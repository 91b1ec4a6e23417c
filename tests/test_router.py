"""Router: sticky, batching, retrying, fenced by the epoch."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
from fake_engine import until
from msgspec.structs import replace

from actors.router import Router
from actors.scripted import ScriptedGenerator, ScriptedPolicy
from cluster.config import GeneratorConfig
from cluster.errors import BadRequest, EngineFailed, StaleEpoch
from cluster.messages import GeneratorRow, Table
from cluster.types import Completion, Request, Sampling, VersionSpan, pack_floats, pack_ids

CONFIG = GeneratorConfig(request_timeout_s=2.0, max_retries=3)
Make = Callable[..., Router]


def request(key: str, session: str = "g0.0", prompt: Sequence[int] = (5, 6, 7)) -> Request:
    return Request(
        id=key, prompt=pack_ids(prompt), sampling=Sampling(max_tokens=8, stop_ids=(2,)), session=session
    )


def table(epoch: int, *names: str, unhealthy: Sequence[str] = ()) -> Table:
    return Table(
        epoch=epoch, generators=tuple(GeneratorRow(name, name not in unhealthy, 0) for name in names)
    )


def scripted(delay_s: float = 0.0) -> ScriptedGenerator:
    return ScriptedGenerator(ScriptedPolicy(lambda prompt, rng: [9, 2], delay_s=delay_s))


class Altering(ScriptedGenerator):
    """Passes every completion through a function."""

    def __init__(self, alter: Callable[[Completion], Completion]) -> None:
        super().__init__(ScriptedPolicy(lambda prompt, rng: [9, 2]))
        self.alter = alter

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        return [self.alter(completion) for completion in await super().collect(caller, wait_s)]


class Dying(ScriptedGenerator):
    """Answers so many submits, then raises as a dead actor does, for ever or ``times`` times."""

    def __init__(self, good: int, times: int = 10**9) -> None:
        super().__init__(ScriptedPolicy(lambda prompt, rng: [9, 2]))
        self.good = good
        self.times = times

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        if self.good > 0:
            self.good -= 1
        elif self.times > 0:
            self.times -= 1
            raise ConnectionResetError("actor died")
        await super().submit(caller, requests)


class LosingPolls(ScriptedGenerator):
    """The first poll takes the answers and fails, as a broken connection does."""

    polls = 0

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        self.polls += 1
        found = await super().collect(caller, wait_s)
        if self.polls == 1:
            raise ConnectionResetError("reply lost")
        return found


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    routers: list[Router] = []

    def build(generators: dict[str, ScriptedGenerator], config: GeneratorConfig = CONFIG) -> Router:
        router = Router("w0", config, lambda name: generators[name])
        routers.append(router)
        router.set_table(table(1, *generators))
        return router

    yield build
    for router in routers:
        await router.aclose()


async def test_requests_of_one_moment_travel_together(make: Make) -> None:
    generator = scripted()
    router = make({"a": generator})
    answers = await asyncio.gather(*(router.generate(request(f"r{i}", f"g0.{i}")) for i in range(20)))
    assert [answer.id for answer in answers] == [f"r{i}" for i in range(20)]
    assert generator.batches == [20]


async def test_a_session_stays_and_a_group_gathers(make: Make) -> None:
    generators = {"a": scripted(), "b": scripted()}
    router = make(generators)
    for turn in range(3):
        for group in ("g0", "g1"):
            await asyncio.gather(
                *(router.generate(request(f"{group}.{i}/{turn}", f"{group}.{i}")) for i in range(3))
            )
    homes: dict[str, set[str]] = {}
    for name, generator in generators.items():
        for seen in generator.policy.requests:
            homes.setdefault(seen.session.partition(".")[0], set()).add(name)
    assert all(len(home) == 1 for home in homes.values())
    hits = router.stats.kv_hit
    assert (hits["first_turn"].calls, hits["same_rank"].calls, hits["migrated"].calls) == (6, 12, 0)
    assert hits["same_rank"].prompt == 12 * 3


async def test_load_spreads_when_the_group_is_large(make: Make) -> None:
    generators = {"a": scripted(0.02), "b": scripted(0.02)}
    router = make(generators)
    await asyncio.gather(*(router.generate(request(f"r{i}", f"g0.{i}")) for i in range(40)))
    counts = sorted(len(generator.policy.requests) for generator in generators.values())
    assert sum(counts) == 40 and counts[0] >= 15


async def test_a_dead_generator_is_left_for_another(make: Make) -> None:
    dead, alive = Dying(good=0), scripted()
    router = make({"a": dead, "b": alive})
    answers = await asyncio.gather(*(router.generate(request(f"r{i}", f"g{i}.0")) for i in range(8)))
    assert {answer.generator for answer in answers} == {"scripted"}
    assert len(alive.policy.requests) == 8
    assert router.stats.retries > 0


async def test_the_only_generator_is_asked_again_after_its_restart(make: Make) -> None:
    router = make({"a": Dying(good=0, times=2)})
    answer = await router.generate(request("r"))
    assert answer.id == "r"
    assert router.stats.retries == 2


async def test_answers_lost_with_a_poll_are_asked_again_once(make: Make) -> None:
    generator = LosingPolls(ScriptedPolicy(lambda prompt, rng: [9, 2]))
    router = make({"a": generator})
    await router.generate(request("r"))
    assert [seen.id for seen in generator.policy.requests] == ["r", "r#1"]


async def test_retries_end(make: Make) -> None:
    router = make({"a": Dying(good=0)}, replace(CONFIG, max_retries=1))
    with pytest.raises(EngineFailed, match=r"failed 2 times.*actor died"):
        await router.generate(request("r"))


async def test_a_bad_request_is_not_retried(make: Make) -> None:
    generator = Altering(lambda found: Completion(id=found.id, error="id 99 beyond the vocabulary"))
    router = make({"a": generator})
    with pytest.raises(BadRequest, match="beyond the vocabulary"):
        await router.generate(request("r"))
    assert router.stats.retries == 0


@pytest.mark.parametrize(
    ("alter", "match"),
    [
        (lambda found: replace(found, logprobs=pack_floats([-0.1])), "2 ids with 1 log-probs"),
        (lambda found: replace(found, versions=(VersionSpan(0, 0, 1),)), "cover 1 of 2"),
        (lambda found: replace(found, versions=(VersionSpan(0, 0, 1), VersionSpan(1, 0, 2))), "do not tile"),
        (lambda found: replace(found, output=b"", logprobs=b"", versions=()), "no output ids"),
        (lambda found: Completion(id=found.id), "aborted"),
        (lambda found: Completion(id=found.id, error="core died", retryable=True), "core died"),
    ],
)
async def test_malformed_answers_never_come_through(
    make: Make, alter: Callable[[Completion], Completion], match: str
) -> None:
    router = make({"a": Altering(alter)}, replace(CONFIG, max_retries=0))
    with pytest.raises(EngineFailed, match=match):
        await router.generate(request("r"))


async def test_older_tables_are_refused(make: Make) -> None:
    router = make({"a": scripted(), "b": scripted()})
    router.set_table(table(5, "b"))
    with pytest.raises(StaleEpoch, match="epoch 4 while 5"):
        router.set_table(table(4, "a"))
    router.set_table(table(5, "b"))  # the same again, or newer versions: harmless
    await router.generate(request("r"))
    assert router.stats.stale_tables == 1


async def test_waits_for_a_healthy_generator_but_not_for_ever(make: Make) -> None:
    generator = scripted()
    router = make({"a": generator}, replace(CONFIG, request_timeout_s=1.5))
    router.set_table(table(2, "a", unhealthy=["a"]))
    began = time.monotonic()
    with pytest.raises(EngineFailed, match=r"no healthy generator for 1.5 s \(a\)"):
        await router.generate(request("r"))
    assert 1.4 < time.monotonic() - began < 30.0
    waiting = asyncio.create_task(router.generate(request("r2")))
    await asyncio.sleep(0.05)
    router.set_table(table(3, "a"))
    assert (await waiting).id == "r2"


async def test_a_silent_generator_costs_one_timeout(make: Make) -> None:
    silent, alive = scripted(delay_s=30.0), scripted()
    router = make({"a": silent, "b": alive}, replace(CONFIG, request_timeout_s=1.0))
    answer = await router.generate(request("r"))
    assert answer.id == "r"
    assert [len(g.policy.requests) for g in (silent, alive)] == [1, 1]
    for task in silent._tasks:
        task.cancel()


async def test_requests_at_a_generator_that_left_move_at_once(make: Make) -> None:
    slow, alive = scripted(delay_s=30.0), scripted()
    router = make({"a": slow, "b": alive}, replace(CONFIG, request_timeout_s=20.0))
    waiting = asyncio.create_task(router.generate(request("r")))
    await until(lambda: len(slow.policy.requests) == 1)
    router.set_table(table(2, "b"))
    async with asyncio.timeout(10):
        await waiting
    for task in slow._tasks:
        task.cancel()


async def test_prefix_hits_by_kind(make: Make) -> None:
    generators = {"a": Altering(lambda c: replace(c, cached_tokens=2)), "b": scripted()}
    router = make(generators)
    await router.generate(request("r0"))
    await router.generate(request("r1"))
    generators["a"].policy.version = 1
    await router.generate(request("r2"))
    router.set_table(table(2, "a", "b", unhealthy=["a"]))
    await router.generate(request("r3"))
    hits = router.stats.kv_hit
    assert {kind: hit.calls for kind, hit in hits.items()} == {
        "first_turn": 1, "same_rank": 1, "post_sync": 1, "migrated": 1,
    }  # fmt: skip
    assert (hits["same_rank"].cached, hits["migrated"].cached) == (2, 0)


async def test_a_cancelled_call_leaves_nothing_waiting(make: Make) -> None:
    generator = scripted(delay_s=0.1)
    router = make({"a": generator})
    waiting = asyncio.create_task(router.generate(request("r")))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert router._lanes["a"].load == 0
    assert (await router.generate(request("r2"))).id == "r2"


async def test_a_session_that_moves_gives_up_its_place_where_it_was() -> None:
    generators = {"a": scripted(), "b": scripted()}
    router = Router("w0", CONFIG, lambda name: generators[name], gated=True)
    rows = (GeneratorRow("a", True, 0, 1000), GeneratorRow("b", True, 0, 500))
    router.set_table(Table(epoch=1, generators=rows))
    await router.generate(request("r0"))
    assert len(generators["a"].policy.requests) == 1  # most room
    assert generators["a"].policy.requests[0].mobile
    router.set_table(table(2, "a", "b", unhealthy=["a"]))
    await router.generate(request("r1"))
    assert len(generators["b"].policy.requests) == 1
    router.forget("g0.0")
    await until(lambda: generators["a"].released == generators["b"].released == ["g0.0"])
    await router.aclose()


async def test_nothing_is_told_to_generators_that_admit_by_request(make: Make) -> None:
    generator = scripted()
    router = make({"a": generator})
    await router.generate(request("r0"))
    router.forget("g0.0")
    await asyncio.sleep(0.05)
    assert generator.released == [] and generator.policy.requests[0] == request("r0")


class Heard(ScriptedGenerator):
    """Writes down what it is told, in order; a release takes its time."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(ScriptedPolicy(lambda prompt, rng: [9, 2], delay_s=delay_s))
        self.heard: list[str] = []
        self.rooms: list[int] = []

    async def submit(self, caller: str, requests: Sequence[Request]) -> None:
        self.heard += [request.id for request in requests]
        await super().submit(caller, requests)

    async def collect(self, caller: str, wait_s: float, elsewhere: int = 0) -> list[Completion]:
        self.rooms.append(elsewhere)
        return await super().collect(caller, min(wait_s, 0.02), elsewhere)

    async def release(self, caller: str, sessions: Sequence[str]) -> None:
        await asyncio.sleep(0.05)
        self.heard += [f"{caller} left {session}" for session in sessions]


def rooms(epoch: int, *rows: tuple[str, int, int]) -> Table:
    """Rows of (name, free tokens, number of the report)."""
    return Table(
        epoch=epoch, generators=tuple(GeneratorRow(name, True, 0, free, n) for name, free, n in rows)
    )


async def test_a_new_report_counts_even_if_it_says_the_same_and_an_old_one_does_not() -> None:
    router = Router("w0", CONFIG, lambda name: scripted(), gated=True)
    router.set_table(rooms(1, ("a", 1000, 1)))
    await router.generate(request("r0"))
    lane = router._lanes["a"]
    assert lane.room == 1000 - 3 - 8
    router.set_table(rooms(2, ("a", 1000, 1)))
    assert lane.room == 1000 - 3 - 8, "the table repeats the report from before"
    router.set_table(rooms(2, ("a", 1000, 2)))
    assert lane.room == 1000
    await router.aclose()


async def test_each_poll_tells_the_room_elsewhere_as_it_is_now() -> None:
    free = {"a": 5000, "b": 300, "c": 700}
    generators = {"a": Heard(delay_s=2.0), "b": Heard(), "c": Heard()}
    router = Router("w0", CONFIG, lambda name: generators[name], gated=True)
    router.set_table(rooms(1, ("a", 5000, 1), ("b", 0, 1), ("c", 0, 1)))
    waiting = asyncio.create_task(router.generate(request("r0")))
    told = generators["a"].rooms
    await until(lambda: told[-1:] == [0])
    router.set_table(rooms(2, ("a", 5000, 2), ("b", 300, 2), ("c", 700, 2)))
    await until(lambda: told[-1] == 700)
    router.set_table(
        Table(epoch=3, generators=tuple(GeneratorRow(n, n != "c", 0, f, 3) for n, f in free.items()))
    )
    await until(lambda: told[-1] == 300)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await router.aclose()


async def test_a_session_that_comes_back_asks_after_it_has_left() -> None:
    generator = Heard()
    router = Router("w0", CONFIG, lambda name: generator, gated=True)
    router.set_table(rooms(1, ("a", 1000, 1)))
    for attempt in range(2):  # the release waits for others, then it is under way
        await router.generate(request(f"r{attempt}"))
        router.forget("g0.0")
        await asyncio.sleep(0.03 * attempt)
    await router.generate(request("r2"))
    assert generator.heard == ["r0", "w0 left g0.0", "r1", "w0 left g0.0", "r2"]
    await router.aclose()
