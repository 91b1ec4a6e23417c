"""What a simulation reports: figures per step, totals, and the books that have to balance."""

from typing import TYPE_CHECKING

from cluster.facts import COLD_STEPS
from cluster.ranks import StepFacts
from cluster.sim.fleet import GENERATOR, LEARNER, SCORER, Fleet
from cluster.sim.rollout import KINDS, Rollout
from cluster.sim.scenario import Result, Scenario, StepFigures
from cluster.sim.tasks import Group
from cluster.sim.trainer import Trainer

if TYPE_CHECKING:
    from cluster.sim.moves import Moves

class Figures:
    """Reads the other parts at every commit; changes nothing."""

    def __init__(
        self, scenario: Scenario, result: Result, fleet: Fleet, rollout: Rollout, trainer: Trainer
    ) -> None:
        self.scenario = scenario
        self.result = result
        self.fleet = fleet
        self.rollout = rollout
        self.trainer = trainer
        self.dropped = 0  # groups
        self.dropped_tokens = 0
        self._before: dict[tuple[str, str], float] = {}
        self._last = 0.0
        self._learner_s = self._scorer_s = 0.0
        self._sampled = self._grown = 0
        self._demand_s = 0.0
        self._latency: list[float] = []

    def group_ready(self, now: float, group: Group) -> None:
        """It waits for the learners from now on."""
        self._latency.append(now - group.admitted_at)
        if self.scenario.trace:
            self.result.depth.append((now, len(self.trainer.ready) + 1))

    def group_dropped(self, group: Group) -> None:
        """It was too old."""
        self.dropped += 1
        self.dropped_tokens += group.sampled

    def commit(
        self, now: float, training: int, evaluating: bool, moves: "Moves | None"
    ) -> tuple[StepFacts, tuple[int, int, float]]:
        """Book the step; what the rank machine and the choice of scoring want to know of it.

        The live system tells them the same: cluster/facts.py.
        """
        trainer, scenario = self.trainer, self.scenario
        batch = trainer.batch
        seconds = self.fleet.book(now)
        spent = {key: value - self._before.get(key, 0.0) for key, value in seconds.items()}
        self._before = seconds
        rwt = {cause: s for (role, cause), s in spent.items() if role == GENERATOR and cause and s > 0}
        twt: dict[str, float] = {}
        for (role, cause), s in spent.items():
            if role in (LEARNER, SCORER) and cause and s > 0:
                twt[cause] = twt.get(cause, 0.0) + s
        readiness = trainer.readiness()
        lags = [training - group.oldest for group in batch]
        self.result.steps.append(
            StepFigures(
                step=training + 1,
                t=now,
                tokens=sum(group.sampled for group in batch),
                rwt_s=rwt,
                twt_s=twt,
                train_s=now - trainer.started_at,
                ras=readiness[1],
                tprm_s=readiness[2],
                head_age_s=trainer.head_age_s,
                depth=len(trainer.ready),
                lag_mean=sum(lags) / len(lags),
                lag_max=max(lags),
                roles=self.fleet.counts(),
                scoring=trainer.scoring,
            )
        )
        if scenario.trace:
            self.result.depth.append((now, len(trainer.ready)))
        return self._facts(now, training, evaluating, moves, spent), readiness

    def _facts(
        self,
        now: float,
        training: int,
        evaluating: bool,
        moves: "Moves | None",
        spent: dict[tuple[str, str], float],
    ) -> StepFacts:
        trainer, scenario, profile = self.trainer, self.scenario, self.scenario.profile
        away = ("", "sync", "switch")
        waits = sum(s for (role, why), s in spent.items() if role == GENERATOR and why not in away)
        switch_s = 0.0
        if moves is not None:
            switch_s, moves.switch_s = moves.switch_s, 0.0
        demand_s = self.rollout.demand_s(now)
        facts = StepFacts(
            step=training + 1,
            step_s=now - self._last,
            rwt_s=waits,
            twt_s=spent.get((LEARNER, "data"), 0.0),
            signal_s=spent.get((LEARNER, "signal"), 0.0),
            generator_busy_s=spent.get((GENERATOR, ""), 0.0),
            learner_busy_s=trainer.learner_busy_s - self._learner_s,
            scorer_busy_s=trainer.scorer_busy_s - self._scorer_s,
            sync_s=profile.sync.publish_s + switch_s,
            generated_tokens=self.rollout.sampled - self._sampled,
            trained_tokens=sum(group.sampled for group in trainer.batch),
            grown_tokens=self.rollout.grown - self._grown,
            row_tokens=sum(group.train_tokens for group in trainer.batch),
            head_age_s=trainer.head_age_s,
            groups=len(trainer.batch),
            depth=len(trainer.ready),
            open=self.rollout.groups_open,
            most=scenario.env_slots // scenario.group_size,
            parts=max(1, trainer.parts),
            queued=self.rollout.queued(),
            demand=(demand_s - self._demand_s) / max(1, self.fleet.counts()[GENERATOR]) / (now - self._last),
            fill=len(trainer.batch) / scenario.groups_per_step,
            phase="cold" if training < COLD_STEPS else "eval" if evaluating else "train",
            scoring="decoupled" if trainer.scoring == "decoupled" else "colocated",
        )
        self._last, self._demand_s = now, demand_s
        self._learner_s, self._scorer_s = trainer.learner_busy_s, trainer.scorer_busy_s
        self._sampled, self._grown = self.rollout.sampled, self.rollout.grown
        return facts

    def finish(self, now: float, pops: int, admitted: int, lost: int, trained: int) -> Result:
        """Totals. Asserts that every trajectory is in exactly one state."""
        result, rollout, scenario = self.result, self.rollout, self.scenario
        models = rollout.models()
        for model in models:
            model.settle(max(now, model.now))
        size = scenario.group_size
        pending = size * (rollout.groups_open + len(self.trainer.ready))
        result.ledger = {
            "admitted": admitted * size,
            "trained": trained * size,
            "dropped.stale": self.dropped * size,
            "pending": pending,
        }
        assert lost == self.dropped
        assert admitted * size == (trained + self.dropped) * size + pending, result.ledger
        steps = result.steps
        counted = steps[scenario.warmup_steps :] or steps
        begun = steps[scenario.warmup_steps - 1].t if 0 < scenario.warmup_steps < len(steps) else 0.0
        result.seconds = steps[-1].t - begun
        result.goodput_tok_s = sum(step.tokens for step in counted) / result.seconds
        waits = [sum(step.rwt_s.values()) + sum(step.twt_s.values()) for step in counted]
        result.wait_s = sum(waits) / len(waits)
        result.train_s = sum(step.train_s for step in counted) / len(counted)
        prompt = sum(hit[1] for hit in rollout.kv)
        result.kv_hit = sum(hit[0] for hit in rollout.kv) / prompt if prompt else 0.0
        result.kv_hit_by_kind = {
            kind: hit[0] / hit[1] for kind, hit in zip(KINDS, rollout.kv, strict=True) if hit[1]
        }
        result.prefilled_tokens = round(sum(model.prefilled_tokens for model in models))
        result.wasted_tokens = self.dropped_tokens + rollout.discarded
        result.group_latency_s = sum(self._latency) / len(self._latency) if self._latency else 0.0
        result.events = pops - rollout.looks + sum(model.events for model in models)
        return result
