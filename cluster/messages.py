"""Messages between the controller and the actors: records only, one place, no behaviour."""

from cluster.types import Order, Record, Weights


class GeneratorRow(Record, frozen=True, array_like=True):
    """One line of the generator table."""

    name: str
    healthy: bool
    version: int


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
    sync_s: float = 0.0  # seconds paused for weight updates, total
    busy: tuple[tuple[float, float], ...] = ()  # busy intervals since the last report
    error: str = ""


class Published(Record, frozen=True):
    """The feeder tells the controller about new weights."""

    weights: Weights
    step: int
    publish_s: float = 0.0
