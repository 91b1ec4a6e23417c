"""Keys that a simulation may be asked to vary: every one of them changes what it says, and nothing else."""

import pytest

from cluster.errors import ConfigError
from cluster.sim.catalogue import load_profile
from cluster.sim.knobs import JOB, SHAPE, Job, changed, keys, sweep_of
from cluster.sim.quantiles import Quantiles
from cluster.sim.scenario import Split
from cluster.sim.workloads import altered, load_workload


@pytest.fixture
def job() -> Job:
    return Job(load_workload("text"), load_profile("h100-qwen2.5-7b"), 32)


def test_every_field_is_a_key_and_reaches_its_place(job: Job) -> None:
    fields = [key for key in keys() if key not in JOB and key not in SHAPE]
    assert {"generator.kv_tokens", "run.max_lag", "switch.learner_generator", "scorer.swap_s"} <= set(fields)
    assert not {"run.ranks", "run.profile", "name", "source"} & set(keys())
    for key in fields:
        section, name = key.split(".")
        before = job.workload.spec.run if section == "run" else getattr(job.profile, section)
        new = changed(job, key, "x1")
        assert (new.profile, new.workload.spec, new.ranks, new.split) == (
            job.profile, job.workload.spec, job.ranks, job.split,
        ), f"x1 of {key} is as it was"  # fmt: skip
        value = "x0.5" if key in ("generator.prefill_share", "learner.scaling") else "x2"
        if getattr(before, name) == 0:
            value = "4"
        new = changed(job, key, value)
        after = new.workload.spec.run if section == "run" else getattr(new.profile, section)
        differing = [f for f in before.__struct_fields__ if getattr(before, f) != getattr(after, f)]
        assert differing == [name], key


def test_values_are_what_they_become_or_factors(job: Job) -> None:
    assert changed(job, "generator.kv_tokens", "1000").profile.generator.kv_tokens == 1000
    assert changed(job, "generator.kv_tokens", "x0.25").profile.generator.kv_tokens == 230_000
    assert changed(job, "scorer.swap_s", "3").profile.scorer.swap_s == 3.0
    assert changed(job, "scorer.swap_s", "x3").profile.scorer.swap_s == 1.5
    assert changed(job, "run.max_lag", "0").workload.spec.run.max_lag == 0
    assert changed(job, "split", "8/20/4").split == Split(8, 20, 4)
    assert changed(changed(job, "split", "8/24"), "split", "best").split is None
    assert changed(job, "ranks", "64").ranks == 64
    assert changed(job, "profile", "h100-qwen2.5-14b").profile.name == "h100-qwen2.5-14b"


def test_shapes_change_the_load(job: Job) -> None:
    def kind(key: str, value: str):  # type: ignore[no-untyped-def]
        return changed(job, key, value).workload.spec.kind[0]

    before = job.workload.spec.kind[0]
    latency = before.tool[0].latency_s
    assert kind("load.latency", "4").tool[0].latency_s == tuple((p, 4 * v) for p, v in latency)
    assert kind("load.output", "x2").output == tuple((p, 2 * v) for p, v in before.output)
    run = changed(job, "load.batch", "x0.5").workload.spec.run
    assert (run.groups_per_step, run.env_slots, run.group_size) == (32, 512, 8)
    large = changed(job, "model.size", "2").profile
    assert large.generator.kv_tokens == job.profile.generator.kv_tokens // 2
    assert large.scorer.swap_s == 2 * job.profile.scorer.swap_s
    assert large.learner.backward_tok_s == job.profile.learner.backward_tok_s / 2
    assert changed(job, "model.train", "2").profile.generator == job.profile.generator
    shifting = Job(load_workload("shift"), job.profile, 8)
    phase = shifting.workload.spec.phase_groups
    assert changed(shifting, "load.phase", "0.5").workload.spec.phase_groups == phase // 2


def test_a_heavier_tail_keeps_the_median(job: Job) -> None:
    plain = Quantiles(job.workload.spec.kind[0].tool[0].latency_s, "plain")
    heavy = Quantiles(altered(job.workload, tail=4.0).spec.kind[0].tool[0].latency_s, "heavy")
    for u in (0.0, 0.2, 0.5):
        assert heavy.one(u) == pytest.approx(plain.one(u))
    for u in (0.9, 0.99, 1.0):  # the pairs of the file
        assert heavy.one(u) - heavy.one(0.5) == pytest.approx(4 * (plain.one(u) - plain.one(0.5)))


def test_a_tail_without_a_pair_at_the_median(job: Job) -> None:
    """It gets one, so that the lower half stays as it was."""
    kind = load_workload("text").spec.kind[1]
    assert 50 not in [percent for percent, _ in kind.turns]
    start = altered(load_workload("multimodal"), tail=2.0).spec.kind[0].start_s
    assert Quantiles(start, "start").one(0.5) == pytest.approx(80.0)
    assert start[0] == (0.0, 65.0)


def test_sweeps_keep_their_order_and_know_their_axis(job: Job) -> None:
    sweep = sweep_of(job, "generator.kv_tokens=x1, x0.25,x0.5")
    assert sweep.values == ("x1", "x0.25", "x0.5") and sweep.numbers() == [1.0, 0.25, 0.5]
    assert [one.profile.generator.kv_tokens for one in sweep.jobs] == [920_000, 230_000, 460_000]
    assert sweep_of(job, "split=best,8/20/4").numbers() is None


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "x-1", "1e999", "two"])
def test_numbers_have_to_be_numbers(job: Job, value: str) -> None:
    with pytest.raises(ConfigError, match=r"scorer.swap_s="):
        changed(job, "scorer.swap_s", value)
