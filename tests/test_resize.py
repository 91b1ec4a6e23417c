"""Learner state from one world into another: bit for bit, and the old world again if that fails."""

import asyncio
import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.errors import LearnerLost
from cluster.types import Weights
from learner import group as groups
from learner.batch import pack
from learner.group import FRESH, UNUSABLE, LearnerGroup
from learner.reshard import gather_parts, load_parts
from learner.signals import ReferenceScorer
from learner.state import Gathered, State
from tests.learner_tiny import (
    assert_equal,
    make_config,
    make_model,
    make_samples,
    one_rank,
    single_rank,
    state_of,
    with_behaviour,
)
from tests.test_learner import run_world


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def batch(model: Path):
    samples, advantage = make_samples()
    return one_rank(with_behaviour(model, samples, 0.1), advantage)


def test_the_update_after_a_handover_is_bit_equal(model: Path, batch) -> None:
    config = make_config(model, learner={"schedule": "cosine", "warmup_steps": 2})
    with single_rank(config, model) as rank:
        for step in (1, 2, 3):
            rank.step(batch, step)
        rank.skipped = 1
        gathered = rank.gather()
        parts = [rank.part(i) for i in range(gathered.parts)]
        drawn = (random.random(), np.random.random(), torch.rand(1).item())
        saved = state_of(rank)
        straight_result = rank.step(batch, 4)
        straight = state_of(rank)
        copied = {n: torch.from_numpy(a) for part in parts for n, a in part.items()}
        assert all(torch.equal(copied[n].reshape(t.shape), t) for n, t in saved.items())  # no shared memory
    for part in parts:
        for array in part.values():
            array.setflags(write=False)  # as the object store hands them out
    with single_rank(config, model) as rank:
        rank.adopt(gathered.version, gathered.skipped, [gathered.random], parts)
        assert (rank.version, rank.skipped) == (3, 1)
        assert (random.random(), np.random.random(), torch.rand(1).item()) == drawn
        assert_equal(state_of(rank), saved)
        assert rank.step(batch, 4).metrics == straight_result.metrics
        assert_equal(state_of(rank), straight)
    assert any(saved[name].any() for name in saved if name.startswith("exp_avg_sq."))


def test_parts_are_cut_by_size_and_only_the_first_rank_keeps_them(model: Path) -> None:
    with single_rank(make_config(model), model) as rank:
        _, optimizer = rank.joined()
        whole = gather_parts(rank.model, optimizer, keep=True)
        small = gather_parts(rank.model, optimizer, keep=True, part_bytes=10_000)
        assert gather_parts(rank.model, optimizer, keep=False) == []
    assert len(whole) == 1 and len(small) > 5
    assert sum(len(part) for part in small) == len(whole[0])


def test_a_state_that_is_not_this_models_is_refused(model: Path, tmp_path: Path) -> None:
    wider = make_model(tmp_path / "wider", intermediate_size=128)
    with single_rank(make_config(wider), wider) as rank:
        foreign = gather_parts(rank.model, rank.joined()[1], keep=True)
    with single_rank(make_config(model), model) as rank:
        _, optimizer = rank.joined()
        own = gather_parts(rank.model, optimizer, keep=True)
        with pytest.raises(LearnerLost, match="model: shape"):
            load_parts(rank.model, optimizer, foreign)
        lacking = [{n: a for n, a in own[0].items() if n != "exp_avg.model.norm.weight"}]
        with pytest.raises(LearnerLost, match=r"lacks 1 tensors, first exp_avg\.model\.norm"):
            load_parts(rank.model, optimizer, lacking)
        twice = {"exp_avg.model.norm.weight": own[0]["model.model.norm.weight"]}
        with pytest.raises(LearnerLost, match="has exp_avg"):
            load_parts(rank.model, optimizer, [own[0], twice])
        with pytest.raises(LearnerLost, match="no such tensor"):
            load_parts(rank.model, optimizer, [{"model.other": np.zeros(3, np.float32)}])


def test_a_rank_beyond_the_old_world_does_not_repeat_an_earlier_stream(model: Path, batch) -> None:
    with single_rank(make_config(model), model) as rank:
        gathered = rank.gather()
        parts = [rank.part(i) for i in range(gathered.parts)]
        first = torch.rand(4)
        rank.adopt(5, 0, [], parts)
        second = torch.rand(4)
        rank.adopt(6, 0, [], parts)
        third = torch.rand(4)
    assert not torch.equal(first, second) and not torch.equal(second, third)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 1, 2), (1, 3, 2)])
def test_state_is_bit_equal_through_worlds_in_memory(worlds: tuple[int, ...], tmp_path: Path) -> None:
    """gloo processes; some parameters have 2 rows, so that on 3 ranks the last holds an empty shard."""
    model = make_model(tmp_path / "m", head_dim=2, num_attention_heads=1, num_key_value_heads=1)
    results = [run_world(model, world, tmp_path, "hand") for world in worlds]
    assert [(r["version"], r["skipped"]) for r in results] == [(2, 2)] * 3
    first = torch.load(tmp_path / "full-0.pt")
    for count in (1, 2):
        assert_equal(torch.load(tmp_path / f"full-{count}.pt"), first)
    if 3 in worlds:
        assert results[worlds.index(3)]["empty"] > 0
    drawn = [json.loads((tmp_path / f"drawn-{count}.json").read_text()) for count in range(3)]
    assert len({tuple(d) for d in drawn}) == 3, "rank 0's random stream went on, it did not start again"
    losses = [r["metrics"]["loss"] for r in results]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


# -- the group ------------------------------------------------------------------------------


class Rank:
    """A rank port with a state of one number; ``fails`` names the calls that raise, once each."""

    def __init__(self, name: str, version: int = FRESH, value: float = 0.0) -> None:
        self.name, self.version, self.value = name, version, value
        self.lives = 0
        self.at = ("", 0, 0)
        self.fails: list[str] = []
        self.calls: list[str] = []

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        if call in self.fails:
            self.fails.remove(call)
            raise RuntimeError(f"{self.name} cannot {call}")

    async def ready(self) -> bool:
        return True

    async def address(self) -> tuple[str, int]:
        return self.name, 1 + self.lives

    async def info(self) -> tuple[str, int]:
        return f"{self.name}-{self.lives}", self.version

    async def place(self) -> tuple[str, int, int]:
        return self.at

    async def join(self, host: str, port: int, checkpoint: str, rank: int, world: int) -> int:
        assert self.version == FRESH, "a process joins once"
        self.version = UNUSABLE
        self._enter("join")
        self.at = (f"{host}:{port}", rank, world)
        self.version, self.value = (int(checkpoint), float(checkpoint)) if checkpoint else (0, 0.0)
        return self.version

    async def step(self, batch: Any, signal: Any, step: int) -> dict[str, Any]:
        return {"spent": {"train": 1.5}}

    async def offer(self, scored: Any) -> None:
        return None

    async def publish(self) -> Weights | None:
        return None

    async def save(self, folder: str, extra: dict[str, Any]) -> None:
        self._enter("save")

    async def gather(self) -> Gathered:
        self._enter("gather")
        chief = self.at[1] == 0
        return Gathered(version=self.version, skipped=1, random=self.name.encode(), parts=2 * chief, nbytes=8)

    async def part(self, index: int) -> Any:
        return [self.value][index:]

    async def adopt(self, state: State) -> int:
        self._enter("adopt")
        self.version, self.value = state.version, state.parts[0][0]
        return self.version

    async def replace(self) -> None:
        self.calls.append("replace")
        self.version, self.lives, self.value, self.at = FRESH, self.lives + 1, 0.0, ("", 0, 0)


async def formed(ranks: list[Rank], version: int = 7, **elastic: Any) -> LearnerGroup:
    settings = make_config(Path("/nowhere"), learner={"start_timeout_s": 3.0}, elastic=elastic)
    group = LearnerGroup(settings, ranks, Path("/nowhere"))
    await group.form(str(version))
    for rank in ranks:
        rank.calls.clear()
    return group


async def saved() -> str:
    return "7"


async def test_resize_goes_through_memory_and_reports_its_parts() -> None:
    a, b = Rank("a"), Rank("b")
    group = await formed([a])
    a.value = 3.25
    grown = await group.resize([a, b], [0, 4], saved)
    assert grown.ok and grown.parts.keys() == {"gather", "regroup", "reshard", "total"}
    assert (group.ranks, group.numbers) == ([a, b], [0, 4])
    assert [(r.version, r.value, r.at[1:]) for r in (a, b)] == [(7, 3.25, (0, 2)), (7, 3.25, (1, 2))]
    assert await group.whole()
    shrunk = await group.resize([a], [0], saved)
    assert shrunk.ok and await group.whole() and a.value == 3.25
    assert b.version == FRESH and b.calls[-1] == "replace"  # its memory is free again
    assert (await group.step([None], [None], 8))["spent"] == {"train": 1.5}


async def test_a_state_that_cannot_be_gathered_goes_through_a_checkpoint() -> None:
    a, b = Rank("a"), Rank("b")
    group = await formed([a])
    a.fails = ["gather"]
    resized = await group.resize([a, b], [0, 1], saved)
    assert resized.ok and resized.parts.keys() == {"gather_failed", "save", "regroup", "total"}
    assert [r.version for r in (a, b)] == [7, 7] and "adopt" not in a.calls + b.calls
    group = await formed([c := Rank("c")], resize="checkpoint")
    resized = await group.resize([c, Rank("d")], [0, 1], saved)
    assert resized.ok and resized.parts.keys() == {"save", "regroup", "total"} and "gather" not in c.calls


@pytest.mark.parametrize("failing", ["join", "adopt"])
async def test_a_resize_that_fails_gives_back_the_old_world_from_memory(failing: str) -> None:
    a, b = Rank("a"), Rank("b")
    group = await formed([a])
    a.value = 3.25
    b.fails = [failing]
    resized = await group.resize([a, b], [0, 1], saved)
    assert not resized.ok and f"b cannot {failing}" in resized.error
    assert (group.ranks, group.numbers) == ([a], [0])
    assert (a.version, a.value, a.at[1:]) == (7, 3.25, (0, 1)) and await group.whole()
    assert b.version == FRESH


async def test_an_old_world_that_dies_while_it_hands_over_is_a_lost_learner() -> None:
    a, b = Rank("a"), Rank("b")
    group = await formed([a])
    a.fails = ["gather"]

    async def cannot() -> str:
        raise LearnerLost("nobody to save")

    with pytest.raises(LearnerLost, match="a cannot gather"):
        await group.resize([a, b], [0, 1], cannot)
    a.fails, b.fails = ["join", "join"], ["join"]
    with pytest.raises(LearnerLost, match="cannot join"):
        await group.resize([a, b], [0, 1], saved)


async def test_ranks_of_two_groups_are_not_whole() -> None:
    """A feeder that died while it resized finds ranks at one version in two process groups."""
    a, b = Rank("a"), Rank("b")
    await formed([a])
    group = await formed([b])
    assert await group.whole()
    group.assign([a, b], [0, 1])
    assert not await group.whole() and await group.versions() == {7}
    with pytest.raises(ValueError, match="at least one"):
        group.assign([], [])
    await asyncio.sleep(0)


# -- real actors ----------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path):
    import ray

    root = str(Path(__file__).resolve().parent.parent)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        namespace="resize",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": root}},
    )
    yield ray
    ray.shutdown()


def tensors_in(ray: Any, state: State) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(np.array(a)) for p in state.parts for n, a in ray.get(p).items()}


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_actors_grow_and_shrink_by_object_reference(model: Path, cluster: Any, tmp_path: Path) -> None:
    """1 -> 2 -> 1 with real ranks and a scorer: the same bits and losses, however the batch is scored."""
    from cluster.config import dump
    from learner.drive.remote import Members, _Rank, _Scorer
    from learner.late import Late, keys_of
    from learner.remote import RemoteLearner, RemoteScorer

    config = make_config(
        model,
        objective={"kl_coef": 0.1},
        scorer={"replicas": 1, "timeout_s": 240.0},
        generator={"replicas": 1},
        learner={"start_timeout_s": 240.0},
    )
    tree = dump(config)
    keep = [
        RemoteLearner.options(name=f"learner-{i}", max_restarts=-1).remote(
            tree, str(model), i, "run", str(tmp_path / "w")
        )
        for i in range(2)
    ]
    keep.append(RemoteScorer.options(name="scorer-0", max_restarts=-1).remote(tree, str(model)))
    members = Members("learner", config)
    ranks = [_Rank(members, number) for number in range(2)]
    scorer = _Scorer(Members("scorer", config), 2)
    group = LearnerGroup(config, ranks[:1], tmp_path / "checkpoints")
    samples, advantage = make_samples()
    samples = with_behaviour(model, samples, 0.1)
    keys = keys_of(samples)
    blank = [np.zeros(len(s.ids), np.float32) for s in samples]
    scored = await scorer.score(pack(samples, blank, 64, 1, 4).ranks[0], keys)

    async def step(number: int, mode: str) -> dict[str, Any]:
        world = len(group.ranks)
        batches = list(pack(samples, advantage, 64, world, 2, scoring="decoupled").ranks)
        late = Late("here") if mode == "here" else Late("offered", keys)
        running = asyncio.ensure_future(group.step(batches, [late] * world, number))
        if mode != "here":
            await asyncio.gather(*(rank.offer(scored) for rank in group.ranks))
        return await running

    assert await group.form("") == 0
    losses, spent = [], []
    for number, numbers in ((1, [0, 1]), (2, [0]), (3, [0, 1])):
        for mode in ("here", "offered"):
            result = await step(2 * number - 1 + (mode != "here"), mode)
            losses.append(result["loss"])
            spent.append(result["spent"])
        before = await group.gather()
        kept = tensors_in(cluster, before)
        resized = await group.resize([ranks[n] for n in numbers], numbers, lambda: group.save(0, {}))
        assert resized.ok and await group.whole() and await group.versions() == {2 * number}
        assert before.nbytes == sum(t.nbytes for t in kept.values())
        assert sum(resized.parts[name] for name in ("gather", "regroup", "reshard")) <= resized.parts["total"]
        after = await group.gather()
        assert_equal(tensors_in(cluster, after), kept)
        assert after.random[0] == before.random[0]
    assert all(s["score"] > 0 and s["swap"] > 0 for s in spent[::2])
    with single_rank(config, model) as rank:
        signal = ReferenceScorer(model)
        for number, loss in enumerate(losses, start=1):
            batch = one_rank(samples, advantage, micro_rows=2)
            straight = rank.step(batch, number, partial(signal.score, batch))
            assert loss == pytest.approx(straight.metrics["loss"], abs=1e-5), number


async def test_a_rank_that_left_and_is_silent_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent(Rank):
        async def replace(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(groups, "INFO_DEADLINE_S", 0.2)
    a, b = Rank("a"), Silent("b")
    group = await formed([a, b])
    async with asyncio.timeout(10):
        assert (await group.resize([a], [0], saved)).ok
    assert group.ranks == [a] and await group.whole()
