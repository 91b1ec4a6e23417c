"""Injected environment latency: a heavy-tailed delay per turn, a pure function of its seeds."""

import hashlib
import math
from statistics import NormalDist

import msgspec

from cluster.errors import ConfigError

_STANDARD = NormalDist()


class Latency(msgspec.Struct, frozen=True):
    """Log-normal delays with mean ``mean_s`` seconds and shape ``sigma``.

    If ln X ~ N(mu, sigma^2) then E[X] = exp(mu + sigma^2 / 2), hence mu = ln(mean) - sigma^2 / 2.
    ``sigma`` 0 is a constant delay, 1.5 a heavy tail (the 99th percentile is 11 times the mean).
    """

    mean_s: float = 0.0
    sigma: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("mean_s", self.mean_s), ("sigma", self.sigma)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"env.latency.{name} = {value!r}: must be finite and at least 0")

    def delay_s(self, trajectory_seed: int, turn: int) -> float:
        """Seconds to wait in this turn; the same arguments give the same delay everywhere."""
        if self.mean_s == 0:
            return 0.0
        key = f"{self.seed}/{trajectory_seed}/{turn}".encode()
        bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11
        uniform = (bits + 0.5) / 2**53  # strictly inside (0, 1)
        mu = math.log(self.mean_s) - self.sigma**2 / 2
        return math.exp(mu + self.sigma * _STANDARD.inv_cdf(uniform))
