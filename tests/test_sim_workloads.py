"""Workloads: quantiles come out as they went in, plans are pure, bad files are refused by name."""

import pickle
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.sim.catalogue import load_profile, names
from cluster.sim.quantiles import Quantiles
from cluster.sim.workloads import TableWorkload, altered, load_workload, train_tokens, uniform

REPO = Path(__file__).resolve().parent.parent
GOOD = """
name = "mine"
[run]
groups_per_step = 4
[[kind]]
name = "a"
turns = [[0, 2], [50, 4], [100, 9]]
prompt = 100
observation = [[0, 10], [100, 30]]
output = [[0, 5], [100, 50]]
[[kind.tool]]
name = "t"
latency_s = [[0, 0.1], [50, 0.2], [100, 5.0]]
"""


def load_text(tmp_path: Path, text: str) -> TableWorkload:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    return load_workload(str(path))


@pytest.mark.parametrize("name", names("workloads"))
def test_built_in_workloads_are_sound_and_fit_their_profile(name: str) -> None:
    workload = load_workload(name)
    profile = load_profile(workload.spec.run.profile)
    for group in range(60):
        kind = workload.kind(3, group)
        first = set()
        for member in range(3):
            plan = workload.plan(3, group, member)
            first.add(plan.turns[0].added)
            assert plan.turns[-1].env_s == 0 and plan.start_s >= 0
            assert all(turn.added >= 1 and turn.output >= 1 and turn.env_s >= 0 for turn in plan.turns)
            if kind.spec.max_turns:
                assert len(plan.turns) <= kind.spec.max_turns
            context = 0
            for turn in plan.turns:
                assert turn.kept <= context
                context = (turn.kept if turn.kept >= 0 else context) + turn.added + turn.output
                assert not kind.spec.max_context or context <= kind.spec.max_context
                assert context + profile.generator.block <= profile.generator.kv_tokens
        assert len(first) == 1, "the members of a group share their first prompt"


def test_published_figures_come_out() -> None:
    """TraceLab: mean call 16.8 s, and the 4 % of calls over a minute hold 85 % of the time."""
    workload = load_workload("coding-tail")
    waits = np.array([
        turn.env_s
        for seed in range(4) for group in range(2500) for turn in workload.plan(seed, group, 0).turns[:-1]
    ])  # fmt: skip
    assert np.quantile(waits, 0.5) == pytest.approx(0.1, rel=0.08)
    assert np.quantile(waits, 0.9) == pytest.approx(10.0, rel=0.1)
    assert np.quantile(waits, 0.99) == pytest.approx(192.0, rel=0.25)
    table = Quantiles(workload.spec.kind[0].tool[0].latency_s, "x")
    assert table.mean() == pytest.approx(16.8, rel=0.02)
    fine = table.at((np.arange(200_000) + 0.5) / 200_000)
    assert fine[fine > 60].sum() / fine.sum() == pytest.approx(0.85, abs=0.02)
    assert (fine > 60).mean() == pytest.approx(0.04, abs=0.001)


def test_moments_of_continuum_come_out() -> None:
    """Mean turns, mean call, and the tokens that all prompts of a task add up to."""
    for name, turns, call, tokens in (("swe", 10.9, 0.925, 70_126), ("search", 6.3, 1.923, 93_256)):
        workload = load_workload(name)
        plans = [workload.plan(1, group, 0) for group in range(1500)]
        prompts = [
            sum(t.added + t.output for i, t in enumerate(p.turns) for _ in p.turns[i:])
            - sum(t.output for t in p.turns)
            for p in plans
        ]
        assert fmean(len(p.turns) for p in plans) == pytest.approx(turns, rel=0.06)
        assert Quantiles(workload.spec.kind[0].tool[0].latency_s, "x").mean() == pytest.approx(call, rel=0.08)
        assert fmean(prompts) == pytest.approx(tokens, rel=0.25)


@given(
    cuts=st.lists(st.floats(0.5, 99.5), min_size=1, max_size=6, unique=True),
    steps=st.lists(st.floats(0.01, 10.0), min_size=8, max_size=8),
)
@settings(deadline=None)
def test_quantiles_pass_through_their_pairs_and_never_fall(cuts: list[float], steps: list[float]) -> None:
    values = np.cumsum(steps)
    pairs = tuple(zip([0.0, *sorted(cuts), 100.0], values.tolist(), strict=False))
    table = Quantiles(pairs, "x")
    at = table.at(np.array([percent / 100 for percent, _ in pairs]))
    assert at == pytest.approx([value for _, value in pairs])
    dense = table.at(np.linspace(0, 1, 4001))
    assert (np.diff(dense) >= -1e-9).all()
    assert table.mean() == pytest.approx(fmean(dense), rel=0.02)


def test_plans_are_pure_across_processes_and_pickling() -> None:
    workload = load_workload("text")
    again = pickle.loads(pickle.dumps(workload))
    plans = [workload.plan(7, group, member) for group in (0, 5, 99) for member in (0, 7)]
    assert plans == [again.plan(7, group, member) for group in (0, 5, 99) for member in (0, 7)]
    code = "from cluster.sim.workloads import load_workload as l; print(l('text').plan(7, 5, 7))"
    other = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(workload.plan(7, 5, 7))
    assert workload.plan(8, 5, 7) != workload.plan(7, 5, 7) != workload.plan(7, 5, 6)


def test_the_hash_is_even_and_its_streams_are_independent() -> None:
    numbers = np.concatenate([uniform(seed, group, 0, 50) for seed in range(20) for group in range(20)])
    assert ((numbers > 0) & (numbers < 1)).all()
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.sum((counts - 1000.0) ** 2 / 1000.0) < 43.8  # chi-square, 19 degrees of freedom, 0.1 %
    a = np.array([uniform(0, group, 0, 1)[0] for group in range(4000)])
    b = np.array([uniform(0, group, 1, 1)[0] for group in range(4000)])
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    assert abs(np.corrcoef(a[:-1], a[1:])[0, 1]) < 0.05


def test_correlation_of_turns_lies_within_groups_and_leaves_the_distribution(tmp_path: Path) -> None:
    def turns(rho: float) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        workload = load_text(tmp_path, GOOD.replace("prompt = 100", f"prompt = 100\ncorrelation = {rho}"))
        return np.array([[len(workload.plan(0, g, m).turns) for m in (0, 1)] for g in range(3000)])

    free, tied, same = turns(0.0), turns(0.6), turns(1.0)
    assert abs(np.corrcoef(free.T)[0, 1]) < 0.06
    assert 0.4 < np.corrcoef(tied.T)[0, 1] < 0.7
    assert (same[:, 0] == same[:, 1]).all()
    assert tied.mean() == pytest.approx(free.mean(), rel=0.03)


def test_window_keeps_the_prefix_before_the_image_that_left(tmp_path: Path) -> None:
    text = GOOD.replace("turns = [[0, 2], [50, 4], [100, 9]]", "turns = 6").replace(
        "prompt = 100", "prompt = 100\nwindow = 2\nplaceholder = 3"
    )
    text = text.replace("[[0, 10], [100, 30]]", "20").replace("[[0, 5], [100, 50]]", "7")
    plan = load_text(tmp_path, text).plan(0, 0, 0)
    contexts = []
    context = 0
    for turn in plan.turns:
        context = (turn.kept if turn.kept >= 0 else context) + turn.added + turn.output
        contexts.append(context)
    # Turn i (from 0) has i + 1 observations, of which 2 stay; the others left 3 tokens each.
    assert contexts == [100 + min(i + 1, 2) * 20 + max(0, i - 1) * 3 + (i + 1) * 7 for i in range(6)]
    assert [turn.kept for turn in plan.turns] == [-1, -1, 100, 110, 120, 130]
    assert train_tokens(plan) == sum(contexts[1:])  # a row per rewritten history


def test_phases_alternate() -> None:
    workload = load_workload("shift")
    length = workload.spec.phase_groups
    kinds = [workload.plan(0, group, 0).kind for group in (0, length - 1, length, 2 * length - 1, 2 * length)]
    assert kinds == ["generation-bound"] * 2 + ["training-bound"] * 2 + ["generation-bound"]


def test_altered_scales_what_it_says() -> None:
    workload = load_workload("text")
    slow = altered(workload, env=4.0)
    for ours, theirs in zip(workload.plan(0, 1, 2).turns, slow.plan(0, 1, 2).turns, strict=True):
        assert theirs.env_s == pytest.approx(4 * ours.env_s)
        assert theirs.output == ours.output


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("observation =", "observtion =", "did you mean 'observation'"),
        ("latency_s =", "latency =", "kind[0].tool[0].latency (did you mean 'latency_s'"),
        ("groups_per_step = 4", "group_per_step = 4", "run.group_per_step (did you mean 'groups_per_step'"),
        ("[50, 4], [100, 9]", "[50, 4], [90, 9]", "kind[0] (a).turns"),
        ("[50, 4], [100, 9]", "[50, 4], [100, 3]", "[100, 3] after [50, 4]"),
        ("[[0, 0.1]", "[[0, -0.1]", "must be finite and not negative"),
        ("prompt = 100", 'prompt = "long"', "kind[0].prompt"),
        ("prompt = 100", "prompt = 100\ncorrelation = 1.5", "correlation = 1.5: must lie in 0..1"),
        ("prompt = 100", "prompt = 100\nphase = 1", "must be 0, 1, 2"),
        ("prompt = 100", "prompt = 100\nplaceholder = 4", "unused while window is 0"),
        ("groups_per_step = 4", "groups_per_step = 0", "run.groups_per_step = 0: must be at least 1"),
        ("[[kind.tool]]", "[kind.tool", "not valid TOML"),
        ("[[kind.tool]]", "[kind.tool]", "kind[0].tool is a list of sections: write [[kind.tool]]"),
        ("[run]", "[[run]]", "run is a section: write [run]"),
        ("prompt = 100", "", "kind[0]: prompt is missing"),
        ("prompt = 100", "prompt = [1, 2]", "kind[0].prompt[0]: must be a list, not a whole number"),
        ("groups_per_step = 4", 'groups_per_step = "4"', "groups_per_step: must be a whole number"),
        ("groups_per_step = 4", "groups_per_step = 4\nmax_lag = -1", "run.max_lag = -1: must be 0"),
        ("groups_per_step = 4", "groups_per_step = 4\nenv_slots = 3", "env_slots = 3: must be 0 (no"),
        ("groups_per_step = 4", "groups_per_step = 4\nmin_groups_per_step = 9", "must lie in 0..groups"),
        ("groups_per_step = 4", "groups_per_step = 4\nranks = 1", "run.ranks = 1: must be at least 2"),
    ],
)
def test_bad_files_are_refused_by_field_and_value(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, GOOD.replace(old, new))
    assert said in str(caught.value), caught.value
    assert "mine.toml" in str(caught.value)


def test_unknown_names_and_files_name_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown workload 'txt' .did you mean 'text'"):
        load_workload("txt")
    with pytest.raises(ConfigError, match=r"no file /nowhere/x.toml"):
        load_workload("/nowhere/x.toml")
    with pytest.raises(ConfigError, match=r"unknown profile 'h100-qwen2.5-7'"):
        load_profile("h100-qwen2.5-7")


def test_profiles_refuse_bad_values(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    for text, said in (
        ('name = "p"\n[generator]\nkv_tokens = 0', "generator.kv_tokens = 0 must be positive"),
        ('name = "p"\n[generator]\nkv_tokens = 9\nprefil_tok_s = 1', "did you mean 'prefill_tok_s'"),
        ('name = "p"\n[generator]\nkv_tokens = 9\nprefill_share = 1.0', "prefill_share = 1.0"),
        ('name = "p"', "generator"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_profile(str(path))
        assert said in str(caught.value), caught.value


def test_the_documented_file_is_one(tmp_path: Path) -> None:
    """The example of docs/tide.md, taken from the page, has every section and loads."""
    page = (Path(__file__).parent.parent / "docs" / "tide.md").read_text()
    example = page.split("### Workload files")[1].split("```toml\n")[1].split("```")[0]
    workload = load_text(tmp_path, example)
    assert workload.name == "mine" and workload.spec.run.env_slots == 1024
    assert workload.plan(0, 0, 0).turns[0].tool == "search"


def test_a_file_named_without_its_ending_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(GOOD)
    with pytest.raises(ConfigError, match=r"unknown workload 'mine' .did you mean the file mine.toml"):
        load_workload("mine")


def test_a_context_that_no_episode_fits_into_is_refused(tmp_path: Path) -> None:
    bad = GOOD.replace("prompt = 100", "prompt = [[0, 300], [100, 700]]\nmax_context = 100")
    with pytest.raises(ConfigError, match=r"max_context = 100: the shortest prompt and reply take 305 "):
        load_text(tmp_path, bad)
    load_text(tmp_path, bad.replace("max_context = 100", "max_context = 305"))
