"""Studies: who is compared, how a split is found, what the figures are made of."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from cluster.errors import ConfigError
from cluster.sim.catalogue import load_profile
from cluster.sim.compare import headline, step_reduction
from cluster.sim.knobs import Job, sweep_of
from cluster.sim.policies import (
    ASYNC,
    POLICIES,
    STATIC,
    Candidate,
    around,
    policy,
    scan,
    scorer_share,
    split_for,
)
from cluster.sim.scenario import Result, Scenario, Split
from cluster.sim.statistics import ratio
from cluster.sim.study import FULL, QUICK, Options, scenario_of, study
from cluster.sim.sweep import Progress, Tuned, Workers
from cluster.sim.vary import VARIED, vary
from cluster.sim.workloads import TableWorkload, load_workload
from cluster.sim.world import run
from deploy.simulate_text import WHAT, answer, waited_share
from tests.sim_tiny import TINY


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def job(tiny: Path) -> Job:
    return Job(load_workload(str(tiny)), load_profile("h100-qwen2.5-7b"), 8)


def test_the_tables_are_closed() -> None:
    """Every name in a list is a policy; every policy is in some list; nobody exceeds the bound."""
    assert set(QUICK) <= set(FULL) == set(POLICIES) == set(WHAT)
    assert set(ASYNC) | set(STATIC) | set(VARIED) <= set(POLICIES)
    for name in POLICIES:
        assert 0 <= policy(name, 1).max_lag <= 1
    assert policy("sync", 3).max_lag == 0 and policy("tide", 3).max_lag == 3


@pytest.mark.parametrize("ranks", [2, 3, 8, 32, 1024])
def test_candidates_use_every_rank_once(ranks: int) -> None:
    profile = load_profile("h100-qwen2.5-7b")
    for name in POLICIES:
        first = scan(policy(name), profile, ranks)
        assert len(set(first)) == len(first) > 0
        beside = [c for one in first for c in around(one, profile, ranks, max(1, ranks // 16), True)]
        for candidate in [*first, *beside]:
            split = candidate.split
            if candidate.policy.rollout == "sync":
                assert split.generators == split.learners == ranks
            else:
                assert split.generators >= 1 and split.learners >= 1 and split.scorers >= 0
                assert split.generators + split.learners + split.scorers == ranks


def test_scorers_take_their_share_of_the_training_ranks() -> None:
    profile = load_profile("h100-qwen2.5-7b")
    assert scorer_share(profile) == pytest.approx((1 / 32000) / (1 / 32000 + 1 / 24300 + 1 / 8100))
    split = split_for(policy("tide"), profile, 32, 8)
    assert split.scorers == round(24 * scorer_share(profile)) and split.learners == 24 - split.scorers
    assert split_for(policy("tide"), profile, 32, 8, scorers=False).scorers == 0
    assert split_for(policy("areal"), profile, 32, 8).scorers == 0
    assert split_for(policy("tide"), load_profile("h100-null"), 32, 8).scorers == 0


def test_step_reduction_is_the_swaps_that_are_saved() -> None:
    """With 8 full micro-batches ready, against streaming: 8 pairs of swaps less, one pipeline fill more."""
    profile = load_profile("h100-qwen2.5-7b")
    swapped, burst = step_reduction(profile, 24)
    score, train = 16384 / 32000, 16384 * (1 / 24300 + 1 / 8100)
    thrash = 8 * (score + train + 2 * 0.5) + 0.5
    ours = 8 * (score + train) + 0.5
    assert 1 - 1.25 * ours / thrash < swapped < 1 - ours / thrash
    assert abs(burst) < 0.15
    assert step_reduction(load_profile("h100-null"), 24) == (0.0, 0.0)


def test_the_best_split_beats_the_others_and_workers_change_nothing(tiny: Path) -> None:
    workload = load_workload(str(tiny))
    profile = load_profile("h100-qwen2.5-7b")
    options = Options(policies=("areal",), steps=8, warmup_steps=2, seeds=(0,), full=True)
    found = study(Job(workload, profile, 8), options, Workers())
    tuned = found.tuned["areal"]
    best = tuned.tried[tuned.best.split, tuned.best.policy.scoring]
    assert best == max(tuned.tried.values()) and len(tuned.tried) >= 7
    scenario = tuned.scenario(found.base)
    others = [replace(scenario, seed=seed) for seed in (1, 2, 3)]
    alone = [result.goodput_tok_s for result in Workers().run(others)]
    with Workers(2) as workers:
        for _ in range(2):  # the second time with the same processes
            assert [result.goodput_tok_s for result in workers.run(others)] == alone
    assert len(set(alone)) == 3


def test_gain_vanishes_where_there_is_nothing_to_win() -> None:
    """No tail, ample KV memory, no scorer: no mechanism beats the best fixed split by more than 5 %."""
    workload = load_workload("null")
    profile = load_profile(workload.spec.run.profile)
    options = Options(
        policies=("stream", "areal", "tide", "tide_no_elastic", "tide_no_admission"),
        steps=12, warmup_steps=4, seeds=(0, 1),
    )  # fmt: skip
    found = study(Job(small(workload, 16), profile, 16), options, Workers())
    figures = headline(found)
    assert figures["goodput_vs_best_async"].mean == pytest.approx(1.0, abs=0.05)
    assert figures["goodput_elastic_vs_static"].mean == pytest.approx(1.0, abs=0.05)
    assert figures["kv_hit_vs_request_lru"].mean == pytest.approx(1.0, abs=0.01)
    assert "train_step_reduction" not in figures
    assert any("a fixed split is simpler" in line for line in answer(found))


def test_elastic_ranks_leave_a_split_alone_that_is_the_best_one() -> None:
    """Few long groups, scored in bursts: learners never wait, and yet no generator is one too many."""
    workload = load_workload("search")
    job = Job(workload, load_profile(workload.spec.run.profile), 32)
    base = replace(scenario_of(job, Options(steps=24, warmup_steps=12)), split=Split(14, 18))
    goodput = [
        run(replace(base, policy=policy(name, 2), seed=seed)).goodput_tok_s
        for name in ("tide", "tide_no_elastic")
        for seed in (0, 1)
    ]
    assert sum(goodput[:2]) > 0.97 * sum(goodput[2:])


def small(workload: TableWorkload, groups: int) -> TableWorkload:
    """The workload with another batch."""
    change = msgspec.structs.replace
    run = change(workload.spec.run, groups_per_step=groups)
    return TableWorkload(change(workload.spec, run=run), workload.name)


class Counting(Progress):
    """Sums what it is told."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.asked = self.done = 0

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def entered(self, steps: int) -> None:
        self.asked += steps

    def ended(self, steps: int) -> None:
        assert self.done + steps <= self.asked, "the bar would pass its end"
        self.done += steps


def test_progress_counts_every_step_once(job: Job) -> None:
    heard = Counting()
    options = Options(
        policies=("sync", "areal", "tide", "tide_no_elastic"), steps=4, warmup_steps=1, seeds=(0, 1),
        tuning_steps=2,
    )  # fmt: skip
    found = study(job, options, Workers(), heard)
    assert heard.done == heard.asked and heard.stages == ["searching splits", "running"]
    assert {name: len(results) for name, results in found.untuned.items()} == {
        "tide": 2,
        "tide_no_elastic": 2,
    }
    tried = sum(len(tuned.tried) for tuned in found.tuned.values())
    finals = sum(len(tuned.proven) for tuned in found.tuned.values())
    assert finals >= 2 and heard.done == tried * 2 + finals * 4 + (4 + 2) * 2 * 4


def test_full_runs_decide_among_the_finalists_and_are_not_made_twice(job: Job) -> None:
    options = Options(
        policies=("stream",), steps=6, warmup_steps=2, seeds=(0, 1), tuning_steps=2, untuned=False
    )
    found = study(job, options, Workers())
    tuned = found.tuned["stream"]
    assert len(tuned.proven) >= 2 and {seed for _, seed in tuned.proven} == {0}
    best = (tuned.best.split, tuned.best.policy.scoring)
    means = {key: result.goodput_tok_s for (key, _), result in tuned.proven.items()}
    assert means[best] == max(means.values()) == tuned.tried[best]
    assert {key: tuned.tried[key] for key in means} == means
    assert found.results["stream"][0] is tuned.proven[best, 0]
    again = Workers().run([replace(tuned.scenario(found.base), seed=0)])[0]
    assert again.goodput_tok_s == means[best]


def test_short_runs_are_put_on_the_scale_of_the_full_ones() -> None:
    rows = [Candidate(policy("areal"), Split(n, 8 - n)) for n in (2, 3, 4, 5)]
    tuned = Tuned(rows[0])
    for candidate, goodput in zip(rows, (100.0, 98.0, 91.0, 50.0), strict=True):
        tuned.note(candidate, goodput)
    finalists = tuned.finalists()
    assert finalists == rows[:3], "the fourth is too far behind"
    runs = [
        [Result(scenario_at(candidate), goodput_tok_s=g)]
        for candidate, g in zip(finalists, (80, 90, 70), strict=True)
    ]
    tuned.prove(finalists, runs)
    assert tuned.best == rows[1] and tuned.known(0) is runs[1][0] and tuned.known(1) is None
    assert list(tuned.tried.values()) == [80, 90, 70, pytest.approx(40)]


def scenario_at(candidate: Candidate) -> Scenario:
    """Only its seed matters."""
    workload, profile = load_workload("null"), load_profile("h100-null")
    return Scenario(workload=workload, profile=profile, policy=candidate.policy, split=candidate.split)


def test_a_quick_search_finds_what_a_full_one_does(job: Job) -> None:
    """Within 3 % of its goodput, with fewer runs."""
    options = Options(policies=("stream",), steps=6, warmup_steps=2, seeds=(0,), tuning_steps=6, full=True)
    full = study(job, options, Workers()).tuned["stream"]
    quick = study(job, replace(options, full=False), Workers()).tuned["stream"]
    best = full.tried[full.best.split, full.best.policy.scoring]
    found = quick.tried[quick.best.split, quick.best.policy.scoring]
    assert found >= 0.97 * best
    assert len(quick.tried) < len(full.tried)


def test_the_even_split_is_compared_with_the_best_one(job: Job) -> None:
    options = Options(
        policies=("tide", "tide_no_elastic"), steps=4, warmup_steps=1, seeds=(0, 1), tuning_steps=3
    )
    found = study(job, options, Workers())
    figures = headline(found)
    still = [result.goodput_tok_s for result in found.untuned["tide_no_elastic"]]
    assert figures["goodput_static_untuned"] == ratio(still, found.goodput("tide_no_elastic"))
    assert all(result.scenario.split.generators == 4 for result in found.untuned["tide"])
    assert any("beginning with an even one (4/" in line for line in answer(found))
    assert not study(job, replace(options, untuned=False), Workers()).untuned


def test_at_the_brink_of_memory_no_generator_is_given_away() -> None:
    """The best split of this job leaves just enough KV memory: more groups side by side would not fit."""
    job = Job(load_workload("text"), load_profile("h100-qwen2.5-14b"), 32)
    base = replace(scenario_of(job, Options(steps=24)), split=Split(14, 18, 0), seed=2, warmup_steps=12)
    lag = job.workload.spec.run.max_lag
    elastic, kept = (run(replace(base, policy=policy(name, lag))) for name in ("tide", "tide_no_elastic"))
    assert elastic.goodput_tok_s > 0.98 * kept.goodput_tok_s, elastic.moves


def test_no_staleness_leaves_out_who_cannot_keep_it(job: Job) -> None:
    run = msgspec.structs.replace(job.workload.spec.run, max_lag=0)
    strict = replace(job, workload=TableWorkload(msgspec.structs.replace(job.workload.spec, run=run)))
    options = Options(
        policies=("one_step_off", "stream"), steps=3, warmup_steps=1, seeds=(0,), tuning_steps=2
    )
    found = study(strict, options, Workers())
    assert set(found.results) == {"stream"}
    assert all(step.lag_max == 0 for step in found.results["stream"][0].steps)


def test_what_cannot_run_is_a_configuration_error(job: Job) -> None:
    spec = job.workload.spec
    kind = msgspec.structs.replace(spec.kind[0], max_context=2_000_000)
    long = TableWorkload(msgspec.structs.replace(spec, kind=(kind,)))
    with pytest.raises(ConfigError, match=r"a.max_context = 2000000 does not fit"):
        scenario_of(replace(job, workload=long), Options())


def test_the_same_job_of_two_sweeps_is_run_once(job: Job) -> None:
    options = Options(
        policies=("stream", "tide"), steps=3, warmup_steps=1, seeds=(0,), tuning_steps=2, untuned=False
    )
    sweeps = [sweep_of(job, "generator.kv_tokens=x1,x0.5"), sweep_of(job, "load.tail=x2,x1")]
    memory, tail = vary(sweeps, options, Workers())
    assert memory.studies[0] is tail.studies[1]
    assert len({id(one) for one in (*memory.studies, *tail.studies)}) == 3
    slow, plain = (study.results["tide"][0].group_latency_s for study in tail.studies)
    assert slow > plain


def test_a_batch_that_is_small_for_the_ranks_is_named(job: Job) -> None:
    options = Options(policies=("stream",), steps=4, warmup_steps=1, seeds=(0,), tuning_steps=2)
    crowd = study(replace(job, ranks=64), options, Workers())
    assert waited_share(crowd, "stream") > 0.25
    assert any("4 x 4 trajectories a step are few for 64 ranks" in line for line in answer(crowd))
    few = study(replace(job, ranks=2), options, Workers())
    assert 0 <= waited_share(few, "stream") < waited_share(crowd, "stream")
