"""Running figures of a job's works: what generating, training and scoring a batch take at present. Pure.

A batch is ``K`` sampled tokens. The generators' progress is told in tokens: whole groups end in waves (those
that were admitted together end together), so a step's count of them says little, while tokens come evenly.
``c``, a generator's busy seconds per token made by all, times ``K`` is what a batch takes now. ``K`` comes
from the batch that was trained; after a shift of the load that is an older one until the pipeline has turned
over, so meanwhile, and where tokens are not told, groups are counted: those that ended, and half of what
the number in flight grew by.

With ``n`` generators and ``o`` groups in flight a group takes ``l + o w / n``: its own time, and its share
of ranks that work for all. By Little's law a batch of ``B`` groups then takes ``B l / o + B w / n``. The
share of the second term (*saturation*, ``u``) is what more generators shorten, the rest is what more groups
in flight shorten.
"""

import math
from dataclasses import dataclass, field
from statistics import fmean, variance

from cluster.running import ALPHA, Estimate, Ratio

PRIOR = 0.5
"""Saturation until it is learned: an iteration reads the weights once for all sequences and each one's cache,
and a group waits for its environments, which no rank shortens. But where as many requests queue as run,
ranks are all that is short."""
BELIEF = 0.25
"""Standard deviation of the belief in the saturation: two of them reach from 0 to 1."""
LEAST_NOISE = 0.05
"""A step's seconds are never known better than to this share."""
TURNS = 2
"""Times as many groups as lay ready when a shift was noticed are trained before tokens tell again: short
groups overtake those of the old load that were still in flight."""
LEAST_SHARE = 0.2
"""More generators always help a little: below this nothing would be moved that could teach better."""
KEPT = 6
"""Assignments that the saturation is learned from."""


@dataclass
class Assignment:
    """Steps that were made with the same number of generators."""

    generators: int
    rates: list[float] = field(default_factory=list)  # seconds per unit of work, each step
    open: list[float] = field(default_factory=list)  # groups in flight, mean of each step
    spent: float = 0.0
    made: float = 0.0

    def seconds(self) -> float:
        """Per unit of work."""
        return self.spent / self.made

    def noise(self) -> float:
        """Relative variance of one step's figure; 0 if unknown."""
        return variance(self.rates) / fmean(self.rates) ** 2 if len(self.rates) > 2 else 0.0


class Saturation:
    """``u`` of the module docstring, at the first step's ``reference`` (generators, groups in flight).

    A regression of the seconds on ``1 / n`` and ``1 / o`` over the last assignments, drawn towards what was
    believed before: with counts that hardly differed, or noisy steps, the belief stays. Steps of one
    assignment count as one point, since there the groups in flight follow the load, not the other way round.
    """

    def __init__(self, prior: float = PRIOR) -> None:
        self.share = prior
        self.reference: tuple[int, float] | None = None
        self._belief = prior  # without what queues
        self._queue = self._queued = 0.0  # now, and the running mean
        self._seen: list[Assignment] = []

    def scale(self, generators: int, open_groups: float) -> float:
        """Seconds of a batch, in units of those at the reference; ``open_groups`` 0: unknown."""
        if self.reference is None:
            return 1.0
        at, flying = self.reference
        latency = flying / open_groups if flying > 0 and open_groups > 0 else 1.0
        return (1 - self.share) * latency + self.share * at / generators

    def queue(self, queued: float) -> None:
        """So many requests queue per running one."""
        self._queue = min(1.0, queued)
        self._queued += ALPHA * (self._queue - self._queued)

    @property
    def _prior(self) -> float:
        return self._belief + (1 - self._belief) * self._queued

    def add(self, generators: int, open_groups: float, spent: float, made: float) -> None:
        """One step spent so many seconds on so much work."""
        self.reference = self.reference or (generators, open_groups)
        if made <= 0 or spent <= 0:
            return
        self.share = max(LEAST_SHARE, self._prior)
        if not self._seen or self._seen[-1].generators != generators:
            self._seen = [*self._seen[1 - KEPT :], Assignment(generators)]
        now = self._seen[-1]
        now.rates.append(spent / made)
        now.open.append(open_groups)
        now.spent, now.made = now.spent + spent, now.made + made
        if len(self._seen) > 1 and len({one.generators for one in self._seen}) > 1:
            self._learn()

    def _learn(self) -> None:
        assert self.reference is not None
        at, flying = self.reference
        noisy = [one.noise() for one in self._seen]
        step_noise = max(LEAST_NOISE**2, *noisy)
        mean = fmean(one.seconds() for one in self._seen)
        spread = (BELIEF * mean) ** 2
        u = self._prior
        pp, pq, qq, py, qy = u * u / spread, -u * (1 - u) / spread, (1 - u) ** 2 / spread, 0.0, 0.0
        for one in self._seen:
            flown = fmean(one.open)
            p = flying / flown if flying > 0 and flown > 0 else 1.0
            q = at / one.generators
            weight = len(one.rates) / (step_noise * mean**2)
            pp, pq, qq = pp + weight * p * p, pq + weight * p * q, qq + weight * q * q
            py, qy = py + weight * p * one.seconds(), qy + weight * q * one.seconds()
        determinant = pp * qq - pq * pq
        if determinant <= 1e-12 * pp * qq:
            return
        own = max(0.0, (qq * py - pq * qy) / determinant)
        shared = max(0.0, (pp * qy - pq * py) / determinant)
        if own + shared > 0:
            self.share = max(LEAST_SHARE, shared / (own + shared))

    def shifted(self) -> None:
        """A new load, of which nothing is known but what queues now."""
        self._queued, self._seen = self._queue, []
        self.share = self._prior


class Rows:
    """What training and scoring a group of the present load take, before one has been trained.

    Rows grow while groups roll out: what they gain per group made is what a group of the new load has, and a
    token takes the seconds that it took until now. Groups in flight count half, but those that entered
    together are all at one unknown part of their way, so a few steps tell the change ``c`` of a group (of the
    logarithm) with a noise ``s``; it is believed by ``1 - s^2 / c^2``, what noise does not explain.
    """

    def __init__(self) -> None:
        self._train_s = Ratio()  # per token of rows
        self._score_s = Ratio()
        self._trained = Ratio()  # tokens of rows, per group trained
        self._gained, self._made = 0, 0.0  # tokens of rows, and groups, since the shift
        self._flying = (0, 0)  # groups in flight before the first of these steps, and after the last
        self._before = 0.0  # tokens of a group that was trained before the shift

    @property
    def known(self) -> bool:
        """Tokens of rows are told, of those trained and of those that grow."""
        return self._train_s.made > 0 and self._gained > 0 and self._made > 0

    def add(
        self,
        trained: tuple[float, float, int, int],
        grown: tuple[int, float],
        flying: tuple[int, int],
        shifted: bool,
    ) -> None:
        """A step: seconds of training, of scoring, tokens, groups of the batch; tokens gained, groups made;
        groups in flight before it and after.

        ``shifted``: this step and the one before differ from those before; that one may hold both loads.
        """
        train_s, score_s, tokens, groups = trained
        if shifted:
            self._before = self._trained.get()
            self._gained, self._made, self._flying = 0, 0.0, flying
        if tokens > 0:
            self._train_s.add(train_s, tokens, ALPHA)
            self._score_s.add(score_s, tokens, ALPHA)
            self._trained.add(tokens, groups, ALPHA)
        self._gained, self._made = self._gained + grown[0], self._made + grown[1]
        self._flying = (self._flying[0], flying[1])

    def works(self, groups: int) -> tuple[float, float]:
        """Seconds of training and of scoring so many groups."""
        tokens = self._tokens() * groups
        return self._train_s.get() * tokens, self._score_s.get() * tokens

    def _tokens(self) -> float:
        now, before = self._gained / self._made, self._before
        if before <= 0 or now == before:
            return now
        change = math.log(now / before)
        noise = math.hypot(*self._flying) / math.sqrt(12) / self._made
        return before * math.exp(change * max(0.0, 1 - (noise / change) ** 2))


class Generation:
    """Seconds in which the generators make a batch; see the module docstring."""

    def __init__(self) -> None:
        self.saturation = Saturation()
        self.mixed = 0  # groups still to be trained until the batch is of the present load
        self._token_s = Ratio()  # a generator's busy seconds per token, at the reference
        self._batch = Ratio()  # tokens per batch
        self._group_s = Ratio()  # as above, per group
        self._groups = 0  # of a batch
        self._jump = Estimate()
        self._generators = 0
        self._started = False

    @property
    def in_tokens(self) -> bool:
        """Tokens tell: they are counted, and those of the trained batch are of the present load."""
        return self._token_s.made > 0 and self._batch.made > 0 and self.mixed <= 0

    def add(
        self,
        seconds: float,
        generators: int,
        open_groups: float,
        groups: tuple[int, float, int, int],
        tokens: tuple[int, int],
        alpha: float,
        queued: float = 0.0,
    ) -> bool:
        """A step in which each of ``generators`` was busy for ``seconds``; True when the load has shifted.

        ``groups``: trained, made, ready, in flight; ``tokens``: trained, made; ``queued``: requests that wait
        for a place, per running one. What is not known is 0.
        """
        trained, made, ready, flying = groups
        batch_tokens, made_tokens = tokens
        self._groups = trained
        self.saturation.queue(queued)
        if generators != self._generators:  # of its first steps it is not known what else changed
            self._generators = generators
            self._jump.restart()
        told = batch_tokens > 0 and made_tokens > 0
        if self.mixed > 0:
            self.mixed -= trained
            if self.mixed <= 0:
                self._batch = Ratio()
        seen = seconds / self.saturation.scale(generators, open_groups)
        alpha = min(alpha, self._jump.spread.alpha())
        self._group_s.add(seen, made, alpha)
        if told:
            self._token_s.add(seen, made_tokens, alpha)
            self._batch.add(batch_tokens, 1, alpha)
        if self._started:
            units = made_tokens if told else made
            shifted = units > 0 and self._jump.add(seconds / units)
        else:  # the first groups to end are the shortest
            self._started, shifted = True, False
            self.mixed = ready + flying if told else 0
        if shifted:
            self._token_s.newest()
            self._group_s.newest()
            before = self.saturation.scale(generators, open_groups)
            self.saturation.shifted()
            self._rescale(before, generators, open_groups)
            self.mixed = TURNS * ready if told else 0
            if self.mixed <= 0:
                self._batch = Ratio()
        elif told and self.mixed <= 0:
            self._learn(generators, open_groups, seconds, made_tokens / self._batch.get())
        elif not told:
            self._learn(generators, open_groups, seconds, made / max(1, trained))
        return shifted

    def _learn(self, generators: int, open_groups: float, spent: float, batches: float) -> None:
        """A belief that changes does not change what the present count takes."""
        before = self.saturation.scale(generators, open_groups)
        self.saturation.add(generators, open_groups, spent, batches)
        self._rescale(before, generators, open_groups)

    def _rescale(self, before: float, generators: int, open_groups: float) -> None:
        factor = before / self.saturation.scale(generators, open_groups)
        self._token_s.rescale(factor)
        self._group_s.rescale(factor)

    @property
    def confirmed(self) -> bool:
        """The newest step made it certain that the load has shifted."""
        return self._jump.confirmed

    def error(self) -> float:
        """Standard error of ``seconds``, as a share.

        That of a token or group: how many a batch has changes training as much, and no split with it.
        """
        ratio = self._token_s if self.in_tokens else self._group_s
        return self._jump.spread.get() * math.sqrt(ratio.share())

    def seconds(self, generators: int, open_groups: float) -> float:
        """Of a batch, while ``open_groups`` are in flight (0: unknown)."""
        if generators <= 0:
            return math.inf
        scale = self.saturation.scale(generators, open_groups)
        if self.in_tokens:
            return self._token_s.get() * self._batch.get() * scale
        return self._group_s.get() * self._groups * scale
