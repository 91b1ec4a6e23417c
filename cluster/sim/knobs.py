"""What a simulation may be asked to vary: the job, the times of its profile, the shape of its load.

``KEY=V1,V2,...``. A key is a field of a profile's section (``generator.kv_tokens``) or of a workload's
``[run]`` (``run.max_lag``), or one of ``JOB`` and ``SHAPE``. The value of a field is what it becomes, or
``x`` and what it is multiplied by (``x0.25``); that of a shape is a factor, with or without the ``x``.
"""

import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_type_hints

import msgspec

from cluster.errors import ConfigError
from cluster.sim.catalogue import check_profile, load_profile
from cluster.sim.profile import Profile
from cluster.sim.scenario import Split
from cluster.sim.workloads import RunSpec, TableWorkload, altered


@dataclass(frozen=True)
class Job:
    """What is simulated, before policies come in."""

    workload: TableWorkload
    profile: Profile
    ranks: int
    split: Split | None = None  # everybody runs with it; None: each policy's best is searched for


@dataclass(frozen=True)
class Sweep:
    """One key and its values, in the order asked for, with the job that each of them makes."""

    key: str
    values: tuple[str, ...]
    jobs: tuple[Job, ...]

    def numbers(self) -> list[float] | None:
        """The values as numbers to draw along an axis; None if one is a name or a split."""
        found = [_number(value.removeprefix("x")) for value in self.values]
        return [number for number in found if number is not None] if None not in found else None


def sweep_of(job: Job, text: str) -> Sweep:
    """``KEY=V1,V2,...`` applied to ``job``. Raises ConfigError naming key, value and what is valid."""
    key, equals, rest = text.partition("=")
    values = tuple(value.strip() for value in rest.split(","))
    if not equals or not all(values):
        shown = "generator.kv_tokens=x0.25,x0.5,x1"
        raise ConfigError(f"--sweep {text}: give KEY=V1,V2,..., such as {shown}; keys are {listing()}")
    if len(set(values)) < len(values):
        raise ConfigError(f"--sweep {text}: a value is given twice")
    return Sweep(key, values, tuple(changed(job, key, value) for value in values))


def set_to(job: Job, text: str) -> Job:
    """``KEY=VALUE`` applied to ``job``. Raises ConfigError naming key, value and what is valid."""
    key, equals, value = text.partition("=")
    if not equals or not value:
        raise ConfigError(f"--set {text}: give KEY=VALUE, such as load.batch=x0.5; keys are {listing()}")
    return changed(job, key, value.strip())


def changed(job: Job, key: str, value: str) -> Job:
    """``job`` with ``key`` set to ``value``. Raises ConfigError naming key, value and what is valid."""
    where = f"{key}={value}"
    if key in JOB:
        return JOB[key](job, value, where)
    if key in SHAPE:
        factor = _factor(value, where)
        return SHAPE[key].change(job, factor)
    section, _, name = key.partition(".")
    if section == "run" and name in RUN:
        return _with_run(job, name, value, where)
    if section in SECTIONS and name in SECTIONS[section].__struct_fields__:
        struct = getattr(job.profile, section)
        new = msgspec.structs.replace(struct, **{name: _value(struct, name, value, where)})
        profile = msgspec.structs.replace(job.profile, **{section: new})
        check_profile(profile, where)
        return replace(job, profile=profile)
    close = difflib.get_close_matches(key, keys(), n=3, cutoff=0.5)
    meant = f" (did you mean {' or '.join(close)}?)" if close else f": valid are {listing()}"
    raise ConfigError(f"unknown key {key!r}{meant}")


def keys() -> list[str]:
    """Every valid key."""
    fields = [f"{section}.{name}" for section, kind in SECTIONS.items() for name in kind.__struct_fields__]
    return [*JOB, *SHAPE, *(f"run.{name}" for name in RUN), *fields]


def listing() -> str:
    """Every valid key, sections folded, on one line."""
    folded = [f"{section}.{{{','.join(kind.__struct_fields__)}}}" for section, kind in SECTIONS.items()]
    return " ".join([*JOB, *SHAPE, f"run.{{{','.join(RUN)}}}", *folded])


def split_of(text: str, where: str = "--split") -> Split:
    """``generators/learners`` or ``generators/learners/scorers``. Raises ConfigError for anything else."""
    parts = text.split("/")
    if len(parts) not in (2, 3) or not all(part.isdigit() for part in parts):
        raise ConfigError(f"{where} {text!r}: give generators/learners/scorers, such as 12/17/3")
    numbers = [int(part) for part in parts]
    if min(numbers[:2]) < 1:
        raise ConfigError(f"{where} {text}: generators and learners must be at least 1")
    return Split(*numbers)


def ranks_of(split: Split) -> int:
    """All ranks of a split."""
    return split.generators + split.learners + split.scorers


# -- keys of the job ---------------------------------------------------------------------------------


def _ranks(job: Job, value: str, where: str) -> Job:
    number = _number(value)
    if number is None or number != int(number) or number < 2:
        raise ConfigError(f"{where}: ranks are a whole number of at least 2")
    if job.split is not None:
        raise ConfigError(f"{where}: contradicts --split, which says how many there are")
    return replace(job, ranks=int(number))


def _split(job: Job, value: str, where: str) -> Job:
    if value == "best":
        return replace(job, split=None)
    split = split_of(value, "split =")
    if ranks_of(split) != job.ranks:
        raise ConfigError(f"{where}: has {ranks_of(split)} ranks, the job {job.ranks}")
    return replace(job, split=split)


def _profile(job: Job, value: str, where: str) -> Job:
    return replace(job, profile=load_profile(value))


JOB: dict[str, Callable[[Job, str, str], Job]] = {"ranks": _ranks, "split": _split, "profile": _profile}
"""``split`` takes ``best`` too: each policy's own, found by a search."""


# -- factors on the shape of the load ----------------------------------------------------------------


def _latency(job: Job, factor: float) -> Job:
    return replace(job, workload=altered(job.workload, env=factor))


def _tail(job: Job, factor: float) -> Job:
    return replace(job, workload=altered(job.workload, tail=factor))


def _output(job: Job, factor: float) -> Job:
    return replace(job, workload=altered(job.workload, output=factor))


def _batch(job: Job, factor: float) -> Job:
    run = job.workload.spec.run
    groups = max(1, round(run.groups_per_step * factor))
    slots = max(run.group_size, round(run.env_slots * factor)) if run.env_slots else 0
    least = max(1, round(run.min_groups_per_step * factor)) if run.min_groups_per_step else 0
    return _run(job, groups_per_step=groups, env_slots=slots, min_groups_per_step=least)


def _phase(job: Job, factor: float) -> Job:
    spec = job.workload.spec
    if not spec.phase_groups:
        raise ConfigError(f"load.phase: workload {spec.name} has one phase only")
    groups = max(1, round(spec.phase_groups * factor))
    return replace(job, workload=TableWorkload(msgspec.structs.replace(spec, phase_groups=groups), spec.name))


def _model(job: Job, factor: float) -> Job:
    """Times of a model ``factor`` times as large, of the same shape, on the same devices.

    All that is proportional to parameters or weight bytes grows, and the cache of a token with them (more
    layers). That larger weights leave less memory to the cache is left out: the profile does not say how
    much there is. For two real models, compare two profiles.
    """
    profile, change = job.profile, msgspec.structs.replace
    generator, learner, scorer, sync = profile.generator, profile.learner, profile.scorer, profile.sync
    new = change(
        profile,
        generator=change(
            generator, kv_tokens=max(1, int(generator.kv_tokens / factor)),
            prefill_tok_s=generator.prefill_tok_s / factor, step_base_s=generator.step_base_s * factor,
            step_seq_s=generator.step_seq_s * factor, step_ctx_s=generator.step_ctx_s * factor,
        ),
        learner=change(
            learner, forward_tok_s=learner.forward_tok_s / factor,
            backward_tok_s=learner.backward_tok_s / factor,
        ),
        scorer=change(
            scorer, forward_tok_s=scorer.forward_tok_s / factor, swap_s=scorer.swap_s * factor
        ),
        sync=change(sync, publish_s=sync.publish_s * factor, load_s=sync.load_s * factor),
    )  # fmt: skip
    return replace(job, profile=new)


def _train(job: Job, factor: float) -> Job:
    profile, change = job.profile, msgspec.structs.replace
    learner, scorer = profile.learner, profile.scorer
    new = change(
        profile,
        learner=change(
            learner, forward_tok_s=learner.forward_tok_s / factor,
            backward_tok_s=learner.backward_tok_s / factor,
        ),
        scorer=change(scorer, forward_tok_s=scorer.forward_tok_s / factor),
    )  # fmt: skip
    return replace(job, profile=new)


@dataclass(frozen=True)
class Shape:
    """A factor on several figures at once."""

    label: str
    change: Callable[[Job, float], Job]


SHAPE: dict[str, Shape] = {
    "load.latency": Shape("every environment call and start takes so many times as long", _latency),
    "load.tail": Shape("what lies above the median of those times is so many times as far from it", _tail),
    "load.output": Shape("tokens sampled per turn", _output),
    "load.batch": Shape("groups per step, and environment slots", _batch),
    "load.phase": Shape("length of a phase", _phase),
    "model.size": Shape("a model so many times as large: all its times, less room for its cache", _model),
    "model.train": Shape("time to train and to score a token", _train),
}

SECTIONS: dict[str, type[msgspec.Struct]] = {
    name: kind for name, kind in get_type_hints(Profile).items()
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
}  # fmt: skip
RUN = tuple(name for name in RunSpec.__struct_fields__ if name not in JOB)


# -- values ------------------------------------------------------------------------------------------


def _with_run(job: Job, name: str, value: str, where: str) -> Job:
    return _run(job, **{name: _value(job.workload.spec.run, name, value, where)})


def _run(job: Job, **changes: Any) -> Job:
    spec = job.workload.spec
    run = msgspec.structs.replace(spec.run, **changes)
    return replace(job, workload=TableWorkload(msgspec.structs.replace(spec, run=run), spec.name))


def _value(struct: msgspec.Struct, name: str, value: str, where: str) -> float:
    """What the field becomes; fields that count things are rounded after ``x``, whole otherwise."""
    before: float = getattr(struct, name)
    number = _number(value.removeprefix("x"))
    if number is None or number < 0:
        raise ConfigError(f"{where}: give a number, or x and a factor (now {before:g})")
    whole = isinstance(before, int)
    if value.startswith("x"):
        return round(before * number) if whole else before * number
    if whole and number != int(number):
        raise ConfigError(f"{where}: must be a whole number (now {before:g})")
    return int(number) if whole else number


def _factor(value: str, where: str) -> float:
    number = _number(value.removeprefix("x"))
    if number is None or number <= 0:
        raise ConfigError(f"{where}: give a factor above 0, such as x2 (x1: as it is)")
    return number


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
