"""The composition root: ``springtide train`` from recipe to summary.

The driver starts the queue server and Ray, creates every actor (so that it owns them), watches
them, shows the run, and takes everything down again, whatever happened. It decides nothing about
training.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace

from cluster import codec
from cluster.config import Config
from cluster.errors import ConfigError
from cluster.metrics import read_steps
from cluster.processes import announce, record
from cluster.stream import RedisQueue
from cluster.trace import Trace
from cluster.types import Weights
from cluster.valkey import ValkeyServer
from deploy import local, signals, watchdog
from deploy.actors import Actors, starting_names, worker_names
from deploy.advice import Advice
from deploy.cpu import CpuMeter
from deploy.leftovers import end_leftovers, remove_leftovers
from deploy.nodes import Keeper
from deploy.paths import RunFolder, temporary_root
from deploy.placement import Node, Seats, seat_all
from deploy.report import write_report
from deploy.signals import Stopper, bounded, cancelled, settled
from deploy.suites import Suites
from deploy.summary import closing_rows, summarise_run
from deploy.supervise import ComponentFailed, Supervisor, answer
from deploy.view import View, view_status
from learner.manifest import checkpoints, step_of

REPO = Path(__file__).resolve().parent.parent
STATUS_EVERY_S = 0.5
STOP_DEADLINE_S = 8.0
ANSWER_DEADLINE_S = 90.0


def train(
    config: Config, folder: RunFolder, model: Path, view: View, stopper: Stopper | None = None
) -> dict[str, Any]:
    """Run the job in this process; returns the summary.

    Raises SpringtideError with one clear cause, CancelledError after Ctrl-C or SIGTERM.
    """
    stopper = stopper or Stopper()
    job = Job(config, folder, model, view)
    job.restore_signals = stopper.install  # Ray's own handlers replace ours
    return signals.run(stopper.run(job.run()))


class Job:
    """One run of the job: its processes and their order."""

    def __init__(self, config: Config, folder: RunFolder, model: Path, view: View) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.view = view
        self.began = time.time()
        self.trace = Trace(folder.trace, "driver")
        self.server: ValkeyServer | None = None
        self.actors: Actors | None = None
        self.advice = Advice(config.reward.weights)
        self.suites = Suites(config.eval, folder, view, self._ask)
        self.watchdog: subprocess.Popen[bytes] | None = None
        self.restore_signals: Any = lambda: None

    async def run(self) -> dict[str, Any]:
        """Start, train, evaluate, summarise; take everything down on every path."""
        await asyncio.to_thread(end_leftovers, self.folder.pids)
        await asyncio.to_thread(remove_leftovers)
        announce(self.folder.pids / "driver")
        self.trace("job_start", {})
        root = temporary_root()
        if root != Path(tempfile.gettempdir()):
            self.view.note(f"{tempfile.gettempdir()} is too long for the names of sockets: Ray uses {root}")
        temporary_folders = root / f"springtide-ray-{os.getpid()}-*"
        self.watchdog = watchdog.start([str(temporary_folders), str(self.folder.weights)])
        temporary: Path | None = None
        supervisor: Supervisor | None = None
        try:
            with self.view.phase("starting the queue"):
                url, resumed = await self._start_queue()
            with self.view.phase("starting Ray"):
                ours = local.start(self.config, self._namespace(), self._slots(), REPO)
                temporary = ours.folder if ours else None
                self.restore_signals()
                self._check_reach()
                self.folder.write_job(local.place(self._namespace()))
            if ours and ours.dashboard:
                self.view.note(f"Ray dashboard: http://{ours.dashboard}")
            supervisor = Supervisor(self._event, self.config.generator.max_restarts)
            with self.view.phase("starting generators, learners and workers"):
                self.actors = Actors(self.config, self.folder, self.model, url, self._session())
                await self._create(self.actors)
                self._supervise(supervisor, self.actors)
                feeder = self._feeder(supervisor) if resumed else None
                await self._until(supervisor, self._generators_ready())
            await self._until(supervisor, self._train(supervisor, feeder))
            return await self._conclude(url)
        finally:
            await settled(self._stop(supervisor, temporary))

    # -- start --------------------------------------------------------------------------

    def _namespace(self) -> str:
        return self.config.cluster.namespace or self.folder.run_id

    def _session(self) -> str:
        """Differs for every driver: a controller that finds another one's journal starts roles anew."""
        return f"{os.getpid()}-{int(self.began)}"

    def _check_reach(self) -> None:
        """In a cluster of several machines, actors elsewhere cannot reach a server on our loopback."""
        foreign = local.foreign_nodes(ray.nodes()) if self.server is not None else []
        if foreign:
            raise ConfigError(
                f"queue.url is needed: the cluster has nodes on other machines ({', '.join(foreign[:3])}), "
                "and the job's own queue server listens on 127.0.0.1 only"
            )

    def _slots(self) -> int:
        """Logical cores of a local Ray: one a rank, one each for workers, controller and feeder.

        As many more as the machine has, so that a running job can be scaled.
        """
        return len(starting_names(self.config)) + self.config.env.workers + 2 + (os.cpu_count() or 1)

    async def _start_queue(self) -> tuple[str, bool]:
        """Its URL, and whether weights were published before: then the feeder must publish again.

        The files of an earlier driver are gone, so nobody may be told to load them.
        """
        url = self.config.queue.url
        if not url:
            self.server = ValkeyServer(self.folder.queue, fsync=self.config.queue.fsync)
            await settled(asyncio.to_thread(self.server.start))
            url = self.server.url
            self._record_queue(self.server)
        queue = RedisQueue(url, prefix=self.config.queue.prefix, run=self.folder.run_id, deadline_s=5.0)
        try:
            self._note_resumed(await queue.get("version"))
            raw = await queue.get("weights")  # an unreachable server is an error now, not in an actor later
            if raw:
                weights = codec.decode(raw, Weights)
                await queue.put("weights", codec.encode(replace(weights, location="")))
        finally:
            await queue.aclose()
        return url, bool(raw)

    def _note_resumed(self, version: bytes | None) -> None:
        done, newest = int(version or 0), next(iter(checkpoints(self.folder.checkpoints)), None)
        if done:
            again = done - (step_of(newest) if newest else 0)
            begun = newest.name if newest else "the initial weights"
            self.view.note(f"resuming from {begun}" + (f"; {again} steps are made again" if again else ""))

    def _record_queue(self, server: ValkeyServer) -> None:
        if server.pid is not None:
            record(self.folder.pids / "valkey", server.pid)

    async def _create(self, actors: Actors) -> None:
        """Reserve the seats, then make every actor that the job starts with."""
        names, workers = starting_names(self.config), worker_names(self.config.env.workers)
        seats = actors.seats = Seats(gpus=local.gpus() >= len(names))
        one_machine = self.config.cluster.weights_folder == "/dev/shm"
        await settled(seat_all(seats, range(len(names)), workers, one_machine))
        for name in (*names, "controller", *workers, "feeder"):
            actors.make(name)

    def _supervise(self, supervisor: Supervisor, actors: Actors) -> None:
        for name, handle in actors.handles.items():
            if name != "feeder":
                supervisor.watch(name, handle)
        if self.server is not None:
            supervisor.adopt("valkey", self._watch_queue(self.server))
        keeper = Keeper(self.config, actors, supervisor, self._ask, self._event, self._usable)
        supervisor.adopt("nodes", keeper.run())

    def _usable(self, node: Node) -> bool:
        """Ranks may lie on a node that joins: it sees our weights and our queue."""
        shared = self.server is None and self.config.cluster.weights_folder != "/dev/shm"
        return shared or local.ours(node.address)

    def _feeder(self, supervisor: Supervisor) -> asyncio.Future[Any]:
        assert self.actors is not None
        return supervisor.run_to_end("feeder", self.actors.handles["feeder"])

    async def _watch_queue(self, server: ValkeyServer) -> None:
        """The queue server comes back on its own port and data when it dies."""
        while True:
            await asyncio.sleep(0.2)
            if not server.alive:
                self._event("component_died", {"component": "valkey", "cause": "process ended"})
                await settled(asyncio.to_thread(server.restart))
                self._record_queue(server)

    async def _generators_ready(self) -> None:
        deadline = time.monotonic() + self.config.generator.start_timeout_s
        while True:
            status = await self._ask("status")
            if all(healthy for healthy, _, _ in status["generators"].values()):
                return
            if time.monotonic() > deadline:
                raise ComponentFailed(
                    f"generators not ready within generator.start_timeout_s = "
                    f"{self.config.generator.start_timeout_s:.0f} s: {status['generators']}"
                )
            await asyncio.sleep(0.3)

    # -- the run ------------------------------------------------------------------------

    async def _train(self, supervisor: Supervisor, feeder: asyncio.Future[Any] | None) -> None:
        if self.config.eval.before:
            await self.suites.run("before")
        await self._ask("open_admission", True)
        feeder = feeder or self._feeder(supervisor)
        meter = CpuMeter(self.folder.pids)
        shower = asyncio.create_task(self._show())
        try:
            await feeder
        finally:
            shower.cancel()
        for step in await asyncio.to_thread(self._steps):  # a short run may end between two looks
            self._advise(step)
        self.trace("cpu", await asyncio.to_thread(meter.read))
        await self._ask("open_admission", False)
        if self.config.eval.after:
            await self.suites.run("after")

    async def _show(self) -> None:
        """Feed the terminal view; a status that cannot be had is skipped, the supervisor knows why."""
        while True:
            try:
                status = await self._ask("status", deadline_s=5.0)
            except ComponentFailed:
                await asyncio.sleep(STATUS_EVERY_S)
                continue
            self._advise(status["step"])
            self.view.update(view_status(status, self.config))
            await asyncio.sleep(STATUS_EVERY_S)

    def _steps(self) -> list[dict[str, Any]]:
        return read_steps(self.folder.metrics) if self.folder.metrics.exists() else []

    def _advise(self, step: dict[str, Any]) -> None:
        for line in self.advice.look(step):
            self.view.note(line)

    async def _ask(self, method: str, *arguments: Any, deadline_s: float = ANSWER_DEADLINE_S) -> Any:
        assert self.actors is not None
        controller = self.actors.handles["controller"]
        call = getattr(controller, method)
        return await answer("controller", lambda: call.remote(*arguments), deadline_s)

    async def _until(self, supervisor: Supervisor, work: Any) -> None:
        """Await ``work`` unless a component fails for good first."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, supervisor.failed}, return_when=asyncio.FIRST_COMPLETED)
            if supervisor.failed.done():
                supervisor.failed.result()
            await task
        finally:
            await cancelled([task], STOP_DEADLINE_S)

    def _event(self, event: str, fields: dict[str, Any]) -> None:
        self.trace(event, fields)
        if event == "component_died":
            self.view.note(f"{fields['component']} died and is restarted: {fields['cause']}")
        elif event == "node_lost":
            self.view.note(f"node lost: {', '.join(fields['actors']) or 'nothing of ours'} gone with it")
        elif event == "ranks_reserved":
            self.view.note(f"ranks joined: {fields['ranks']}")

    # -- the end ------------------------------------------------------------------------

    async def _conclude(self, url: str) -> dict[str, Any]:
        queue = RedisQueue(url, prefix=self.config.queue.prefix, run=self.folder.run_id)
        try:
            ledger, audit = await queue.ledger(), await queue.audit()
        finally:
            await queue.aclose()
        roles = (await self._ask("status"))["roles"]
        summary = summarise_run(
            self.config, self.folder, ledger, audit, self.suites.results, self.began, roles
        )
        write_report(self.folder.path)
        self.view.finish(closing_rows(summary), title=f"Run {self.folder.run_id}")
        return summary

    async def _stop(self, supervisor: Supervisor | None, temporary: Path | None) -> None:
        """Nothing of the job survives: actors, engines, Ray, the queue, shared memory, temp folder."""
        async with AsyncExitStack() as last_first:  # each step is done, whatever becomes of the others
            last_first.callback(self.trace.close)
            if self.watchdog is not None:
                last_first.push_async_callback(asyncio.to_thread, watchdog.dismiss, self.watchdog)
            last_first.callback(shutil.rmtree, self.folder.pids, ignore_errors=True)
            last_first.callback(self.folder.job.unlink, missing_ok=True)
            last_first.callback(shutil.rmtree, self.folder.weights, ignore_errors=True)
            spare = {self.watchdog.pid} if self.watchdog is not None else set()
            last_first.push_async_callback(asyncio.to_thread, local.stop, temporary, spare)
            if self.server is not None:  # before Ray, which waits for all processes below this one
                last_first.push_async_callback(asyncio.to_thread, self.server.stop)
            last_first.push_async_callback(self._end_actors)
            if supervisor is not None:
                last_first.push_async_callback(self._end_watch, supervisor)
            last_first.callback(self.view.stop)

    async def _end_watch(self, supervisor: Supervisor) -> None:
        for name in await supervisor.stop():
            self.view.note(f"the watch over {name} has not ended; the job is taken down without it")

    async def _end_actors(self) -> None:
        if self.actors is None:
            return
        await self.actors.end_all(STOP_DEADLINE_S)
        if self.actors.seats is not None:
            with contextlib.suppress(Exception):  # what is gone already need not be told so
                await asyncio.to_thread(bounded, self.actors.seats.release, STOP_DEADLINE_S)
