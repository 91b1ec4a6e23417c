"""``springtide simulate``: figures, pictures, words, and one line for what cannot be run."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.sim.catalogue import load_profile
from cluster.sim.policies import ASYNC, POLICIES, STATIC, around, policy, scan, scorer_share, split_for
from cluster.sim.study import FULL, QUICK, Options, headline, step_reduction, study
from cluster.sim.sweep import best_split, run_many
from cluster.sim.workloads import TableWorkload, load_workload
from deploy.cli import main
from deploy.simulate import advice

TINY = """
name = "tiny"
[run]
ranks = 8
profile = "{profile}"
groups_per_step = 4
group_size = 4
max_lag = 2
[[kind]]
name = "a"
turns = [[0, 2], [50, 4], [100, 9]]
prompt = 200
observation = [[0, 50], [100, 300]]
output = [[0, 20], [100, 150]]
[[kind.tool]]
name = "t"
latency_s = [[0, 0.1], [50, 0.4], [100, 6.0]]
"""
KEYS = (
    "goodput_vs_sync", "goodput_vs_best_async", "wait_reduction_vs_best_static", "kv_hit_vs_request_lru",
    "train_step_reduction",
)  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY.format(profile="h100-qwen2.5-7b"))
    return path


def test_figures_picture_and_words(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    words = ["simulate", str(tiny), "--steps", "6", "--seeds", "2", "--workers", "1",
             "--json", str(figures), "--picture", str(picture)]  # fmt: skip
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "With a fixed split, give" in said and "Elastic ranks" in said
    tree: dict[str, Any] = json.loads(figures.read_text())["tiny"]
    for key in KEYS:
        figure = tree[key]
        low, high = figure["interval"]
        assert low <= figure["mean"] <= high and figure["seeds"] == 2, key
    assert set(tree["policies"]) == set(QUICK)
    for name, row in tree["policies"].items():
        split = row["split"]
        used = split["generators"] + split["learners"] + split["scorers"]
        assert used == (16 if name == "sync" else 8), (name, split)
        assert row["goodput_tok_s"]["mean"] > 0
        assert 0 <= row["kv_hit"]["mean"] <= 1
    assert tree["goodput_vs_sync"]["mean"] > 1
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and picture.stat().st_size < 200_000


def test_chosen_policies_only(tiny: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    words = ["simulate", str(tiny), "--steps", "4", "--seeds", "1", "--workers", "1", "--ranks", "5",
             "--policy", "areal", "sync", "--json", str(figures)]  # fmt: skip
    assert main(words) == 0
    tree = json.loads(figures.read_text())["tiny"]
    assert set(tree["policies"]) == {"areal", "sync"} and tree["ranks"] == 5
    assert not set(KEYS) & set(tree), "nothing is compared with a policy that was not run"
    assert any("of 5 ranks" in line for line in tree["advice"])


def test_a_given_split_is_not_tuned(tiny: Path, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    words = ["simulate", str(tiny), "--steps", "4", "--seeds", "1", "--workers", "1", "--split", "3/4/1",
             "--policy", "areal", "tide", "tide_no_elastic", "--json", str(figures)]  # fmt: skip
    assert main(words) == 0
    tree = json.loads(figures.read_text())["tiny"]
    splits = {name: tuple(row["split"].values()) for name, row in tree["policies"].items()}
    assert splits == {"areal": (3, 5, 0), "tide": (3, 4, 1), "tide_no_elastic": (3, 4, 1)}
    assert tree["ranks"] == 8 and not any(row["sweep"] for row in tree["policies"].values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["txt"], "unknown workload 'txt' (did you mean 'text'?)"),
        (["text", "--policy", "tied"], "unknown policy 'tied' (did you mean 'tide'?)"),
        (["text", "--profile", "h100-qwen"], "unknown profile 'h100-qwen' (did you mean 'h100-qwen"),
        (["text", "--profile", "no/such.toml"], "no file no/such.toml"),
        (["text", "--ranks", "1"], "--ranks 1: must be at least 2"),
        (["text", "--seeds", "0"], "--seeds 0: must be at least 1"),
        (["text", "--split", "12"], "--split '12': give generators/learners/scorers"),
        (["text", "--split", "0/4"], "--split 0/4: generators and learners must be at least 1"),
        (["text", "--split", "4/4", "--ranks", "9"], "--split 4/4 has 8 ranks, --ranks says 9"),
        (["text", "--steps", "-3"], "--steps -3: must be at least 2"),
        (["text", "--json", "/no/such/folder/x.json"], "cannot write /no/such/folder/x.json"),
        (["text", "--picture", "x.svg"], "only PNG is written"),
    ],
)
def test_errors_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and said in lines[0] and lines[0].startswith("springtide: config: "), lines


def test_a_context_that_no_generator_holds_is_refused(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.write_text(tiny.read_text().replace("prompt = 200", "prompt = 200\nmax_context = 2000000"))
    assert main(["simulate", str(tiny)]) == 2
    assert "a.max_context = 2000000 does not fit into h100-qwen2.5-7b" in capsys.readouterr().err


def test_the_tables_are_closed() -> None:
    """Every name in a list is a policy; every policy is in some list; nobody exceeds the bound."""
    assert set(QUICK) <= set(FULL) == set(POLICIES)
    assert set(ASYNC) | set(STATIC) <= set(POLICIES)
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


def test_best_split_beats_the_others_and_workers_change_nothing(tiny: Path) -> None:
    workload = load_workload(str(tiny))
    profile = load_profile("h100-qwen2.5-7b")
    options = Options(ranks=8, policies=("areal",), steps=8, warmup_steps=2, seeds=(0,), full=True)
    found = study(workload, profile, options)
    tuned = found.tuned["areal"]
    best = tuned.tried[tuned.best.split, tuned.best.policy.scoring]
    assert best == max(tuned.tried.values()) and len(tuned.tried) >= 7
    scenario = tuned.scenario(found.base)
    assert best_split(scenario, 8, seeds=(0,)) == tuned.best.split
    alone, together = run_many([scenario] * 2), run_many([scenario] * 2, workers=2)
    assert [r.goodput_tok_s for r in alone] == [r.goodput_tok_s for r in together]


def test_gain_vanishes_where_there_is_nothing_to_win() -> None:
    """No tail, ample KV memory, no scorer: no mechanism beats the best fixed split by more than 5 %."""
    workload = load_workload("null")
    profile = load_profile(workload.spec.run.profile)
    options = Options(
        ranks=16, policies=("stream", "areal", "tide", "tide_no_elastic", "tide_no_admission"),
        steps=12, warmup_steps=4, seeds=(0, 1),
    )  # fmt: skip
    found = study(small(workload, 16), profile, options)
    figures = headline(found)
    assert figures["goodput_vs_best_async"].mean == pytest.approx(1.0, abs=0.05)
    assert figures["goodput_elastic_vs_static"].mean == pytest.approx(1.0, abs=0.05)
    assert figures["kv_hit_vs_request_lru"].mean == pytest.approx(1.0, abs=0.01)
    assert "train_step_reduction" not in figures
    assert any("fixed split is simpler" in line for line in advice(found))


def small(workload: TableWorkload, groups: int) -> TableWorkload:
    """The workload with another batch."""
    from msgspec.structs import replace

    run = replace(workload.spec.run, groups_per_step=groups)
    return TableWorkload(replace(workload.spec, run=run), workload.name)
