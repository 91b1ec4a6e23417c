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
"""


def allowance(
    *,
    max_lag: int,
    groups_per_step: int,
    acknowledged: int,
    steps: int,
    admitted: int,
    lost: int,
) -> int:
    """How many more groups may be admitted now (never negative).

    ``admitted`` counts every group admitted so far, ``lost`` those that will not be trained.
    Both are restored from the queue on recovery, so no burst follows. Nothing is admitted
    beyond what the run's ``steps`` optimizer steps can train.
    """
    blocks = min(max_lag + acknowledged + 1, steps)
    return max(0, blocks * groups_per_step - (admitted - lost))


def lag(*, training: int, oldest: int) -> int:
    """Version being trained minus the oldest version of any trainable token.

    Raises ValueError if negative: a token newer than the learner means a lost version counter.
    """
    if oldest > training:
        raise ValueError(f"token version {oldest} is newer than the version trained, {training}")
    return training - oldest
