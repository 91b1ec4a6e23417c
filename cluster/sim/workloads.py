"""Workloads from quantile tables: episodes as a pure function of (seed, group, member).

A workload is a TOML file (docs/tide.md describes the format; the built-in ones lie in ``workloads/``). Each
figure of it is a number, or a table of ``[percent, value]`` pairs: what was published, no curve fitted to
it. Between two pairs the logarithm of the value is interpolated, so ``P50 = 0.1 s, P90 = 10 s`` says nothing
about P99, which needs a pair of its own (a lognormal through the same two would put TraceLab's P99 at
427 s, where 192 s was measured: arXiv:2606.30560).

Random numbers come from a counter-based hash (splitmix64; Steele, Lea, Flood, OOPSLA 2014): the k-th
number of an episode is a function of (seed, group, member, k) alone. So every policy meets the same episodes
in whatever order it plays them, and a paired comparison of policies is one over common random numbers.
"""

import math
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import msgspec
import numpy as np

from cluster.config import Section
from cluster.errors import ConfigError
from cluster.sim.catalogue import find, read
from cluster.sim.quantiles import Floats, Quantiles, Table, stretched, times
from cluster.sim.scenario import Plan, Turn

GOLDEN = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
NORMAL = NormalDist()
PLANS = 1 << 14
"""Plans remembered: policies are run on the same seed one after the other."""
GROUPS = 64
"""Groups remembered: their members are planned one after the other."""


class ToolSpec(Section, frozen=True, kw_only=True):
    """One kind of environment call."""

    name: str
    weight: float = 1.0  # share of the calls, relative to the other tools'
    latency_s: Table  # of one call
    source: str = ""


class KindSpec(Section, frozen=True, kw_only=True):
    """One kind of task. Tokens and turns are rounded; every table has a source or says that it is assumed."""

    name: str
    weight: float = 1.0  # share of the groups, relative to the other kinds of its phase
    phase: int = 0  # which phase it belongs to; see WorkloadSpec.phase_groups
    turns: Table
    prompt: Table  # tokens before the first turn; one draw per group, whose members share it
    observation: Table  # tokens that an environment call adds
    output: Table  # tokens sampled per turn
    start_s: Table = 0.0  # starting or resetting the environment
    correlation: float = 0.0  # of the members' turn counts within a group (Gaussian copula), 0..1
    max_turns: int = 0  # 0: no cut
    max_context: int = 0  # the episode is cut before its context exceeds this; 0: no cut
    window: int = 0  # > 0: only the last ``window`` observations stay in the context
    placeholder: int = 0  # tokens that remain of an observation that left the window
    tool: tuple[ToolSpec, ...]
    source: str = ""


class RunSpec(Section, frozen=True, kw_only=True):
    """The job that goes with a workload, if the user does not ask for another."""

    ranks: int = 32
    profile: str = "h100-qwen2.5-7b"
    groups_per_step: int = 64
    min_groups_per_step: int = 0
    group_size: int = 8
    max_lag: int = 2
    env_slots: int = 0  # trajectories in flight; 0: no bound


class WorkloadSpec(Section, frozen=True, kw_only=True):
    """A workload file."""

    name: str
    about: str = ""
    source: str = ""
    phase_groups: int = 0  # > 0: the phase changes after this many groups, round and round
    run: RunSpec = RunSpec()
    kind: tuple[KindSpec, ...]


class Kind:
    """A ``KindSpec`` ready to be sampled."""

    def __init__(self, spec: KindSpec, where: str) -> None:
        self.spec = spec
        self.name = spec.name
        self.turns = Quantiles(spec.turns, f"{where}.turns")
        self.prompt = Quantiles(spec.prompt, f"{where}.prompt")
        self.observation = Quantiles(spec.observation, f"{where}.observation")
        self.output = Quantiles(spec.output, f"{where}.output")
        self.start = Quantiles(spec.start_s, f"{where}.start_s")
        if not spec.tool:
            raise ConfigError(f"{where}.tool: at least one [[kind.tool]] is needed")
        weights = _shares([tool.weight for tool in spec.tool], f"{where}.tool")
        self.tool_edges = np.cumsum(weights)[:-1]
        self.tools = [
            (tool.name, Quantiles(tool.latency_s, f"{where}.tool[{number}].latency_s"))
            for number, tool in enumerate(spec.tool)
        ]
        for name, value, ok, why in (
            ("correlation", spec.correlation, 0 <= spec.correlation <= 1, "must lie in 0..1"),
            ("phase", spec.phase, spec.phase >= 0, "must not be negative"),
            ("max_turns", spec.max_turns, spec.max_turns >= 0, "must be 0 (no cut) or more"),
            ("max_context", spec.max_context, spec.max_context >= 0, "must be 0 (no cut) or more"),
            ("window", spec.window, spec.window >= 0, "must be 0 (everything stays) or more"),
        ):
            if not ok:
                raise ConfigError(f"{where}.{name} = {value!r}: {why}")
        least = round(self.prompt.one(0.0)) + round(self.output.one(0.0))
        if spec.max_context and least > spec.max_context:
            raise ConfigError(
                f"{where}.max_context = {spec.max_context}: the shortest prompt and reply take {least} "
                f"(prompt = {spec.prompt!r}, output = {spec.output!r})"
            )
        if spec.placeholder and not spec.window:
            raise ConfigError(f"{where}.placeholder = {spec.placeholder}: unused while window is 0")


class TableWorkload:
    """A source of episodes made from a ``WorkloadSpec``; picklable. Raises ConfigError if that is bad."""

    def __init__(self, spec: WorkloadSpec, where: str = "workload") -> None:
        self.spec = spec
        self.name = spec.name
        self._where = where
        if not spec.kind:
            raise ConfigError(f"{where}: at least one [[kind]] is needed")
        if spec.phase_groups < 0:
            raise ConfigError(f"{where}: phase_groups = {spec.phase_groups}: must be 0 (one phase) or more")
        phases = sorted({kind.phase for kind in spec.kind})
        if phases != list(range(len(phases))):
            raise ConfigError(f"{where}: kind.phase: phases {phases} must be 0, 1, 2 ... without a gap")
        if len(phases) > 1 and not spec.phase_groups:
            raise ConfigError(f"{where}: phase_groups is needed: the kinds have {len(phases)} phases")
        check_run(spec.run, where)
        assert self._phases  # built now, so that a bad table is refused now
        self.plan = lru_cache(maxsize=PLANS)(self._plan)
        self._common = lru_cache(maxsize=GROUPS)(self._group)

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self.spec, self._where)

    @cached_property
    def _phases(self) -> list[tuple[list[Kind], Floats]]:
        """Per phase its kinds and the upper edges of their shares."""
        kinds = [
            Kind(kind, f"{self._where}: kind[{number}] ({kind.name})")
            for number, kind in enumerate(self.spec.kind)
        ]
        phases = []
        for phase in range(1 + max(kind.phase for kind in self.spec.kind)):
            members = [kind for kind in kinds if kind.spec.phase == phase]
            weights = _shares([kind.spec.weight for kind in members], f"{self._where}: kind")
            phases.append((members, np.cumsum(weights)))
        return phases

    def kind(self, seed: int, group: int) -> Kind:
        """Which kind of task a group is."""
        length = self.spec.phase_groups
        kinds, edges = self._phases[(group // length) % len(self._phases) if length else 0]
        if len(kinds) == 1:
            return kinds[0]
        u = uniform(seed, group, -1, 3)[2]
        return kinds[min(int(np.searchsorted(edges, u, side="right")), len(kinds) - 1)]

    def _group(self, seed: int, group: int) -> tuple[Kind, float, int, int]:
        """What a group's members share: kind, score of their turn counts, prompt, first observation."""
        kind, shared = self.kind(seed, group), uniform(seed, group, -1, 4)
        prompt = max(1, round(kind.prompt.one(float(shared[1]))))
        first = max(1, round(kind.observation.one(float(shared[3]))))
        return kind, float(shared[0]), prompt, first

    def _plan(self, seed: int, group: int, member: int) -> Plan:
        """One episode. Pure: the same arguments give the same plan in any process."""
        kind, score, prompt, first = self._common(seed, group)
        spec = kind.spec
        own = uniform(seed, group, member, 2 + 4 * spec.max_turns)  # all at once, if the turns are bounded
        count = max(1, round(kind.turns.one(_correlated(score, own[0], spec.correlation))))
        if spec.max_turns:
            count = min(count, spec.max_turns)
        else:
            own = uniform(seed, group, member, 2 + 4 * count)
        draws = own[2 : 2 + 4 * count].reshape(4, count)
        outputs = np.maximum(1, np.rint(kind.output.at(draws[0]))).astype(int).tolist()
        seen = np.maximum(1, np.rint(kind.observation.at(draws[1]))).astype(int).tolist()
        seen[0] = first  # of the first prompt: shared too
        names, waits = _tools(kind, draws[2], draws[3])
        turns = _episode(spec, prompt, seen, outputs, names, waits)
        return Plan(turns, kind.start.one(float(own[1])), kind.name)


@lru_cache(maxsize=4)
def _shared(spec: WorkloadSpec, where: str) -> TableWorkload:
    """One instance per process, however often it is unpickled: it remembers plans."""
    return TableWorkload(spec, where)


def check_run(run: RunSpec, where: str) -> None:
    """Raises ConfigError naming ``where``, the field and its value if that is out of range."""
    for name, value, ok, why in (
        ("ranks", run.ranks, run.ranks >= 2, "must be at least 2: one generates, one trains"),
        ("groups_per_step", run.groups_per_step, run.groups_per_step >= 1, "must be at least 1"),
        ("group_size", run.group_size, run.group_size >= 1, "must be at least 1"),
        ("max_lag", run.max_lag, run.max_lag >= 0, "must be 0 (synchronous) or more"),
        (
            "min_groups_per_step", run.min_groups_per_step,
            0 <= run.min_groups_per_step <= run.groups_per_step,
            f"must lie in 0..groups_per_step = {run.groups_per_step}",
        ),
        (
            "env_slots", run.env_slots, run.env_slots == 0 or run.env_slots >= run.group_size,
            f"must be 0 (no bound) or at least group_size = {run.group_size}",
        ),
    ):  # fmt: skip
        if not ok:
            raise ConfigError(f"{where}: run.{name} = {value!r}: {why}")


def load_workload(name: str) -> TableWorkload:
    """A built-in workload by name, or a TOML file. Raises ConfigError naming field and value."""
    path = find(name, "workloads")
    return TableWorkload(read(path, WorkloadSpec), str(path) if "/" in name else name)


def altered(
    workload: TableWorkload, *, env: float = 1.0, tail: float = 1.0, output: float = 1.0
) -> TableWorkload:
    """The same workload with environment latencies, or sampled tokens per turn, multiplied.

    ``tail`` leaves medians alone: what lies above them gets so many times as far from them.
    """

    def slower(table: Table) -> Table:
        return stretched(times(table, env), tail)

    kinds = tuple(
        msgspec.structs.replace(
            kind,
            start_s=slower(kind.start_s),
            output=times(kind.output, output),
            tool=tuple(
                msgspec.structs.replace(tool, latency_s=slower(tool.latency_s)) for tool in kind.tool
            ),
        )
        for kind in workload.spec.kind
    )
    return TableWorkload(msgspec.structs.replace(workload.spec, kind=kinds), workload.name)


def train_tokens(plan: Plan) -> int:
    """Tokens of the rows that an episode is compiled to: a row ends where the history is rewritten."""
    total = context = 0
    for turn in plan.turns:
        if turn.kept >= 0:
            total += context
            context = turn.kept
        context += turn.added + turn.output
    return total + context


def uniform(seed: int, group: int, member: int, count: int) -> Floats:
    """``count`` numbers in (0, 1): splitmix64 over a counter, started at a hash of the three integers."""
    state = seed & MASK
    for value in (group, member):
        state = _mix((state * GOLDEN + value + 1) & MASK)
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN) + np.uint64(state)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def _correlated(shared: float, own: float, rho: float) -> float:
    """A probability whose normal score has correlation ``rho`` among those that share ``shared``."""
    if rho <= 0:
        return float(own)
    if rho >= 1:
        return float(shared)
    score = math.sqrt(rho) * NORMAL.inv_cdf(float(shared)) + math.sqrt(1 - rho) * NORMAL.inv_cdf(float(own))
    return NORMAL.cdf(score)


def _tools(kind: Kind, choice: Floats, chance: Floats) -> tuple[list[str], list[float]]:
    """Per turn the tool and what its call takes."""
    if len(kind.tools) == 1:
        name, latency = kind.tools[0]
        return [name] * len(choice), latency.at(chance).tolist()
    index = np.searchsorted(kind.tool_edges, choice, side="right")
    waits = np.empty(len(choice))
    for number, (_, latency) in enumerate(kind.tools):
        mask = index == number
        if mask.any():
            waits[mask] = latency.at(chance[mask])
    return [kind.tools[number][0] for number in index], waits.tolist()


def _episode(
    spec: KindSpec, prompt: int, seen: list[int], outputs: list[int], names: list[str], waits: list[float]
) -> tuple[Turn, ...]:
    """Turns until the count or the context limit is reached. The first one is cut to fit.

    ``seen[i]`` is the observation that came before turn ``i``; the prompt contains the first one, unless
    a window will drop it.
    """
    limit, window = spec.max_context, spec.window
    turns: list[Turn] = []
    context = 0
    for number, output in enumerate(outputs):
        added, kept = seen[number], -1
        gone = number + 1 - window if window else 0
        if number == 0:
            added = prompt + (seen[0] if window else 0)
        elif gone > 0:
            # Observation gone - 1 becomes a placeholder: the prefix before it remains, and all that came
            # after it has to be computed again.
            last = gone - 1
            kept = prompt + last * spec.placeholder + sum(outputs[:last])
            added = spec.placeholder + sum(outputs[last:number]) + sum(seen[gone : number + 1])
            context = kept
        if limit and context + added + output > limit:
            if number:
                break
            added = max(1, min(added, limit - output))
            output = min(output, limit - added)
        turns.append(Turn(added, output, waits[number], names[number], kept))
        context += added + output
    turns[-1] = turns[-1]._replace(env_s=0.0)
    return tuple(turns)


def _shares(weights: list[float], where: str) -> Floats:
    if not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(f"{where}.weight = {weights}: weights must be positive")
    return np.array(weights) / sum(weights)
