"""The simulated job: books that balance, bounds that hold, and cases whose answer is known in advance."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import config as configuration
from cluster.admission import Admission
from cluster.ranks import Proposal, RankMachine, StepFacts
from cluster.sim.profile import (
    GeneratorProfile,
    LearnerProfile,
    Profile,
    ScorerProfile,
    SwitchProfile,
    SyncProfile,
)
from cluster.sim.scenario import Fault, Plan, PolicyConfig, Result, Scenario, Split, Turn
from cluster.sim.world import World, run

TURNS = 3
PROFILE = Profile(
    name="test",
    generator=GeneratorProfile(
        kv_tokens=20_000, block=16, max_seqs=32, prefill_tok_s=5_000.0, step_base_s=0.01, step_seq_s=0.001,
        step_ctx_s=1e-6,
    ),
    learner=LearnerProfile(
        forward_tok_s=4_000.0, backward_tok_s=2_000.0, step_fixed_s=0.3, scaling=1.0, micro_tokens=1_000
    ),
    scorer=ScorerProfile(forward_tok_s=4_000.0, swap_s=0.5, passes=1),
    sync=SyncProfile(publish_s=0.1, load_s=0.2),
    switch=SwitchProfile(
        generator_scorer=0.5, scorer_generator=0.5, generator_learner=2.0, learner_generator=2.0
    ),
)  # fmt: skip
UNSCORED = msgspec.structs.replace(PROFILE, scorer=ScorerProfile(forward_tok_s=1.0, passes=0))
STREAM = PolicyConfig(
    name="stream", rollout="stream", admission="request", scoring="decoupled", roles="static", max_lag=2
)


class Constant:
    """Every episode is the same."""

    name = "constant"

    def __init__(self, turns: int = TURNS, prompt: int = 100, output: int = 20, env_s: float = 1.0) -> None:
        self.turns, self.prompt, self.output, self.env_s = turns, prompt, output, env_s

    def plan(self, seed: int, group: int, member: int) -> Plan:
        last = self.turns - 1
        turns = [
            Turn(self.prompt if i == 0 else 10, self.output, 0.0 if i == last else self.env_s, "tool")
            for i in range(self.turns)
        ]
        return Plan(tuple(turns), 0.5)


class Uneven(Constant):
    """Lengths and waits depend on who it is."""

    name = "uneven"

    def plan(self, seed: int, group: int, member: int) -> Plan:
        x = (seed * 31 + group * 7919 + member * 104_729) % 1009 / 1009
        count = 1 + int(6 * x**3)
        turns = [
            Turn(100 if i == 0 else 10 + int(40 * x), 5 + int(60 * x * x), (i < count - 1) * 3 * x**2, "tool")
            for i in range(count)
        ]
        return Plan(tuple(turns), 0.2 + x, f"kind{group % 2}")


class Growing(Constant):
    """Long histories, slow environments."""

    name = "growing"

    def plan(self, seed: int, group: int, member: int) -> Plan:
        wait = 0.3 + 0.1 * ((group * 7 + member) % 5)
        return Plan(tuple(Turn(300, 20, wait * (i < 9), "tool") for i in range(10)), 0.1 * member)


class Rewriting(Growing):
    """Of the history only its beginning is kept: each turn begins a training row."""

    name = "rewriting"

    def plan(self, seed: int, group: int, member: int) -> Plan:
        whole = super().plan(seed, group, member)
        turns = (turn._replace(kept=100) for turn in whole.turns[1:])
        return whole._replace(turns=(whole.turns[0], *turns))


def scenario(**changes: object) -> Scenario:
    """A small job; changes replace its fields."""
    plain = Scenario(
        workload=Uneven(), profile=PROFILE, policy=STREAM, split=Split(3, 2, 1), steps=12, groups_per_step=4,
        group_size=4, warmup_steps=2,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def policy(**changes: object) -> PolicyConfig:
    """``STREAM`` with changes."""
    return replace(STREAM, **changes)  # type: ignore[arg-type]


def key(result: Result) -> object:
    """All that has to be equal in two runs of one scenario."""
    plain = {name: value for name, value in vars(result).items() if name not in ("wall_s", "scenario")}
    return plain


POLICIES = st.sampled_from(
    [
        policy(name="sync", rollout="sync", scoring="full_batch", max_lag=0),
        policy(name="one", rollout="one_step_off", scoring="full_batch", max_lag=1),
        policy(scoring="thrash"),
        policy(scoring="colocated", kv_on_sync="recompute"),
        policy(scoring="decoupled", max_lag=0),
        policy(scoring="full_batch", admission="aimd", max_lag=1),
        policy(scoring="full_batch", roles="lending"),
        policy(scoring="auto", admission="task", roles="elastic"),
        policy(scoring="decoupled", admission="task", roles="elastic", max_lag=1),
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    POLICIES,
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([0, 8, 20]),
    st.sampled_from([0, 2]),
    st.lists(st.tuples(st.floats(0.0, 40.0), st.integers(0, 6), st.floats(0.0, 30.0)), max_size=2),
    st.booleans(),
)
def test_books_balance_and_bounds_hold(
    chosen: PolicyConfig,
    seed: int,
    drain: bool,
    slots: int,
    every: int,
    faults: list[tuple[float, int, float]],
    gated: bool,
) -> None:
    stream = chosen.rollout == "stream"
    found = scenario(
        policy=chosen, seed=seed, drain=drain, env_slots=slots, eval_every=every, eval_tasks=3, steps=6,
        faults=tuple(Fault(*fault) for fault in faults) if stream else (), gated=gated,
        split=Split(4, 2, 1), min_groups_per_step=2 if stream and gated else 0,
    )  # fmt: skip
    result = run(found)
    ledger = result.ledger
    assert ledger["admitted"] == ledger["trained"] + ledger["dropped.stale"] + ledger["pending"]
    assert len(result.steps) == 6
    assert all(0 <= step.lag_max <= chosen.max_lag for step in result.steps)
    times = [step.t for step in result.steps]
    assert times == sorted(times)
    ranks = 4 if chosen.rollout == "sync" else 7
    rank_seconds = sum(sum(s.rwt_s.values()) + sum(s.twt_s.values()) for s in result.steps)
    assert rank_seconds <= ranks * times[-1] + 1e-6
    if drain and not result.wasted_tokens and not found.min_groups_per_step:
        assert ledger["pending"] == 0


def test_the_same_scenario_gives_the_same_result() -> None:
    busy = scenario(
        policy=policy(scoring="auto", admission="task", roles="elastic"), eval_every=3, eval_tasks=4,
        faults=(Fault(20.0, 3, 10.0),),
    )  # fmt: skip
    assert key(run(busy)) == key(run(busy))
    assert key(run(replace(busy, seed=1))) != key(run(busy))


def test_without_staleness_every_token_is_of_the_version_trained() -> None:
    result = run(scenario(policy=policy(max_lag=0)))
    assert {step.lag_max for step in result.steps} == {0}
    lagging = run(scenario(policy=policy(max_lag=2)))
    assert max(step.lag_max for step in lagging.steps) == 2


def decode_s(b: int, context: int, tokens: int) -> float:
    """Seconds of ``tokens`` iterations with ``b`` sequences whose contexts sum to ``context``."""
    p = PROFILE.generator
    return sum(p.step_base_s + b * p.step_seq_s + (context + i * b) * p.step_ctx_s for i in range(tokens))


def test_one_task_at_a_time_takes_what_its_parts_take() -> None:
    """One generator, one learner, groups of one, bound 0: a step is the sum of everything."""
    result = run(
        scenario(
            workload=Constant(), profile=UNSCORED, split=Split(1, 1), groups_per_step=1, group_size=1,
            policy=policy(max_lag=0), steps=4, warmup_steps=1,
        )
    )  # fmt: skip
    context, seconds = 0, 0.5
    for turn in range(TURNS):
        prompt = context + (100 if turn == 0 else 10)
        cached = context and min((context - 1) // 16, (prompt - 1) // 16) * 16
        seconds += (prompt - cached) / 5_000 + decode_s(1, prompt, 19) + (1.0 if turn < TURNS - 1 else 0.0)
        context = prompt + 20
    train = context * (1 / 4_000 + 1 / 2_000) + 0.3
    assert result.steps[0].t == pytest.approx(seconds + train, rel=1e-9)
    step = seconds + train + 0.1 + 0.2
    assert result.seconds == pytest.approx(3 * step, rel=1e-9)
    assert result.goodput_tok_s == pytest.approx(60 / step, rel=1e-9)
    assert result.group_latency_s == pytest.approx(seconds, rel=1e-9)


def test_one_step_off_overlaps_and_sync_does_not() -> None:
    load = Constant(turns=1, prompt=101, output=61)
    plain = scenario(
        workload=load, profile=UNSCORED, groups_per_step=1, group_size=1, steps=12, warmup_steps=4
    )
    generate = 0.5 + 101 / 5_000 + decode_s(1, 101, 60)
    train = 162 * (1 / 4_000 + 1 / 2_000) + 0.3
    way = policy(rollout="one_step_off", scoring="full_batch", max_lag=1)
    off = run(replace(plain, policy=way, split=Split(1, 1)))
    assert off.seconds / 8 == pytest.approx(max(generate, train + 0.1) + 0.2, rel=1e-9)
    assert {step.lag_max for step in off.steps[2:]} == {1}
    way = policy(rollout="sync", scoring="full_batch", max_lag=0)
    swap = UNSCORED.scorer.swap_s
    sync = run(replace(plain, policy=way, split=Split(1, 1)))
    assert sync.seconds / 8 == pytest.approx(generate + swap + train + 0.1 + 0.2 + swap, rel=1e-9)
    assert {step.lag_max for step in sync.steps} == {0}


def test_bound_by_training_goodput_is_what_learners_can_train() -> None:
    result = run(
        scenario(
            workload=Constant(turns=1, prompt=2_000, output=10), profile=UNSCORED, split=Split(6, 2),
            steps=30, groups_per_step=4, group_size=4, warmup_steps=10,
        )
    )  # fmt: skip
    train = 16 * 2_010 * (1 / 4_000 + 1 / 2_000) / 2 + 0.3 + 0.1
    assert result.goodput_tok_s == pytest.approx(160 / train, rel=0.01)
    last = result.steps[-1]
    assert last.twt_s.get("data", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert last.rwt_s["capacity"] > 0


def test_bound_by_generation_goodput_is_what_generators_can_decode() -> None:
    quick = msgspec.structs.replace(
        UNSCORED,
        generator=GeneratorProfile(
            kv_tokens=1_000_000, block=1, max_seqs=8, prefill_tok_s=1e9, step_base_s=0.01, step_seq_s=0.001,
            step_ctx_s=0.0,
        ),
        learner=LearnerProfile(forward_tok_s=1e9, backward_tok_s=1e9, step_fixed_s=0.0),
        sync=SyncProfile(publish_s=0.0, load_s=0.0),
    )  # fmt: skip
    result = run(
        scenario(
            workload=Constant(turns=1, prompt=1, output=200), profile=quick, split=Split(2, 1), steps=60,
            groups_per_step=8, group_size=4, policy=policy(max_lag=4), warmup_steps=20,
        )
    )  # fmt: skip
    assert result.goodput_tok_s == pytest.approx(2 * 8 / (0.01 + 8 * 0.001), rel=0.02)


def test_decoupled_scoring_is_the_flow_shop_of_the_cost_model() -> None:
    """All is ready when the step opens: C_dec = M * max(f', g') + min(f', g')."""
    profile = msgspec.structs.replace(
        PROFILE, learner=LearnerProfile(
            forward_tok_s=4_000.0, backward_tok_s=2_000.0, step_fixed_s=0.0, micro_tokens=520
        )
    )  # fmt: skip
    times = {}
    for way in ("colocated", "full_batch", "thrash"):
        result = run(
            scenario(
                workload=Constant(turns=1, prompt=120, output=10), profile=profile, split=Split(6, 1),
                steps=10, groups_per_step=8, group_size=4, policy=policy(scoring=way),
            )
        )  # fmt: skip
        times[way] = result.steps[-1].train_s
    work = 8 * 4 * 130 * (1 / 4_000 + 1 / 4_000 + 1 / 2_000)
    assert times["full_batch"] == pytest.approx(work + 2 * 0.5)
    assert times["thrash"] == pytest.approx(work + 8 * 2 * 0.5)
    assert times["full_batch"] <= times["colocated"] <= times["thrash"]


@pytest.mark.parametrize(("way", "parts"), [("colocated", 1), ("thrash", 8)])
def test_a_batch_has_as_many_parts_as_it_was_trained_in(way: str, parts: int) -> None:
    """All is ready: one burst takes the whole batch, however many micro-batches that are."""
    profile = msgspec.structs.replace(
        PROFILE, learner=msgspec.structs.replace(PROFILE.learner, micro_tokens=520)
    )
    world = World(
        scenario(
            workload=Constant(turns=1, prompt=120, output=10), profile=profile, split=Split(6, 1), steps=10,
            groups_per_step=8, group_size=4, policy=policy(scoring=way),
        )
    )  # fmt: skip
    world.run()
    assert (world.trainer.parts, world.trainer.micro) == (parts, 8)


def test_scorers_work_ahead_of_the_learners() -> None:
    result = run(
        scenario(
            workload=Constant(turns=1, prompt=2_000, output=10), split=Split(4, 2, 2), steps=12,
            policy=policy(scoring="decoupled"),
        )
    )  # fmt: skip
    train = 16 * 2_010 * (1 / 4_000 + 1 / 2_000) / 2
    assert result.steps[-1].train_s == pytest.approx(train + 0.3, rel=1e-6)  # no score is waited for


def test_task_admission_keeps_the_cache_that_request_admission_loses() -> None:
    """Contexts grow to 3,000 tokens, room for seven, sixty tasks: whose is kept decides what is computed."""
    load = Growing()
    hits = {}
    for way in ("request", "task"):
        result = run(
            scenario(
                workload=load, profile=UNSCORED, split=Split(2, 1), steps=8, groups_per_step=16, group_size=4,
                policy=policy(admission=way, max_lag=1), warmup_steps=2,
            )
        )  # fmt: skip
        hits[way] = result.kv_hit
    assert hits["task"] > 1.3 * hits["request"]


def test_who_is_sent_elsewhere_keeps_the_time_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator is lost, later ones fill up: whoever asks again counts from when it first asked."""
    asked: dict[str, list[tuple[float, float]]] = {}  # by task: (now, waited)
    ask = Admission.ask

    def recorded(self: Admission, task: str, *, now: float, waited: float, **rest: object) -> None:
        asked.setdefault(task, []).append((now, waited))
        ask(self, task, now=now, waited=waited, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Admission, "ask", recorded)
    run(
        scenario(
            workload=Growing(), profile=UNSCORED, split=Split(3, 1), steps=4, groups_per_step=16,
            policy=policy(admission="task"), faults=(Fault(20.0, 2, 10.0),),
        )
    )  # fmt: skip
    again = [
        (before, now, waited)
        for calls in asked.values()
        for (before, _), (now, waited) in pairwise(calls)
        if waited > 0.0
    ]
    assert any(now != 20.0 for _, now, _ in again), "nobody was sent elsewhere while it waited"
    assert any(now == 20.0 for _, now, _ in again), "nobody lost its generator"
    assert all(waited >= now - before - 1e-9 for before, now, waited in again)
    for calls in asked.values():
        sent = 0
        for now, waited in calls:
            sent = sent + (now != 20.0) if waited else 0
            assert sent <= 1, "more than once in a turn"


def test_elastic_ranks_mend_a_bad_split() -> None:
    wrong = scenario(
        workload=Constant(turns=3, prompt=50, output=150, env_s=0.1), split=Split(1, 5), profile=UNSCORED,
        steps=50, groups_per_step=8, policy=policy(roles="elastic", admission="task"),
    )  # fmt: skip
    result = run(wrong)
    assert result.moves
    assert {move["state"] for move in result.moves} == {"done"}
    assert result.moves[0]["move"] == "learner>generator"
    assert result.moves[0]["cost_s"] == 2.0
    counts = [step.roles for step in result.steps]
    assert all(sum(count.values()) == 6 for count in counts)
    assert counts[-1]["generator"] >= 3
    still = run(replace(wrong, policy=policy(roles="static", admission="task")))
    assert not still.moves
    assert result.goodput_tok_s > 1.5 * still.goodput_tok_s
    assert result.wait_s < 0.5 * still.wait_s


@pytest.mark.parametrize(("played", "row"), [(Growing, 10 * 320), (Rewriting, 320 + 9 * 420)])
def test_rows_gain_what_is_trained_later(
    monkeypatch: pytest.MonkeyPatch, played: type[Growing], row: int
) -> None:
    """Generators tell of rows turn by turn; all of it is trained, or in flight or ready at the end."""
    seen: list[StepFacts] = []
    decide = RankMachine.decide

    def listen(self: RankMachine, facts: StepFacts, counts: dict[str, int]) -> Proposal | None:
        seen.append(facts)
        return decide(self, facts, counts)

    monkeypatch.setattr(RankMachine, "decide", listen)
    job = scenario(
        workload=played(), steps=30, policy=policy(roles="elastic", admission="task"), eval_every=7,
        eval_tasks=3,
    )  # fmt: skip
    result = run(job)
    grown, trained = sum(one.grown_tokens for one in seen), sum(one.row_tokens for one in seen)
    assert trained == sum(one.groups for one in seen) * job.group_size * row
    left = result.ledger["admitted"] - sum(one.groups for one in seen) * job.group_size
    assert 0 < grown - trained <= left * row
    assert all(0 < one.demand < 3 for one in seen)


def test_nothing_to_gain_nothing_moves() -> None:
    """No tail, ample memory, no scorer, a balanced split: the mechanisms change nothing."""
    plain = scenario(
        workload=Constant(turns=1, prompt=100, output=60), profile=UNSCORED, split=Split(2, 2), steps=40,
        groups_per_step=8,
    )  # fmt: skip
    base = run(plain)
    tide = run(replace(plain, policy=policy(scoring="auto", admission="task", roles="elastic")))
    assert tide.goodput_tok_s == pytest.approx(base.goodput_tok_s, rel=0.05)


def test_a_lost_generator_costs_time_and_no_trajectory() -> None:
    whole = run(scenario(drain=True, steps=20))
    hurt = run(scenario(drain=True, steps=20, faults=(Fault(10.0, 2, inf),)))
    assert hurt.ledger["trained"] == whole.ledger["trained"] == 20 * 16
    assert hurt.ledger["pending"] == 0
    assert hurt.steps[-1].t > whole.steps[-1].t
    assert hurt.steps[-1].roles["generator"] == 2


def test_a_lost_rank_comes_back() -> None:
    for rank in (0, 2, 5):  # learner, generator, scorer
        for roles in ("static", "elastic"):
            result = run(
                scenario(
                    steps=60, faults=(Fault(8.0, rank, 10.0),), policy=policy(roles=roles, admission="task")
                )
            )
            assert sum(result.steps[0].roles.values()) == 5
            assert sum(result.steps[-1].roles.values()) == 6
            assert result.steps[-1].roles["spare"] == 0


def test_no_generator_left_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="nothing can happen any more"):
        run(scenario(split=Split(1, 2, 1), faults=(Fault(5.0, 2, inf),)))


def test_lent_ranks_generate_and_come_back() -> None:
    lending = scenario(
        workload=Constant(turns=4, prompt=50, output=200, env_s=0.1), profile=UNSCORED, split=Split(1, 3),
        steps=15, groups_per_step=24, policy=policy(scoring="full_batch", roles="lending"),
    )  # fmt: skip
    lent = run(lending)
    still = run(replace(lending, policy=policy(scoring="full_batch")))
    assert lent.moves
    assert lent.goodput_tok_s > 1.5 * still.goodput_tok_s


def test_evaluation_pins_the_weights() -> None:
    result = run(scenario(eval_every=4, eval_tasks=8, steps=16))
    assert any("eval" in step.rwt_s for step in result.steps)
    assert result.ledger["admitted"] % 4 == 0  # no evaluation among them
    plain = run(scenario(steps=16))
    assert result.steps[-1].t > plain.steps[-1].t


def test_what_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs split\.scorers >= 1"):
        run(scenario(split=Split(3, 2, 0)))
    with pytest.raises(ValueError, match=r"split\.generators = 0"):
        run(scenario(split=Split(0, 2, 1)))
    with pytest.raises(ValueError, match="env_slots = 3: a group has 4 members"):
        run(scenario(env_slots=3))
    with pytest.raises(ValueError, match="max_lag must be >= 1"):
        run(scenario(policy=policy(rollout="one_step_off", max_lag=0)))
    with pytest.raises(ValueError, match="fault of rank 9: there are 6 ranks"):
        run(scenario(faults=(Fault(1.0, 9, 1.0),)))


def test_a_recipe_of_twins_becomes_the_scenario_that_predicts_it() -> None:
    config = configuration.build(
        {
            "run": {"steps": 9, "groups_per_step": 4, "group_size": 4, "max_lag": 1, "seed": 7},
            "model": {"maker": "tokens"},
            "env": {"name": "load", "workers": 2, "slots": 24},
            "harness": {"max_context": 512, "max_new_tokens": 64},
            "generator": {"replicas": 5, "kv_on_sync": "recompute"},
            "learner": {"ranks": 2, "row_tokens": 1024, "micro_rows": 2},
            "scorer": {"replicas": 1, "mode": "auto"},
            "objective": {"kl_coef": 0.01},
            "admission": {"policy": "task", "headroom": 0.1},
            "elastic": {"enabled": True, "dead_band": 0.2},
            "twin": {"profile": "twin"},
        }
    )
    found = Scenario.from_config(config, PROFILE, Uneven())
    assert found.split == Split(5, 2, 1)
    assert found.policy.scoring == "auto"
    assert (found.policy.roles, found.policy.kv_on_sync, found.policy.max_lag) == ("elastic", "recompute", 1)
    assert (found.env_slots, found.seed, found.steps, found.gated, found.drain) == (48, 7, 9, True, True)
    assert found.profile.learner.micro_tokens == 2048
    assert (found.admission.headroom, found.elastic.dead_band, found.max_new_tokens) == (0.1, 0.2, 64)
    result = run(found)
    assert result.ledger["trained"] == 9 * 16
