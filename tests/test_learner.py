"""The learner rank: packing, parity over micro-batches and ranks, late signals, publishing."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from cluster.errors import LearnerLost, WeightsFailed
from cluster.weights_file import checksum_file
from learner.batch import pack
from learner.model import load_model
from learner.optimizer import learning_rate
from learner.publish import NcclPublisher, SharedMemoryPublisher
from learner.signals import ReferenceScorer, Signal
from learner.step import LearnerRank, on_policy_tokens
from tests.learner_tiny import (
    free_port,
    make_config,
    make_model,
    make_sample,
    make_samples,
    one_rank,
    rows_of,
    score_alone,
    single_rank,
    with_behaviour,
)

REDUCTIONS = ("token_mean", "sequence_mean", "constant")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("qwen"), "qwen3", tied=True)


def gradients(rank: LearnerRank, batch, signals=None) -> dict[str, torch.Tensor]:
    """Gradients of one batch, without applying them."""
    place, optimizer = rank.joined()
    optimizer.zero_grad(set_to_none=True)
    rank._accumulate(batch, signals, place)
    return {n: p.grad.full_tensor().clone() for n, p in rank.model.named_parameters() if p.grad is not None}


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == two.keys() and one
    for name in one:
        scale = two[name].abs().max().clamp(min=1e-3)
        assert ((one[name] - two[name]).abs().max() / scale).item() < tolerance, name


@pytest.mark.parametrize("kind", ["llama", "qwen"])
def test_packed_logprobs_and_gradients_equal_each_sample_alone(kind: str, request) -> None:
    path = request.getfixturevalue(kind)
    samples, _ = make_samples()
    packed, plain = load_model(path), AutoModelForCausalLM.from_pretrained(path)
    batch = one_rank(samples, [np.zeros(len(s.ids), np.float32) for s in samples])
    assert batch.rows < len(samples)
    rows = rows_of(batch)
    logprobs, entropy = packed(rows)
    got = np.zeros(batch.ids.size, np.float32)
    got[rows.flat] = logprobs.detach().numpy()
    total = torch.zeros(())
    for index, sample in enumerate(samples):
        ids = torch.tensor(sample.ids.astype(np.int64))
        alone = torch.log_softmax(plain(ids[None]).logits[0, :-1] / sample.temperature, -1)
        alone = alone.gather(1, ids[1:, None])[:, 0]
        at = (batch.sample == index).reshape(-1)
        mask = sample.mask[1:]
        assert np.abs(got[at][1:][mask] - alone.detach().numpy()[mask]).max() < 1e-5
        total = total + (alone * torch.tensor(mask)).sum()
    logprobs.sum().backward()
    total.backward()
    wanted = {n: p.grad for n, p in plain.named_parameters()}
    assert_close({n: p.grad for n, p in packed.hf.named_parameters()}, wanted)
    assert len(entropy) == sum(s.trained for s in samples) and (entropy > 0).all()


def test_padded_vocabulary_gets_no_probability(llama: Path) -> None:
    samples = [make_sample(0, 12, 3, ids=np.arange(12, dtype=np.int32))]
    rows = rows_of(one_rank(samples, [np.zeros(12, np.float32)]))
    full, _ = load_model(llama)(rows)
    cut, entropy = load_model(llama, vocab_used=60)(rows)
    assert (cut > full).all() and torch.isfinite(entropy).all()
    with pytest.raises(ValueError, match="vocab_used = 65"):
        load_model(llama, vocab_used=65)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_ratio_is_one_at_lag_zero(llama: Path, temperature: float) -> None:
    samples, advantage = make_samples()
    samples = with_behaviour(llama, [dataclasses.replace(s, temperature=temperature) for s in samples])
    with single_rank(make_config(llama), llama) as rank:
        result = rank.step(one_rank(samples, advantage), 1)
    assert 0 < result.metrics["max_abs_log_ratio_at_lag0"] + 1e-12 < 1e-4
    assert result.metrics["lag0_tokens"] == sum(s.trained for s in samples)
    assert result.metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert result.applied and result.metrics["grad_norm"] > 0


def test_bfloat16_compute_keeps_fp32_weights_and_shared_arrays_are_only_read(llama: Path) -> None:
    samples, advantage = make_samples()
    batch = one_rank(with_behaviour(llama, samples), advantage)
    for field in dataclasses.fields(batch):
        if isinstance(value := getattr(batch, field.name), np.ndarray):
            value.setflags(write=False)  # as the object store hands them out
    results = []
    for dtype in ("float32", "bfloat16"):
        with single_rank(make_config(llama, learner={"dtype": dtype}), llama) as rank:
            results.append(rank.step(batch, 1).metrics)
            assert {p.dtype for p in rank.model.parameters()} == {torch.float32}
    assert results[1]["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=0.1)
    assert results[1]["max_abs_log_ratio_at_lag0"] > 10 * results[0]["max_abs_log_ratio_at_lag0"]


def test_first_and_only_answer_token_is_learned(llama: Path) -> None:
    sample = make_sample(0, 4, 3)
    (sample,) = with_behaviour(llama, [sample])
    batch = one_rank([sample], [sample.mask.astype(np.float32)])
    with single_rank(make_config(llama), llama) as rank:
        before = score_alone(load_model(llama), sample)[3]
        for step in range(1, 6):
            rank.step(batch, step)
        after = rank.model(rows_of(batch))[0].item()
    assert after > before + 0.05


def test_on_policy_tokens_need_their_whole_past_at_this_version(llama: Path) -> None:
    versions = np.array([-1, -1, 3, 2, 3, -1, 3], np.int32)
    sample = make_sample(0, 7, 2, mask=versions >= 0, versions=versions)
    fresh = make_sample(1, 4, 2, versions=np.array([-1, -1, 3, 3], np.int32))
    batch = one_rank([sample, fresh], [np.zeros(7, np.float32), np.zeros(4, np.float32)])
    assert batch.rows == 1
    assert on_policy_tokens(batch, 3)[0].tolist() == [False, False, True] + [False] * 6 + [True, True]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_micro_batches_do_not_change_the_gradient(llama: Path, reduction: str) -> None:
    samples, advantage = make_samples()
    samples = with_behaviour(llama, samples, noise=0.3)
    with single_rank(make_config(llama), llama) as rank:
        found = []
        for micro_rows, row_tokens in ((8, 64), (4, 64), (1, 64), (1, 40), (3, 200)):
            batch = one_rank(samples, advantage, micro_rows, row_tokens=row_tokens, reduction=reduction)
            found.append(gradients(rank, batch))
        for other in found[1:]:
            assert_close(other, found[0])


def test_packing_equals_a_row_per_sample_against_plain_autograd(llama: Path) -> None:
    samples, advantage = make_samples()
    samples = with_behaviour(llama, samples, noise=0.1)
    model = AutoModelForCausalLM.from_pretrained(llama)
    total = sum(s.trained for s in samples)
    loss = torch.zeros(())
    for sample, values in zip(samples, advantage, strict=True):
        ids = torch.tensor(sample.ids.astype(np.int64))
        logits = model(ids[None]).logits[0, :-1] / sample.temperature
        logprobs = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        for t in np.flatnonzero(sample.mask):
            ratio = (logprobs[t - 1] - float(sample.behaviour[t])).exp()
            a = float(values[t])
            loss = loss - torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a) / total
    loss.backward()
    with single_rank(make_config(llama), llama) as rank:
        got = gradients(rank, one_rank(samples, advantage))
        result = rank.step(one_rank(samples, advantage), 1)
    assert_close(
        {n.removeprefix("hf."): g for n, g in got.items()}, {n: p.grad for n, p in model.named_parameters()}
    )
    assert result.metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_all_masked_row_contributes_nothing_and_an_all_masked_batch_is_skipped(llama: Path) -> None:
    samples, advantage = make_samples()
    samples = with_behaviour(llama, samples)
    blank = [
        dataclasses.replace(s, trajectory=f"m{i}", mask=np.zeros(len(s.ids), bool))
        for i, s in enumerate(samples)
    ]
    poison = [np.full(len(s.ids), np.nan, np.float32) for s in samples]
    with single_rank(make_config(llama), llama) as rank:
        plain = gradients(rank, one_rank(samples, advantage))
        mixed = gradients(rank, one_rank(samples + blank, advantage + poison))
        assert_close(mixed, plain)
        before = {n: p.full_tensor().clone() for n, p in rank.model.named_parameters()}
        result = rank.step(one_rank(blank, poison), 1)
        assert not result.applied and result.metrics["steps_skipped"] == 1 and rank.version == 1
        assert result.metrics["loss"] == 0
        for name, parameter in rank.model.named_parameters():
            assert torch.equal(parameter.full_tensor(), before[name])


def test_gradient_that_is_not_finite_is_skipped_and_the_next_step_is_sound(llama: Path) -> None:
    samples, advantage = make_samples()
    samples = with_behaviour(llama, samples)
    bad = [np.where(s.mask, np.float32(np.inf), 0).astype(np.float32) for s in samples]
    with single_rank(make_config(llama), llama) as rank, single_rank_twin(llama) as twin:
        result = rank.step(one_rank(samples, bad), 1)
        assert not result.applied and not np.isfinite(result.metrics["grad_norm"])
        rank.step(one_rank(samples, advantage), 2)
        for name, parameter in rank.model.named_parameters():
            assert torch.isfinite(parameter.full_tensor()).all(), name
            assert not torch.equal(parameter.full_tensor(), twin[name])


def single_rank_twin(path: Path):
    """The untrained weights, as a context manager for symmetry."""
    import contextlib

    return contextlib.nullcontext({n: p.detach() for n, p in load_model(path).named_parameters()})


def test_step_is_idempotent_and_refuses_a_gap(llama: Path) -> None:
    samples, advantage = make_samples()
    batch = one_rank(with_behaviour(llama, samples), advantage)
    with single_rank(make_config(llama), llama) as rank:
        first = rank.step(batch, 1)
        weights = {n: p.full_tensor().clone() for n, p in rank.model.named_parameters()}
        again = rank.step(batch, 1)
        assert again.repeated and again.metrics == first.metrics and rank.version == 1
        assert all(torch.equal(p.full_tensor(), weights[n]) for n, p in rank.model.named_parameters())
        with pytest.raises(LearnerLost, match=r"version 1.*step 3"):
            rank.step(batch, 3)
        with pytest.raises(LearnerLost, match="newer"):
            newer = dataclasses.replace(batch, versions=np.where(batch.mask, 7, -1).astype(np.int32))
            rank.step(newer, 2)
    with pytest.raises(LearnerLost, match="has not joined"):
        rank.step(batch, 2)


@pytest.fixture(scope="module")
def signal_config(llama: Path):
    return make_config(llama, objective={"kl_coef": 0.2, "entropy_coef": 0.01}, scorer={"replicas": 1})


def test_late_signal_equals_an_early_one_and_is_asked_for_once(
    llama: Path, qwen: Path, signal_config
) -> None:
    samples, advantage = make_samples()
    batch = one_rank(with_behaviour(llama, samples, 0.1), advantage, micro_rows=1)
    early = ReferenceScorer(qwen).score(batch)
    events: list[str] = []

    def late() -> Signal:
        events.append("signal")
        return ReferenceScorer(qwen).score(batch)

    with single_rank(signal_config, llama) as rank:
        rank.model.register_forward_hook(lambda *_: events.append("forward"))
        found = gradients(rank, batch, late)
        assert events[:2] == ["forward", "signal"] and events.count("signal") == 1
        other = gradients(rank, batch, lambda: early)
        assert all(torch.equal(found[name], other[name]) for name in other)
        with pytest.raises(ValueError, match="reference signal"):
            gradients(rank, batch)


def test_reference_scorer_gives_the_logprobs_of_each_sample_alone(llama: Path) -> None:
    samples, advantage = make_samples()
    batch = one_rank(samples, advantage, micro_rows=1)
    signal = ReferenceScorer(llama).score(batch)
    assert np.array_equal(signal.valid, batch.mask)
    model = load_model(llama)
    for index, sample in enumerate(samples):
        at = batch.sample == index
        want = score_alone(model, sample)
        assert np.abs(signal.values[at][sample.mask] - want[sample.mask]).max() < 1e-5


def test_kl_to_itself_is_zero_and_kl_coefficient_zero_changes_no_bit(llama: Path, signal_config) -> None:
    samples, advantage = make_samples()
    batch = one_rank(with_behaviour(llama, samples), advantage)
    own = ReferenceScorer(llama).score(batch)
    with single_rank(make_config(llama), llama) as rank:
        plain = gradients(rank, batch)
        with_unused = gradients(rank, batch, lambda: own)
        assert all(torch.equal(plain[name], with_unused[name]) for name in plain)
    with single_rank(signal_config, llama) as rank:
        result = rank.step(batch, 1, lambda: own)
    assert abs(result.metrics["kl_ref"]) < 1e-6 and result.metrics["signal_missing_tokens"] == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_null_publish_gives_back_the_same_model(qwen: Path, tmp_path: Path, dtype: str) -> None:
    with single_rank(make_config(qwen), qwen) as rank:
        publisher = SharedMemoryPublisher(tmp_path / "w", dtype)
        weights = rank.publish(publisher)
        again = rank.publish(publisher)
    assert weights == again and weights is not None and weights.version == 0
    assert weights.nbytes == Path(weights.location).stat().st_size
    assert weights.checksum == checksum_file(weights.location)
    stored = load_file(weights.location)
    plain = AutoModelForCausalLM.from_pretrained(qwen)
    assert set(stored) == {name for name, _ in plain.named_parameters()}  # tied: once
    for name, parameter in plain.named_parameters():
        assert stored[name].dtype == getattr(torch, dtype)
        assert torch.equal(stored[name], parameter.detach().to(getattr(torch, dtype)))
    missing = plain.load_state_dict(stored, strict=False).missing_keys
    assert missing in ([], ["lm_head.weight"])


def test_publisher_keeps_two_versions_and_reports_a_full_disk(llama: Path, tmp_path: Path) -> None:
    publisher = SharedMemoryPublisher(tmp_path / "w")
    with single_rank(make_config(llama), llama) as rank:
        for version in range(4):
            rank.version = version
            rank.publish(publisher)
        assert sorted(p.name for p in (tmp_path / "w").iterdir()) == ["v2.safetensors", "v3.safetensors"]
        blocked = tmp_path / "file"
        blocked.write_text("not a folder")
        with pytest.raises(WeightsFailed, match="version 3"):
            rank.publish(SharedMemoryPublisher(blocked))
        publisher.close()
        assert not list((tmp_path / "w").iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without CUDA is told")
def test_nccl_publisher_without_cuda_says_what_to_use(llama: Path) -> None:
    with pytest.raises(WeightsFailed, match="shared_memory"):
        NcclPublisher(load_model(llama), None, "127.0.0.1", 1, 2, 0)  # type: ignore[arg-type]


def test_learning_rate_is_a_function_of_the_step() -> None:
    make = make_config(Path("x"), learner={"lr": 1.0, "warmup_steps": 3, "schedule": "linear"}).learner
    assert [learning_rate(s, 7, make) for s in range(1, 8)] == pytest.approx(
        [0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25]
    )
    cosine = make_config(Path("x"), learner={"lr": 1.0, "schedule": "cosine"}).learner
    assert learning_rate(1, 4, cosine) == 1.0 and learning_rate(3, 4, cosine) == pytest.approx(0.5)
    flat = make_config(Path("x"), learner={"lr": 1.0}).learner
    assert {learning_rate(s, 7, flat) for s in range(1, 8)} == {1.0}


def test_rank_that_waits_in_vain_is_a_lost_learner(llama: Path) -> None:
    config = make_config(llama, learner={"step_timeout_s": 1.0, "start_timeout_s": 1.0})
    rank = LearnerRank(config, str(llama), 0, 2, seed=0)
    with pytest.raises(LearnerLost, match="rank 0 of 2"):
        rank.join("127.0.0.1", free_port())
    rank.leave()


def run_world(path: Path, world: int, folder: Path, job: str) -> dict:
    """Run ``job`` of tests/learner_worker.py on ``world`` processes; the result of rank 0."""
    port, worker = free_port(), Path(__file__).with_name("learner_worker.py")
    arguments = [str(world), str(port), str(path), str(folder), job]
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), *arguments], stderr=subprocess.PIPE, text=True
        )
        for rank in range(world)
    ]
    try:
        errors = [process.communicate(timeout=400)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == 0 for process in processes), "\n".join(e[-2000:] for e in errors)
    result: dict = json.loads((folder / f"{job}-{world}.json").read_text())
    return result


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_world_size_changes_neither_gradient_nor_loss(llama: Path, tmp_path: Path) -> None:
    one, two = (run_world(llama, world, tmp_path, "parity") for world in (1, 2))
    assert one["metrics"].keys() == two["metrics"].keys()
    for case in one["metrics"]:
        for name in ("loss", "grad_norm", "entropy", "tokens_trained", "mismatch_kl", "lag0_tokens"):
            assert two["metrics"][case][name] == pytest.approx(one["metrics"][case][name], rel=2e-5), (
                case,
                name,
            )
    for case in one["metrics"]:
        assert_close(*(torch.load(tmp_path / f"{case}-{world}.pt") for world in (2, 1)))
    assert two["metrics"]["blank"]["update_applied"] == 0.0
    assert two["metrics"]["one_rank_masked"]["update_applied"] == 1.0


def test_pack_for_two_ranks_covers_what_one_rank_trains() -> None:
    samples, advantage = make_samples()
    one, two = (pack(samples, advantage, 64, ranks, 2) for ranks in (1, 2))
    for name in ("weight", "advantage"):
        totals = [sum(float(getattr(b, name).sum()) for b in plan.ranks) for plan in (one, two)]
        assert totals[0] == pytest.approx(totals[1], rel=1e-5)
