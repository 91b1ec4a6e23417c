"""A study repeated with one thing changed at a time, every policy tuned again: what its answer depends on."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cluster.sim.compare import fastest, headline
from cluster.sim.knobs import Job, Sweep
from cluster.sim.policies import ASYNC
from cluster.sim.statistics import interval
from cluster.sim.study import Options, Study, study
from cluster.sim.sweep import QUIET, Progress, Workers

VARIED = ("stream", "aimd", "tide", "tide_no_elastic")
"""Policies of a sweep that names none: the fastest rivals of the built-in workloads, and ours."""


@dataclass(frozen=True)
class Varied:
    """One key's studies, one per value."""

    sweep: Sweep
    studies: tuple[Study, ...]


def vary(
    sweeps: Sequence[Sweep], options: Options, workers: Workers, progress: Progress = QUIET
) -> list[Varied]:
    """Every value of every sweep. Jobs that are the same in two sweeps (``x1``, say) are run once."""
    known: dict[Any, Study] = {}

    def once(job: Job) -> Study:
        key = job.workload.spec, job.profile, job.ranks, job.split
        if key not in known:
            known[key] = study(job, options, workers, progress)
        return known[key]

    return [Varied(sweep, tuple(once(job) for job in sweep.jobs)) for sweep in sweeps]


def rows(varied: Varied) -> list[dict[str, Any]]:
    """For each value the headline figures, and goodput, waits, hits and split of every policy."""
    found = []
    for value, one in zip(varied.sweep.values, varied.studies, strict=True):
        policies = {
            name: {
                "split": one.tuned[name].best.split,
                "goodput_tok_s": interval(one.goodput(name)),
                "wait_s": interval(one.waits(name)),
                "kv_hit": interval([result.kv_hit for result in results]),
                "moves": fmean(len(result.moves) for result in results),
            }
            for name, results in one.results.items()
        }
        row = {"key": varied.sweep.key, "value": value, "best_async": fastest(one, ASYNC)}
        found.append(row | dict(headline(one)) | {"policies": policies})
    return found
