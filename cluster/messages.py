"""Messages between the controller and the actors: records only, one place, no behaviour."""

from cluster.types import Order, Record, Weights


class GeneratorRow(Record, frozen=True, array_like=True):
    """One line of the generator table."""

    name: str
    healthy: bool
    version: int
    free: int = 0  # tokens that its ledger could still promise; 0 if unknown
    report: int = 0  # number of the health report that says so: a new one may say the same again


class Table(Record, frozen=True):
    """Who generates. A receiver refuses a table whose ``epoch`` is older than the one it holds."""

    epoch: int
    generators: tuple[GeneratorRow, ...] = ()


class Pull(Record, frozen=True):
    """An env worker asks for work; controller learns at the same time what it runs.

    ``incarnation`` differs for every process that ever ran under the worker's name, so a
    replaced process is noticed at its first pull. ``running`` maps group id to attempt.
    """

    worker: str
    incarnation: str
    slots: int  # trajectories it can run at once
    free: int  # of which are free now
    running: dict[str, int] = {}
    counters: dict[str, float] = {}  # the worker's own metric totals


class Grant(Record, frozen=True):
    """The controller's answer: orders to start, the generator table, the slot count to use."""

    orders: tuple[Order, ...] = ()
    table: Table = Table(epoch=0)
    slots: int | None = None
    cancel: tuple[str, ...] = ()  # groups the worker must stop (superseded or abandoned)


class EvalEpisode(Record, frozen=True):
    """One evaluated trajectory; ``error`` when it failed (a failure is not a score)."""

    suite: str
    group: str
    success: float = 0.0
    rewards: dict[str, float] = {}
    turns: int = 0
    tokens: int = 0
    error: str = ""
    versions: tuple[int, int] = (0, 0)


class EvalSummary(Record, frozen=True):
    """A suite's result: mean over episodes with a 95% Wilson interval; failures apart."""

    suite: str
    mode: str
    tasks: int
    success: float
    low: float
    high: float
    failed: int
    turns_mean: float
    versions: tuple[int, int]
    seconds: float
    rewards: dict[str, float] = {}


class GeneratorHealth(Record, frozen=True):
    """What a generator says of itself."""

    name: str
    instance: str  # new for every process
    ready: bool
    version: int
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    grown_tokens: int = 0  # that training rows gained here, total
    sync_s: float = 0.0  # seconds paused for weight updates, total
    busy: tuple[tuple[float, float], ...] = ()  # busy intervals since the last report
    error: str = ""
    capacity_tokens: int = 0  # KV capacity; 0 if the engine does not tell
    promised_tokens: int = 0  # of which the ledger has promised to tasks
    free_tokens: int = 0  # that it could still promise: less than the rest, by headroom and pressure
    demand_s: float = 0.0  # seconds, each times what tasks want of what may be promised, total
    resident: int = 0  # tasks that hold a place
    parked: int = 0  # tasks that lost it and will ask again
    queued: int = 0  # tasks that wait for a place
    starved_s: float = 0.0  # seconds with nothing to do, total: the raw material of RWT
    preemptions: int = 0  # times that the engine took a running request's memory, total
    parks: int = 0  # times that a task lost its place, total
    resumes: int = 0  # times that one that had lost it got a place here again, total
    moved: int = 0  # times that a waiting task was sent to another generator, total


class Published(Record, frozen=True):
    """The feeder tells the controller about new weights."""

    weights: Weights
    step: int
    publish_s: float = 0.0


class RankRow(Record, frozen=True, array_like=True):
    """One rank and its lease: ``role`` is generator, scorer, learner, or spare (no role yet)."""

    rank: int
    role: str
    node: str = ""  # Ray node id
    lost: bool = False  # its node is gone; the number stays


class Roles(Record, frozen=True):
    """The role map of one epoch; an order that carries an older epoch is refused."""

    epoch: int
    ranks: tuple[RankRow, ...] = ()
    awaited: bool = False  # nobody generates until a learner does: the loop should ask for the barrier again


class Move(Record, frozen=True):
    """One rank changes its role. Journalled before it begins."""

    id: int
    epoch: int
    rank: int
    source: str
    target: str
    reason: str = ""
    predicted_s: float = 0.0  # saving per step
    cost_s: float = 0.0  # what the switch is expected to take


class Barrier(Record, frozen=True):
    """The controller's answer at the sync barrier (after the step, before publishing)."""

    roles: Roles
    move: Move | None = None  # the loop makes this one if it touches learners, then says ``Moved``
    scoring: str = "decoupled"  # or colocated, for the next batch
    groups: int = 0  # smallest batch of the next step; 0: run.groups_per_step


class Moved(Record, frozen=True):
    """How a move ended; ``parts`` are seconds by name (gather, regroup, reshard, load ...)."""

    move: int
    ok: bool
    parts: dict[str, float] = {}
    error: str = ""


class Wanted(Record, frozen=True):
    """What the driver should keep running: actors by name, created once and then kept."""

    epoch: int
    actors: tuple[str, ...] = ()
    workers: int = 0
    ranks: int = 0  # ranks that the job should own
