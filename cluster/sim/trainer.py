"""The consuming side of a simulation: ready groups are claimed, scored, and trained in micro-batches.

A step opens when the learners are free. Groups are claimed oldest first, as they become ready, each with
its lag checked against the version being trained; a stale one is dropped whole. How scoring and training
share the ranks is the *scoring* of the step (cost model: cluster/pipeline.py):

- decoupled: scorers on ranks of their own score segments as turns end, whatever the learners do
  (cluster/sim/scorers.py); learners train full micro-batches of scored groups, and what is left when the
  batch is whole.
- colocated: learners take everything claimed once it fills a micro-batch: swap in, score, swap out, train.
- full_batch: the same once the batch is whole. thrash: the same for every single micro-batch.

``gated``: no micro-batch is trained before the batch is whole (what the live learner does, since it writes
the step's groups down first); scorers of their own still score early. Rows are dealt longest first to the
least loaded rank, which has room for ``micro_tokens`` of them or one row (as ``cluster.pipeline.order`` deals
them); a micro-batch takes what its most loaded rank takes.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from math import ceil, log2

from cluster.pipeline import batch_range
from cluster.sim.scenario import Scenario
from cluster.sim.scorers import After, Scorers, makespan
from cluster.sim.tasks import Group
from cluster.staleness import lag

GAP_WEIGHT = 0.2  # of the newest gap between ready groups in the running mean, as in learner/feed.py

class Trainer:
    """``after(t, handler, generation)`` enters an event; ``waits(now, cause)`` and ``scores(now, cause)``
    tell what learners and scorers do (empty: they work); ``dropped`` and ``trained`` hand over the end."""

    def __init__(
        self,
        scenario: Scenario,
        learners: int,
        scorers: int,
        after: After,
        waits: Callable[[float, str], None],
        scores: Callable[[float, str], None],
        dropped: Callable[[float, Group], None],
        trained: Callable[[float], None],
    ) -> None:
        profile = scenario.profile
        self.scenario = scenario
        self.profile = profile
        self.wanted: str = scenario.policy.scoring  # from the next step on
        self.scoring: str = self.wanted
        self.learners = learners
        self.pool = Scorers(scenario, scorers, after, scores, self._scored)
        self.version = 0  # the learner's
        self.ready: list[tuple[int, float, int, Group]] = []  # (oldest version, time, number, group)
        self.batch: list[Group] = []
        self.open_at = -1.0  # when the learners became free; negative while no step is open
        self.started_at = -1.0  # first micro-batch
        self.least = 0  # a batch may have so few groups
        self.blocked = ""  # why learners may not work: sync, switch, lent ...
        self.learner_busy_s = 0.0  # rank-seconds training
        self.burst_s = 0.0  # rank-seconds scoring on learners
        self.swaps_s = 0.0  # seconds of the step spent on swapping models
        self.micro = 0  # micro-batches trained
        self.parts = 0  # in which the batch was trained: micro-batches, or bursts of them
        self.ras_tokens = 0
        self.late: list[tuple[float, int]] = []  # (time, tokens) of groups that came after the opening
        self.head_age_s = 0.0
        self.scored_ahead: float | None = None  # share of the last batch; None if learners scored it
        self._behind = 0  # tokens of the batch that were not scored when their group was claimed
        self.full_at = -1.0  # when the batch became whole
        self._after = after
        self._waits = waits
        self._dropped = dropped
        self._trained = trained
        self._rows: list[int] = []  # claimed (and scored, if need be), not in a micro-batch yet; tokens
        self._tokens = 0  # of these
        self._unscored: dict[int, Group] = {}  # claimed, by number
        self._busy = False  # learners
        self._generation = 0  # of learner work: what was begun before a loss is void
        self._whole = False
        self._arrived = 0.0
        self._gap = 0.0
        self._group_s = 0.0  # training seconds a group, running mean
        self._passes = profile.scorer.passes

    # -- groups come --------------------------------------------------------------------------

    def add(self, now: float, group: Group) -> None:
        """A group is ready."""
        gap = now - self._arrived
        self._gap += GAP_WEIGHT * (gap - self._gap) if self._gap else gap
        self._arrived = now
        heappush(self.ready, (group.oldest, now, group.number, group))
        if self.open_at >= 0.0:
            self.late.append((now, group.train_tokens))
        self.pool.ready(now, group)
        self.pump(now)

    def open(self, now: float) -> None:
        """The learners are free for the next step."""
        self.scoring = self.wanted
        if self.scoring == "decoupled" and self._passes and not self.scorers:
            self.scoring = "colocated"
        self.open_at, self.started_at, self.full_at = now, -1.0, -1.0
        self.micro, self.parts, self.swaps_s = 0, 0, 0.0
        self.late = []
        self._behind = 0
        size = self.scenario.groups_per_step
        oldest = sorted(self.ready)[:size]
        self.ras_tokens = sum(entry[3].train_tokens for entry in oldest)
        self.head_age_s = max((now - entry[1] for entry in oldest), default=0.0)
        if self._passes and self.scoring == "decoupled":
            if not self.pool.running:
                self.pool.start(now, [entry[3] for entry in sorted(self.ready)])
        else:
            self.pool.pause()
        self.pump(now)

    def pump(self, now: float) -> None:
        """Claim what is ready, and give the learners work if there is enough."""
        if self.open_at < 0.0 or self.blocked:
            return
        self._claim(now)
        if not self._busy:
            self._dispatch(now)

    def _claim(self, now: float) -> None:
        if self._whole:
            return
        scenario, ready, batch = self.scenario, self.ready, self.batch
        bound, version = scenario.policy.max_lag, self.version
        while ready and lag(training=version, oldest=ready[0][0]) > bound:
            stale = heappop(ready)[3]
            self.pool.forget(stale)
            self._dropped(now, stale)
        gated = scenario.gated or self.scoring == "full_batch"
        if gated and not self._enough(now, len(ready)):
            return
        while ready and len(batch) < scenario.groups_per_step:
            group = heappop(ready)[3]
            batch.append(group)
            if self._passes and self.scoring == "decoupled" and not group.scored:
                self._unscored[group.number] = group
                self._behind += group.unscored
            else:
                self._take_rows(group)
        if self._enough(now, len(batch)):
            self._whole = True
            self.full_at = now

    def _take_rows(self, group: Group) -> None:
        self._rows += group.rows
        self._tokens += group.train_tokens

    def _enough(self, now: float, have: int) -> bool:
        """So many groups make a batch now (the rule of learner/feed.py)."""
        size = self.scenario.groups_per_step
        least = self.least or size
        if have >= size or have < least:
            return have >= size
        gap = max(self._gap, now - self._arrived)  # silence is a gap that has not ended yet
        if have >= batch_range(0, gap, self._group_s, least, size, self._fixed_s()):
            return True
        self._after(now + max(self._gap, 0.1), self._recheck, self._generation)
        return False

    def _recheck(self, now: float, generation: int) -> None:
        """Silence may have made a smaller batch worth starting."""
        if self.open_at >= 0.0 and not self._whole:
            self.pump(now)

    def _fixed_s(self) -> float:
        return self.profile.learner.step_fixed_s + self.profile.sync.publish_s

    # -- scorers ------------------------------------------------------------------------------

    @property
    def scorers(self) -> int:
        """Ranks that only score."""
        return self.pool.ranks

    @property
    def scorer_busy_s(self) -> float:
        """Rank-seconds scoring, wherever."""
        return self.pool.busy_s + self.burst_s

    def _scored(self, now: float, group: Group) -> None:
        if self._unscored.pop(group.number, None) is not None:
            self._take_rows(group)
        self.pump(now)

    def set_scorers(self, now: float, scorers: int) -> None:
        """Scorer ranks came or went. Without any, learners score."""
        if not scorers and self.scoring == "decoupled" and self._passes:
            self.scoring = "colocated"
            for group in self._unscored.values():
                self._take_rows(group)
            self._unscored.clear()
        self.pool.resize(now, scorers)
        self.pump(now)

    # -- learners -----------------------------------------------------------------------------

    def _dispatch(self, now: float) -> None:
        """One micro-batch (or burst), if there is enough for it; the end of the step, if nothing is left."""
        whole, waits = self._whole, "signal" if self._unscored else "data"
        if whole and not self._rows and not self._unscored:
            self._finish(now)
            return
        if (self.scenario.gated or self.scoring == "full_batch") and not whole:
            self._waits(now, "data")
            return
        alone = not self._passes or self.scoring == "decoupled"
        last = whole and not self._unscored
        if (alone or self.scoring == "thrash") and not self.scenario.gated and self.scoring != "full_batch":
            taken, full = self._fill()
        else:  # a burst: everything that is there
            taken = len(self._rows)
            full = self._tokens >= self.profile.learner.micro_tokens * self.learners
        if not taken or not (full or last):
            self._waits(now, waits)
            return
        rows, self._rows = self._rows[:taken], self._rows[taken:]
        tokens = sum(rows)
        self._tokens -= tokens
        if self.started_at < 0.0:
            self.started_at = now
        self._busy = True
        self.parts += 1
        self._waits(now, "")
        self._after(now + self._work_s(rows, tokens, alone), self._worked, self._generation)

    def _fill(self) -> tuple[int, bool]:
        """How many rows make the next micro-batch, longest first, and whether it is full."""
        room, rows = self.profile.learner.micro_tokens, self._rows
        rows.sort(reverse=True)
        loads = [0] * self.learners
        for taken, row in enumerate(rows):
            if loads[0] and loads[0] + row > room:
                return taken, True
            heapreplace(loads, loads[0] + row)
        return len(rows), loads[0] >= room

    def _work_s(self, rows: list[int], tokens: int, alone: bool) -> float:
        """Seconds that the learners need for these rows; unless ``alone``, with swaps and scoring."""
        learner, ranks = self.profile.learner, self.learners
        slow = float(learner.scaling ** log2(ranks))  # of each rank in a group of so many
        per_token = (1.0 / learner.forward_tok_s + 1.0 / learner.backward_tok_s) / slow
        load = makespan(rows, ranks)
        train = load * per_token
        self.micro += max(1, ceil(tokens / (learner.micro_tokens * ranks)))
        self.learner_busy_s += train * ranks
        if alone:
            return train
        swap = 2.0 * self.profile.scorer.swap_s
        score = self.pool.seconds(load)
        self.burst_s += score * ranks
        self.swaps_s += swap
        return swap + score + train

    def _worked(self, now: float, generation: int) -> None:
        if generation != self._generation:
            return
        self._busy = False
        self.pump(now)

    def _finish(self, now: float) -> None:
        """Everything is trained: update."""
        self._busy = True
        self._waits(now, "")
        fixed = self.profile.learner.step_fixed_s
        self.learner_busy_s += fixed * self.learners
        self._after(now + fixed, self._updated, self._generation)

    def _updated(self, now: float, generation: int) -> None:
        if generation != self._generation:
            return
        self._busy = False
        seconds = (now - self.started_at) / len(self.batch)
        self._group_s += GAP_WEIGHT * (seconds - self._group_s) if self._group_s else seconds
        self._trained(now)

    def close(self) -> list[Group]:
        """The step is committed: its groups."""
        batch, self.batch = self.batch, []
        tokens = sum(group.train_tokens for group in batch)
        by_scorers = self._passes and self.scoring == "decoupled"
        self.scored_ahead = max(0.0, 1.0 - self._behind / tokens) if by_scorers and tokens else None
        self.open_at = -1.0
        self._whole = False
        return batch

    def lose(self, now: float, learners: int) -> None:
        """A learner was lost: the others begin the step again, with the batch as it is."""
        self.learners = learners
        self._generation += 1
        self._busy = False
        self._rows, self._tokens = [], 0
        for group in self.batch:
            if group.number not in self._unscored:
                self._take_rows(group)

    def readiness(self) -> tuple[int, int, float]:
        """(micro-batches, RAS, TPRM) of the step that was just trained, by tokens."""
        tokens = sum(group.train_tokens for group in self.batch)
        full = self.profile.learner.micro_tokens * max(1, self.learners)
        count = max(1, ceil(tokens / full))
        late = [at for at, _ in self.late]
        early = self.ras_tokens
        if early >= tokens or not late:
            return count, count, 0.0
        ras = min(count - 1, early // full)
        return count, ras, (late[-1] - self.open_at) / (count - ras)
