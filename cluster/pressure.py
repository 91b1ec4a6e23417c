"""Additive caution, multiplicative speed: a bound that follows what the engine says of its memory.

The rule is prime-rl's for its in-flight cap: grow by a quarter per turnover while the bound binds and
memory is not even ``_ROOMY`` used; cut when memory runs short. After a cut stand still until it has drained
or a turnover has ended every turn that ran then: one shortage, which lasts for many reports, is answered
once, and one that outlasts its answer again. Where high usage is planned it says nothing: there the bound
grows after some turnovers without a preemption.
"""

_ROOMY = 0.6  # usage below which the bound may grow
_DRAINED = 0.7  # usage below which a cut has taken effect
_CALM = 4  # turnovers without a preemption before a bound under which memory is planned to be full grows
_GROW = 1.25  # per turnover: doubles in three, about as fast as contexts of new tasks grow
_TRIM = (0.8, 0.9)  # (usage, factor): getting full, a gentle cut
_FULL = (0.9, 0.8)  # about to preempt
_PREEMPTED = 0.5  # preemption recomputes whole contexts: the one signal that must end at once


class Pressure:
    """A bound ``value`` in [``floor``, ``ceiling``]; ``preempted`` is the factor after a preemption."""

    __slots__ = ("_ceiling", "_factor", "_floor", "_frozen", "_preemptions", "_turns", "value")

    def __init__(self, value: float, floor: float, ceiling: float, preempted: float = _PREEMPTED) -> None:
        self.value = value
        self._floor, self._ceiling, self._factor = floor, ceiling, preempted
        self._frozen = False
        self._preemptions = 0
        self._turns = 0  # ended when the value last changed

    def observe(
        self, usage: float, preemptions: int, *, binds: bool, full: bool, turns: int, width: int
    ) -> bool:
        """Take a report; True if the value changed.

        ``usage`` is the used share of the KV cache and ``preemptions`` the engine's counter. ``binds``: the
        value is what keeps tasks out. ``full``: high usage is a reason to cut (False where it was planned).
        ``turns`` ended since the start, ``width`` of which are one turnover.
        """
        preempted = preemptions > self._preemptions
        self._preemptions = preemptions
        turnovers = (turns - self._turns) / max(1, width)
        if self._frozen:
            if turnovers < 1 and (preempted or usage >= _DRAINED):
                return False
            self._frozen = False
            self._turns = turns
            turnovers = 0.0
        factor = 1.0
        if preempted:
            factor = self._factor
        elif full and usage >= _FULL[0]:
            factor = _FULL[1]
        elif full and usage >= _TRIM[0]:
            factor = _TRIM[1]
        elif binds and turnovers >= 1 and (usage < _ROOMY or (not full and turnovers >= _CALM)):
            factor = _GROW
        if factor == 1.0:
            return False
        before, self.value = self.value, min(self._ceiling, max(self._floor, self.value * factor))
        self._turns = turns
        if factor < 1.0:
            self._frozen = True
        return self.value != before
