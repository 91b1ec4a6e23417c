"""What the training side measures of a step, for the controller's decisions and the next batch's size.

No torch, no waiting: the loop puts in what it saw.
"""

from typing import Any

from cluster.config import Config
from cluster.messages import Move, Roles
from cluster.pipeline import Measured
from learner.feed import Batch, Pace
from learner.form import Formed
from learner.scoring import Scoring, Spent, per_micro_batch


def holders(roles: Roles, role: str, move: Move | None = None, moved: bool = False) -> list[int]:
    """Numbers of the ranks that hold ``role``, ascending, lost ones left out.

    ``move`` counts as made (``moved``) or as not made, whatever ``roles`` says of its rank.
    """
    held = {row.rank: row.role for row in roles.ranks if not row.lost}
    if move is not None and move.rank in held:
        held[move.rank] = move.target if moved else move.source
    return sorted(rank for rank, has in held.items() if has == role)


class StepFacts:
    """The last step in numbers, and running means of costs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.costs = Measured()
        self.signal_wait_s = 0.0  # of the step, mean over ranks
        self.scorer_busy_s = 0.0  # rank-seconds of scoring in the step, wherever it ran
        self._facts: dict[str, Any] = {}
        self._committed: float | None = None
        self._publish_s = 0.0
        self._switch_s = 0.0
        self._pace = Pace()

    def committed(
        self,
        batch: Batch,
        formed: Formed,
        metrics: dict[str, Any],
        scored: Spent,
        depth: int,
        now: float,
    ) -> None:
        """A step was committed at ``now``; ``scored`` is what scorers did since the last one."""
        spent: dict[str, float] = metrics.get("spent", {})
        learners = int(metrics.get("learners", 1))
        self.signal_wait_s = spent.get("signal", 0.0) / learners
        self.scorer_busy_s = scored.seconds + spent.get("score", 0.0)
        train_s = max(0.0, spent.get("train", 0.0))  # another process's clock told it
        self._observe(formed.plan.tokens, spent, scored, learners)
        self.costs.observe(ahead=metrics.get("scored_ahead"))
        step_s = now - self._committed if self._committed is not None else 0.0
        self._committed = now
        groups = len(batch.groups)
        self._pace = Pace(train_s / learners / groups, self._publish_s)
        self._facts = {
            "step": batch.record.step,
            "step_s": step_s,
            "twt_s": (batch.waited_s + self.signal_wait_s) * learners,
            "waits": {"data": batch.waited_s, "signal": self.signal_wait_s, "publish": self._publish_s},
            "learner_busy_s": train_s,
            "scorer_busy_s": self.scorer_busy_s,
            "sync_s": self._publish_s + self._switch_s,
            "head_age_s": batch.head_age_s,
            "depth": depth,
            "groups": groups,
            "fill": groups / self.config.run.groups_per_step,
            "micro_batches": batch.micro_batches,
            "ras": batch.ras,
            "tprm_s": batch.tprm_s,
            "gated": True,  # a batch is formed whole before it is trained
            "trained_tokens": formed.plan.trained_tokens,
            "row_tokens": formed.plan.tokens,
        }
        self._switch_s = 0.0

    def _observe(self, tokens: int, spent: dict[str, float], scored: Spent, learners: int) -> None:
        """Running means of scoring, training and swapping."""
        shape = (self.config.learner.row_tokens, self.config.learner.micro_rows)
        here = spent.get("score", 0.0)
        if scored.tokens > 0:
            score = per_micro_batch(scored.seconds, scored.tokens, *shape)
        else:
            score = per_micro_batch(here, tokens, *shape) if here > 0 else None
        train = per_micro_batch(spent["train"], tokens, *shape) if spent.get("train", 0.0) > 0 else None
        swap = spent["swap"] / learners / 2 if "swap" in spent and here > 0 else None
        self.costs.observe(score, train, swap)

    def published(self, seconds: float) -> None:
        """What publishing the weights took: a cost that a step has whatever its size."""
        self._publish_s = seconds

    def switched(self, parts: dict[str, float]) -> None:
        """A resize took this long: it belongs to the next step."""
        self._switch_s += parts.get("total", 0.0)

    def pace(self) -> Pace:
        """For ``Feed.form``."""
        return self._pace

    def told(self, learners: int, scoring: Scoring) -> dict[str, Any]:
        """The facts of the last step as the controller gets them at the barrier.

        Seconds are summed over ranks for ``twt_s`` (waited for data and scores), ``learner_busy_s``
        (training, without scoring) and ``scorer_busy_s`` (scoring, wherever it ran). ``score_s``,
        ``train_s``, ``swap_s``, ``ahead`` are running means for ``cluster.pipeline.Costs`` (None: not
        measured yet). ``sync_s``: the publish before this step, and switches. ``step_s`` is from commit to
        commit (0: the first).
        """
        return {
            **self._facts,
            "scoring": scoring.mode,
            "scoring_active": scoring.active,
            "learners": learners,
            "scorers": len(scoring.scorers),
            "score_s": self.costs.score_s,
            "train_s": self.costs.train_s,
            "swap_s": self.costs.swap_s,
            "ahead": self.costs.ahead,
        }
