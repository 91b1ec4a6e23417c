"""Running figures of a noisy series, one step at a time: its level, its spread, when it jumps. Pure."""

import math
from collections import deque
from statistics import median

ALPHA = 0.3
"""Weight of a new step in a running mean of quiet figures: three steps carry two thirds."""
LEAST_ALPHA = 0.1
"""Of the noisiest figures: a load that creeps is still followed in ten steps."""
PRECISION = 0.05
"""Between these the weight is such that the mean is known to this share."""
JUMP = 0.3
"""Two steps in a row that leave the mean by more than this share, on one side, are a new load ..."""
JUMP_SPREADS = 3.0
"""... if they also leave it by more than so many standard deviations, as noise seldom does."""
CONFIRM_STEPS = 4
"""Further steps that have to be nearer to the new level than to the old one until a jump is certain."""
KEPT_CHANGES = 31
"""Changes from step to step that the spread is told by ..."""
PRIOR_CHANGES = (0.1, 0.1)
"""... and what is believed before the first of them."""
SD_OF_MEDIAN = 1.048
"""Standard deviation of a normal series, in medians of the size of its changes: 1 / (0.6745 sqrt 2)."""


class Spread:
    """Standard deviation of a step's figure, as a share of it.

    By the median of the last changes from step to step: a jump of the level is one change.
    """

    def __init__(self) -> None:
        self._changes: deque[float] = deque(maxlen=KEPT_CHANGES)
        self._last = 0.0

    def add(self, seen: float) -> None:
        """One step's figure; 0 tells nothing."""
        if seen > 0 and self._last > 0:
            self._changes.append(abs(math.log(seen / self._last)))
        self._last = seen

    def restart(self) -> None:
        """The next figure does not compare with the last."""
        self._last = 0.0

    def get(self) -> float:
        """The standard deviation."""
        return SD_OF_MEDIAN * median((*PRIOR_CHANGES, *self._changes))

    def alpha(self) -> float:
        """Weight of a new step in the running mean: ``sd sqrt(alpha / (2 - alpha))`` is its error."""
        target = PRECISION**2
        return min(ALPHA, max(LEAST_ALPHA, 2 * target / (self.get() ** 2 + target)))


class Estimate:
    """A running mean that follows a new load after two steps and shrugs off one odd step."""

    def __init__(self) -> None:
        self.value: float | None = None
        self.spread = Spread()
        self.confirmed = False  # the newest step made the last jump certain
        self._share = 1.0  # variance of the mean, in variances of a step
        self._strays: list[float] = []
        self._old = 0.0  # level before the strays
        self._middle = 0.0  # between the levels before and after the last jump
        self._doubts = 0  # steps that are still to confirm it

    def restart(self) -> None:
        """A new series with the noise of the old one."""
        self.value, self._strays, self._doubts, self.confirmed = None, [], 0, False
        self.spread.restart()

    def add(self, seen: float) -> bool:
        """Take one step's figure; True when it completes a jump to a new load."""
        self.confirmed = False
        if self.value is None:
            self.value, self._share = seen, 1.0
            self.spread.add(seen)
            return False
        value, away = self.value, seen - self.value
        strays = self._leaves(seen)
        self.spread.add(seen)
        if strays:
            same_side = [s for s in self._strays if (s > value) == (away > 0)]
            self._old = self._old if same_side else value
            self._strays = [*same_side, seen]
            if len(self._strays) >= 2:
                self._jump()
                return True
        else:
            self._strays = []
        self._confirm(seen)
        alpha = max(self.spread.alpha(), self._share / (1 + self._share))
        self.value = value + alpha * away
        self._share = (1 - alpha) ** 2 * self._share + alpha**2
        return False

    def _leaves(self, seen: float) -> bool:
        """By more than noise does."""
        assert self.value is not None
        if abs(seen - self.value) <= JUMP * max(abs(self.value), 1e-9):
            return False
        if seen <= 0 or self.value <= 0:
            return True
        noise = self.spread.get() * math.sqrt(1 + self._share)  # of the step and of the mean
        return abs(math.log(seen / self.value)) > JUMP_SPREADS * noise

    def _jump(self) -> None:
        self.value = math.fsum(self._strays) / len(self._strays)
        self._share = 1 / len(self._strays)
        self._strays = []
        self._middle = math.sqrt(max(0.0, self._old) * max(0.0, self.value))
        self._doubts = CONFIRM_STEPS

    def _confirm(self, seen: float) -> None:
        if self._doubts > 0:
            held = (seen > self._middle) == (self._old < self._middle)
            self._doubts = self._doubts - 1 if held else 0
            self.confirmed = held and self._doubts == 0

    def get(self) -> float:
        """The mean; 0 before the first step."""
        return self.value if self.value is not None else 0.0

    def error(self) -> float:
        """Standard error of the mean, as a share of it."""
        return self.spread.get() * math.sqrt(self._share)


class Ratio:
    """What was spent over what was made, summed over the last steps, of which older ones fade."""

    def __init__(self) -> None:
        self.spent = self.made = 0.0
        self._squares = 0.0  # of what was made in each step
        self._two = ((0.0, 0.0), (0.0, 0.0))  # the newest steps

    def add(self, spent: float, made: float, alpha: float) -> None:
        """One step."""
        self.spent = (1 - alpha) * self.spent + spent
        self.made = (1 - alpha) * self.made + made
        self._squares = (1 - alpha) ** 2 * self._squares + made**2
        self._two = (self._two[1], (spent, made))

    def get(self) -> float:
        """0 before anything was made."""
        return self.spent / self.made if self.made > 0 else 0.0

    def share(self) -> float:
        """Variance of the ratio, in variances of a step."""
        return self._squares / self.made**2 if self.made > 0 else 1.0

    def newest(self) -> None:
        """Forget all but the last two steps."""
        (spent, made), (later_spent, later_made) = self._two
        self.spent, self.made = spent + later_spent, made + later_made
        self._squares = made**2 + later_made**2

    def rescale(self, factor: float) -> None:
        """The unit of what is spent has changed."""
        self.spent *= factor
        (spent, made), (later_spent, later_made) = self._two
        self._two = ((spent * factor, made), (later_spent * factor, later_made))
