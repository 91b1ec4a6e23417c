"""``springtide replay``: train a recorded run's batches again, in one process, and compare losses.

The recorded groups are compiled, credited and packed by the same code; the learner starts from
the same initial weights. World size and micro-batching may differ from the recorded run's:
losses agree to fp32 rounding.
"""

import json
import socket
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace as changed

from cluster.config import Config, build
from cluster.errors import ConfigError
from cluster.model_folder import ids_in_use
from deploy.paths import RunFolder, make_importable
from deploy.prepare import model_folder
from learner.form import build as form
from learner.record import read_steps
from learner.signals import ReferenceScorer
from learner.step import LearnerRank

TOLERANCE = 1e-4
"""Largest loss difference that counts as equal; fp32 rounding grows with the steps."""


@dataclass(frozen=True)
class Compared:
    """One step: the loss that the live run computed and the one of the replay."""

    step: int
    recorded: float
    replayed: float

    @property
    def difference(self) -> float:
        return abs(self.recorded - self.replayed)


def replay(path: Path) -> int:
    """Replay a run folder; prints each step and returns 0 if all losses agree."""
    folder = RunFolder(path)
    if not folder.config.exists():
        raise ConfigError(f"{path} is no run folder: it has no config.json")
    config = build(json.loads(folder.config.read_text()))
    make_importable(config.env.folder)
    worst = 0.0
    for compared in replayed(config, folder.record, model_folder(config)):
        worst = max(worst, compared.difference)
        sys.stdout.write(
            f"step {compared.step}: recorded {compared.recorded:+.8f} replayed {compared.replayed:+.8f}\n"
        )
    sys.stdout.write(f"largest difference {worst:.2e} (tolerance {TOLERANCE:.0e})\n")
    return 0 if worst <= TOLERANCE else 1


def replayed(
    config: Config, record: Path, model: Path, micro_rows: int | None = None
) -> list[Compared]:
    """Train every recorded step at world size 1, with other micro-batches if ``micro_rows`` is given.

    Raises FileNotFoundError without a record.
    """
    rows = config.learner.micro_rows if micro_rows is None else micro_rows
    single = changed(config, learner=changed(config.learner, ranks=1, micro_rows=rows))
    used = ids_in_use(model)
    scorer = None
    if config.objective.kl_coef > 0:
        scorer = ReferenceScorer(config.scorer.path or model, config.learner.dtype, vocab_used=used)
    learner = LearnerRank(single, str(model), 0, 1, config.run.seed, used)
    learner.join("127.0.0.1", _free_port())
    compared = []
    try:
        for recorded in read_steps(record):
            formed = form(recorded.groups, single, ranks=1)
            batch = formed.plan.ranks[0]
            signals = partial(scorer.score, batch) if scorer is not None else None
            result = learner.step(batch, recorded.record.step, signals)
            compared.append(
                Compared(recorded.record.step, recorded.metrics["loss"], result.metrics["loss"])
            )
    finally:
        learner.leave()
    return compared


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
