"""The capacity rule and the lag check, as pure functions of facts.

Let ``B`` be groups per step, ``eta`` the bound, ``a`` the lowest version that every healthy
generator has acknowledged. Groups admitted and not lost (``admitted - lost``) may not exceed
``(eta + a + 1) * B`` (AReaL, arXiv:2505.24298, with ``a`` in the place of the learner's version):
the batch for version ``v`` is the ``v``-th block of ``B`` groups, so a group admitted at ``a``
is at most ``eta`` blocks ahead. The rule bounds the *aggregate*; a slow group can still age in
flight or in the queue, so ``lag`` is checked again when the batch forms.

With ``eta = 0``, block ``v + 1`` is admitted only when version ``v`` is live everywhere, and
every token of it is sampled by ``v``: exactly synchronous training. Progress is guaranteed for
every bound, because admission waits for the version that the batch will need, and lost
groups give their place back.

**Batches of unequal size** (``run.min_groups_per_step``). Let ``v`` be the learner's version and ``t`` the
groups trained by then. A group admitted at ``a`` must be trained by the step at version ``a + eta``. Of the
groups that are admitted and neither lost nor trained, let ``n(d)`` be those with deadline ``d`` or earlier.
All deadlines can be met, oldest first, iff ``n(d) <= (d - v + 1) * B`` for every ``d >= v`` (no step trains
more than ``B``). Admission keeps this true for the newest deadline: ``admitted - lost - t`` may not exceed
``(eta + a + 1 - v) * B``, which is the rule above when ``t = v * B``. The batch at ``v`` keeps it true for
the others: it trains at least ``n(d) - (d - v) * B`` groups for every ``d``, which is never more than ``B``.
So small batches cost admissions, not the bound. ``n(d)`` is counted from marks: a mark is what was
admitted and not lost when the last group of version ``a`` was admitted.
"""

from collections.abc import Mapping


def allowance(
    *,
    max_lag: int,
    groups_per_step: int,
    acknowledged: int,
    steps: int,
    admitted: int,
    lost: int,
    progress: tuple[int, int] | None = None,
) -> int:
    """How many more groups may be admitted now (never negative).

    ``admitted`` counts every group admitted so far, ``lost`` those that will not be trained.
    Both are restored from the queue on recovery, so no burst follows. Nothing is admitted
    beyond what the run's ``steps`` optimizer steps can train. ``progress`` is (version, groups trained by
    then), for batches of unequal size; it may lag behind the learner but must be of one instant.
    """
    version, trained = progress if progress is not None else (0, 0)
    blocks = min(max_lag + acknowledged + 1, steps) - version
    return max(0, trained + blocks * groups_per_step - (admitted - lost))


def smallest_batch(
    *,
    max_lag: int,
    groups_per_step: int,
    least: int,
    progress: tuple[int, int],
    marks: Mapping[int, int],
) -> int:
    """Fewest groups that the step at ``progress`` may train without endangering a later one's bound.

    ``least`` is what the recipe allows, ``marks`` maps a version to the groups admitted and not lost when
    the last group of that version was admitted. Between ``least`` and ``groups_per_step``.
    """
    version, trained = progress
    needed = [
        mark - trained - max(0, admitted_at + max_lag - version) * groups_per_step
        for admitted_at, mark in marks.items()
    ]
    return min(groups_per_step, max([least, *needed]))


def lag(*, training: int, oldest: int) -> int:
    """Version being trained minus the oldest version of any trainable token.

    Raises ValueError if negative: a token newer than the learner means a lost version counter.
    """
    if oldest > training:
        raise ValueError(f"token version {oldest} is newer than the version trained, {training}")
    return training - oldest
