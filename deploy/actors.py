"""The job's actors: how each is made, where it is placed, how it is ended.

Names say what an actor is: ``generator-1``, ``learner-0``, ``scorer-0`` (one of each for every rank,
made when wanted), ``worker-3``, ``controller``, ``feeder``. A name may come back as another actor after its
node was lost or it was given up.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from actors.remote import RemoteEnvWorker, RemoteGeneratorActor
from cluster.config import Config, dump
from cluster.processes import VARIABLE as PID_VARIABLE
from cluster.roles import ROLES, member_name
from deploy.paths import RunFolder
from deploy.placement import Seats
from deploy.remote import RemoteController
from deploy.supervise import ComponentFailed, Supervisor, kill
from learner.drive.remote import RemoteFeeder

NAME_FREE_S = 30.0
"""What Ray may take to free the name of an actor that was ended."""
CLOSE_S = 10.0
WORKER_GRACE_S = 45.0
"""Groups in flight may end for 30 s (``Worker.stop``), then they are ordered again elsewhere."""


def starting_names(config: Config) -> list[str]:
    """Members of the ranks that the job starts with, by their first roles; index = rank."""
    counts = (("learner", config.learner.ranks), ("generator", config.generator.replicas),
              ("scorer", config.scorer.replicas))  # fmt: skip
    return [f"{role}-{i}" for role, count in counts for i in range(count)]


def worker_names(count: int) -> list[str]:
    """``worker-0`` ..."""
    return [f"worker-{i}" for i in range(count)]


def actor_classes(config: Config) -> dict[str, Any]:
    """Who learns and who scores: the real ones, or their timed twins when ``twin.profile`` is set."""
    # Imported here: the real ones bring torch, which a job of twins never loads.
    if config.twin.profile:
        from learner.twins.remote import RemoteLearnerTwin, RemoteScorerTwin

        return {"learner": RemoteLearnerTwin, "scorer": RemoteScorerTwin}
    from learner.remote import RemoteLearner, RemoteScorer

    return {"learner": RemoteLearner, "scorer": RemoteScorer}


class Actors:
    """Makes and ends actors; ``handles`` has those that exist, by name."""

    def __init__(self, config: Config, folder: RunFolder, model: Path, url: str, session: str) -> None:
        self.config = config
        self.folder = folder
        self.model = str(model)
        self.url = url
        self.session = session
        self.tree = dump(config)
        self.classes = actor_classes(config)
        self.seats: Seats | None = None
        self.handles: dict[str, Any] = {}

    def make(self, name: str) -> Any:
        """Create an actor on its seat; Ray restarts its process under the same handle."""
        role = name.partition("-")[0]
        threads = {"generator": self.config.generator.threads, "learner": self.config.learner.threads,
                   "scorer": self.config.scorer.threads}  # fmt: skip
        variables = {
            "OMP_NUM_THREADS": str(threads.get(role, 1)),
            PID_VARIABLE: str(self.folder.pids / name),
        }
        kind, arguments = self._made_of(name)
        handle = kind.options(
            name=name, max_restarts=-1, runtime_env={"env_vars": variables}, **self._lease(name)
        ).remote(*arguments)
        self.handles[name] = handle
        return handle

    async def make_again(self, name: str) -> Any:
        """``make`` for a name that another actor may have had until just now. Raises ComponentFailed."""
        deadline = time.monotonic() + NAME_FREE_S
        while True:
            try:
                return await asyncio.to_thread(self.make, name)
            except ValueError as error:  # "The name ... is already taken"
                if time.monotonic() > deadline:
                    raise ComponentFailed(f"{name} cannot be created: {error}") from error
                await asyncio.sleep(0.3)

    def _lease(self, name: str) -> dict[str, Any]:
        assert self.seats is not None, "seats are reserved first"
        if name in ("controller", "feeder"):
            return self.seats.beside_driver()
        return self.seats.lease(name if name.startswith("worker-") else self.rank(name))

    def rank(self, name: str) -> int:
        """The rank that a member lives on. Raises ValueError for a name that no seat has."""
        assert self.seats is not None
        role = name.partition("-")[0]
        if role in ROLES:
            for rank in self.seats.ranks():
                if member_name(role, rank, self.config) == name:
                    return rank
        raise ValueError(f"{name} has no rank among {sorted(self.seats.ranks())}")

    def members(self, rank: int) -> list[str]:
        """Existing actors of a rank."""
        names = [member_name(role, rank, self.config) for role in ROLES]
        return [name for name in names if name in self.handles]

    def _made_of(self, name: str) -> tuple[Any, tuple[Any, ...]]:
        """The actor's class and what it is made with."""
        tree, model, folder, run = self.tree, self.model, self.folder, self.folder.run_id
        role, _, index = name.partition("-")
        if role == "generator":
            return RemoteGeneratorActor, (tree, model, name, int(index))
        if role == "learner":
            return self.classes[role], (tree, model, int(index), run, str(folder.weights))
        if role == "scorer":
            return self.classes[role], (tree, model)
        if role == "worker":
            return RemoteEnvWorker, (tree, model, name, self.url, run, str(folder.workers))
        if role == "controller":
            return RemoteController, (tree, self.url, str(folder.path), self.session)
        paths = {"run": folder.path, "trace": folder.trace, "checkpoints": folder.checkpoints,
                 "metrics": folder.metrics, "record": folder.record}  # fmt: skip
        return RemoteFeeder, (tree, self.url, {k: str(p) for k, p in paths.items()})

    # -- the end of an actor ------------------------------------------------------------

    async def end(self, name: str, supervisor: Supervisor) -> None:
        """End one that is wanted no more, in good order: a worker's groups end or are ordered again."""
        handle = self.handles.pop(name)
        if name.startswith("generator-"):
            await supervisor.retire(name, handle.close.remote, CLOSE_S)
        elif name.startswith("worker-"):
            await supervisor.retire(name, handle.stop.remote, WORKER_GRACE_S)
        supervisor.forget(name)
        kill([handle])

    def drop(self, name: str, supervisor: Supervisor) -> None:
        """Forget one whose node is gone."""
        supervisor.forget(name)
        kill([self.handles.pop(name)])

    async def end_all(self, deadline_s: float) -> None:
        """End every actor, engines and workers in good order as far as ``deadline_s`` allows."""
        with contextlib.suppress(Exception):  # what is gone already need not be told so
            closing = [h.close.remote() for n, h in self.handles.items() if n.startswith("generator")]
            closing += [h.stop.remote() for n, h in self.handles.items() if n.startswith("worker")]
            async with asyncio.timeout(deadline_s):
                await asyncio.gather(*closing, return_exceptions=True)
        for handle in self.handles.values():
            with contextlib.suppress(Exception):
                kill([handle])
        self.handles.clear()
