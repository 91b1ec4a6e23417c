"""The capacity rule, driven through arbitrary interleavings of a whole job."""

from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.staleness import allowance, lag, smallest_batch


@dataclass
class Job:
    """The facts of a job that trains in order of admission. Versions count optimizer steps."""

    max_lag: int
    groups_per_step: int
    steps: int
    version: int = 0  # the learner's
    acknowledged: int = 0  # lowest of the generators
    admitted: int = 0
    lost: int = 0
    waiting: list[int] = field(default_factory=list)  # oldest version of each admitted group, in order
    lags: list[int] = field(default_factory=list)  # of every trained group

    def allowance(self) -> int:
        return allowance(
            max_lag=self.max_lag,
            groups_per_step=self.groups_per_step,
            acknowledged=self.acknowledged,
            steps=self.steps,
            admitted=self.admitted,
            lost=self.lost,
        )

    def admit(self, count: int) -> None:
        for _ in range(min(count, self.allowance())):
            self.admitted += 1
            self.waiting.append(self.acknowledged)  # the worst case: the slowest generator takes it

    def lose(self, index: int) -> None:
        if self.waiting:
            del self.waiting[index % len(self.waiting)]
            self.lost += 1

    def train(self) -> bool:
        if self.version >= self.steps or len(self.waiting) < self.groups_per_step:
            return False
        batch = self.waiting[: self.groups_per_step]
        del self.waiting[: self.groups_per_step]
        self.lags += [lag(training=self.version, oldest=oldest) for oldest in batch]
        self.version += 1
        return True

    def acknowledge(self, count: int) -> None:
        self.acknowledged = min(self.version, self.acknowledged + count)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["admit", "lose", "train", "acknowledge"]), st.integers(1, 20)), max_size=120
)
JOBS = st.builds(Job, max_lag=st.integers(0, 4), groups_per_step=st.integers(1, 5), steps=st.integers(1, 12))


def play(job: Job, events: list[tuple[str, int]]) -> None:
    for name, amount in events:
        if name == "admit":
            job.admit(amount)
        elif name == "lose":
            job.lose(amount)
        elif name == "train":
            job.train()
        else:
            job.acknowledge(amount)


@given(job=JOBS, events=EVENTS)
def test_lag_never_passes_the_bound(job: Job, events: list[tuple[str, int]]) -> None:
    play(job, events)
    assert all(0 <= found <= job.max_lag for found in job.lags)
    assert job.admitted - job.lost <= job.steps * job.groups_per_step


def test_the_bound_is_reached() -> None:
    """The rule is tight: a job whose generators lag meets every lag up to the bound."""
    job = Job(max_lag=3, groups_per_step=2, steps=20)
    for _ in range(4):
        job.admit(100)
        job.train()
    assert job.lags == [0, 0, 1, 1, 2, 2, 3, 3]
    job.admit(100)
    assert not job.train()  # nothing more until the generators have caught up


@given(job=JOBS, events=EVENTS)
def test_bound_zero_is_synchronous(job: Job, events: list[tuple[str, int]]) -> None:
    job.max_lag = 0
    for event in events:
        play(job, [event])
        assert set(job.lags) <= {0}
        if job.acknowledged < job.version:  # the new weights are not live everywhere: nobody starts
            assert job.allowance() <= job.lost - job.admitted + job.version * job.groups_per_step


@given(job=JOBS, events=EVENTS, losses=st.lists(st.integers(0, 20), max_size=10))
def test_every_job_can_finish(job: Job, events: list[tuple[str, int]], losses: list[int]) -> None:
    """From any reachable state, admitting, training and acknowledging in turn ends the run."""
    play(job, events)
    for turn in range(3 * job.steps + len(losses)):
        job.admit(1000)
        if turn < len(losses):
            job.lose(losses[turn])
            job.admit(1000)  # a lost group gives its place back
        job.train()
        job.acknowledge(1000)
    assert job.version == job.steps
    assert job.allowance() == 0
    assert job.admitted - job.lost == job.steps * job.groups_per_step
    assert not job.waiting


@given(job=JOBS, events=EVENTS)
def test_no_burst_after_recovery(job: Job, events: list[tuple[str, int]]) -> None:
    """A controller that restarts with the counters of the queue admits what the old one would have."""
    play(job, events)
    job.admit(1000)
    assert job.allowance() == 0
    restarted = Job(job.max_lag, job.groups_per_step, job.steps, job.version, job.acknowledged)
    restarted.admitted, restarted.lost = job.admitted, job.lost
    assert restarted.allowance() == 0


def test_allowance_counts_losses_and_the_end() -> None:
    facts = {"max_lag": 1, "groups_per_step": 4, "acknowledged": 0, "steps": 100}
    assert allowance(**facts, admitted=0, lost=0) == 8
    assert allowance(**facts, admitted=8, lost=3) == 3
    assert allowance(**facts, admitted=20, lost=0) == 0
    assert allowance(**{**facts, "steps": 1}, admitted=0, lost=0) == 4


def test_lag_refuses_tokens_of_the_future() -> None:
    assert lag(training=7, oldest=5) == 2
    with pytest.raises(ValueError, match="version 8 is newer than the version trained, 7"):
        lag(training=7, oldest=8)


# -- batches of unequal size --------------------------------------------------------------


@dataclass
class UnevenJob(Job):
    """Each step trains any number of groups that ``smallest_batch`` allows, in order of admission."""

    least: int = 1
    trained: int = 0
    marks: dict[int, int] = field(default_factory=dict)

    def allowance(self) -> int:
        return allowance(
            max_lag=self.max_lag,
            groups_per_step=self.groups_per_step,
            acknowledged=self.acknowledged,
            steps=self.steps,
            admitted=self.admitted,
            lost=self.lost,
            progress=(self.version, self.trained),
        )

    def admit(self, count: int) -> None:
        before = self.admitted
        super().admit(count)
        if self.admitted > before:
            self.marks[self.acknowledged] = self.admitted - self.lost

    def smallest(self) -> int:
        return smallest_batch(
            max_lag=self.max_lag,
            groups_per_step=self.groups_per_step,
            least=min(self.least, self.groups_per_step),
            progress=(self.version, self.trained),
            marks=self.marks,
        )

    def train_some(self, extra: int) -> bool:
        size = min(self.smallest() + extra, self.groups_per_step)
        if self.version >= self.steps or len(self.waiting) < self.smallest():
            return False
        batch = self.waiting[:size]
        del self.waiting[:size]
        self.lags += [lag(training=self.version, oldest=oldest) for oldest in batch]
        self.version += 1
        self.trained += len(batch)
        return True


UNEVEN = st.builds(
    UnevenJob, max_lag=st.integers(0, 2), groups_per_step=st.integers(2, 5), steps=st.integers(8, 20),
    least=st.integers(1, 2),
)  # fmt: skip
UNEVEN_EVENTS = st.lists(
    st.tuples(st.sampled_from(["admit", "lose", "train", "train", "acknowledge"]), st.integers(0, 20)),
    min_size=12, max_size=120,
)  # fmt: skip


def play_unevenly(job: UnevenJob, events: list[tuple[str, int]]) -> None:
    for name, amount in events:
        if name == "train":
            job.train_some(amount % 3 // 2)  # as few as allowed, mostly
        else:
            play(job, [(name, amount)])


@given(job=UNEVEN, events=UNEVEN_EVENTS)
def test_lag_never_passes_the_bound_for_any_sequence_of_batch_sizes(
    job: UnevenJob, events: list[tuple[str, int]]
) -> None:
    play_unevenly(job, events)
    assert all(0 <= found <= job.max_lag for found in job.lags)
    assert min(job.least, job.groups_per_step) <= job.smallest() <= job.groups_per_step


@pytest.mark.parametrize(("max_lag", "size"), [(0, 3), (1, 3), (2, 3), (1, 4)])
def test_no_sequence_of_batch_sizes_passes_the_bound(max_lag: int, size: int) -> None:
    """All of them, admitting whatever is allowed, with generators up to date or two versions behind."""
    for extras in product(range(3), repeat=6):
        for behind in (0, 2):
            job = UnevenJob(max_lag=max_lag, groups_per_step=size, steps=50, least=1)
            for extra in extras:
                job.admit(100)
                job.train_some(extra)
                job.acknowledge(max(0, job.version - behind - job.acknowledged))
            assert max(job.lags) <= max_lag, (extras, behind)


@given(job=UNEVEN, events=UNEVEN_EVENTS)
def test_every_uneven_job_can_finish(job: UnevenJob, events: list[tuple[str, int]]) -> None:
    play_unevenly(job, events)
    for _ in range(2 * job.steps + 2):
        job.admit(1000)
        job.train_some(0)
        job.acknowledge(1000)
    assert job.version == job.steps


@given(job=JOBS, events=EVENTS)
def test_full_batches_give_the_plain_rule(job: Job, events: list[tuple[str, int]]) -> None:
    play(job, events)
    progress = (job.version, job.version * job.groups_per_step)
    facts = {"max_lag": job.max_lag, "groups_per_step": job.groups_per_step, "steps": job.steps,
             "acknowledged": job.acknowledged, "admitted": job.admitted, "lost": job.lost}  # fmt: skip
    assert allowance(**facts, progress=progress) == allowance(**facts)


def test_a_small_batch_costs_admissions_and_then_asks_for_a_large_one() -> None:
    job = UnevenJob(max_lag=1, groups_per_step=4, steps=100, least=1)
    job.admit(100)
    assert len(job.waiting) == 8
    assert job.smallest() == 4, "four of the eight have to be trained now, the others next"
    job = UnevenJob(max_lag=1, groups_per_step=4, steps=100, least=1)
    job.admit(5)
    assert job.smallest() == 1
    assert job.train_some(0)
    assert job.allowance() == 0, "the four left fill the step at version 1, the last that may train them"
    assert job.smallest() == 4
