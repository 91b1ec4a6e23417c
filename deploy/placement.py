"""Where ranks and env workers live: bundles of placement groups, several actors to a rank.

``plan`` is pure: it deals ranks and workers to nodes. A bundle is one device slot (a GPU with a core on a
CUDA cluster, a core elsewhere) or one worker's core. Every Ray node has placement groups of its own, so that
nodes come and go one by one; what is added to a node later gets a further group there. Nodes are told apart
by Ray's node id, since several Ray nodes of one machine share its address.

The bundle reserves the rank; the actors on it (generator, learner, scorer: one serves, the others
are resident and idle) reserve nothing more on a CPU, and on CUDA a fraction of the rank's GPU each, by
which Ray shows all of them the same device.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from cluster.errors import ConfigError

READY_DEADLINE_S = 60.0
NODE_LABEL = "ray.io/node-id"
GPU_SHARE = 0.25
"""Of its rank's GPU, for each role's actor; three of them fit."""
FREE_WAIT_S = 15.0
"""Seats of a job that has just ended in the same cluster may take this long to be free again."""
HOME_CORES = 2
"""Kept free on the driver's node: the controller and the feeder run there."""


@dataclass(frozen=True)
class Node:
    """One Ray node and what is free on it: device slots, and cores that no device slot takes."""

    id: str
    slots: int
    cores: int = 0
    address: str = ""


@dataclass(frozen=True)
class Seat:
    """Where one rank or worker lives. ``name`` is the rank's number or the worker's name."""

    name: int | str
    node: str


def plan(ranks: Sequence[int], workers: Sequence[str], nodes: Sequence[Node], gpus: bool) -> list[Seat]:
    """Deal ranks to nodes, fullest node first, in the order given (learners stay together), then workers.

    ``nodes[0]`` is the driver's: workers go there first, and it comes first among nodes as full. On a CPU
    cluster a worker takes a core that a rank could have had; on CUDA a core beside the devices.

    Raises ConfigError naming how many slots or cores are missing.
    """
    spare = dict(_worker_cores(len(workers), nodes, gpus))
    slots = {n.id: n.slots if gpus else n.slots - spare[n.id] for n in nodes}
    total = sum(slots.values())
    if total < len(ranks):
        kept = "" if gpus or not workers else f" beside {len(workers)} env workers"
        raise ConfigError(
            f"the job needs {len(ranks)} ranks (generator.replicas + learner.ranks + scorer.replicas), "
            f"the cluster has {total} free slots on {len(nodes)} nodes{kept}"
        )
    seats: list[Seat] = []
    waiting = list(ranks)
    for node in sorted(nodes, key=lambda n: -slots[n.id]):
        here, waiting = waiting[: slots[node.id]], waiting[slots[node.id] :]
        seats += [Seat(rank, node.id) for rank in here]
    left = list(workers)
    for node in nodes:
        here_too, left = left[: spare[node.id]], left[spare[node.id] :]
        seats += [Seat(name, node.id) for name in here_too]
    return seats


def _worker_cores(workers: int, nodes: Sequence[Node], gpus: bool) -> list[tuple[str, int]]:
    """How many of the workers each node takes, the driver's first. Raises ConfigError."""
    dealt = []
    left = workers
    for node in nodes:
        here = min(left, node.cores if gpus else node.slots)
        left -= here
        dealt.append((node.id, here))
    if left:
        raise ConfigError(f"env.workers = {workers}: the cluster has {workers - left} free cores for them")
    return dealt


def nodes_of(
    cluster: Sequence[Mapping[str, Any]],
    gpus: bool,
    home: str = "",
    free: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Node]:
    """Living nodes from ``ray.nodes()``, the driver's (``home``) first.

    ``free`` has each node's free resources, as far as known; without it a node counts whole.
    """
    found = []
    for entry in cluster:
        if not entry["Alive"]:
            continue
        name = str(entry["NodeID"])
        resources = entry["Resources"] if free is None else free.get(name, {})
        cores = int(resources.get("CPU", 0))
        if name == home:
            cores = max(0, cores - HOME_CORES)
        devices = int(resources.get("GPU", 0))
        slots = min(devices, cores) if gpus else cores
        found.append(Node(name, slots, cores - slots if gpus else 0, str(entry["NodeManagerAddress"])))
    return sorted(found, key=lambda node: node.id != home)


class Seats:
    """The reserved ranks and workers of a job. Not for several tasks at once."""

    def __init__(self, gpus: bool) -> None:
        self.gpus = gpus
        self.home = str(ray.get_runtime_context().get_node_id())
        self.seats: dict[int | str, Seat] = {}
        self._bundles: dict[int | str, tuple[PlacementGroup, int]] = {}

    def nodes(self, now_free: bool = False) -> list[Node]:
        """Living nodes of the cluster: whole, or with what is free on them now."""
        return nodes_of(
            ray.nodes(), self.gpus, self.home, available_resources_per_node() if now_free else None
        )

    def ranks(self) -> dict[int, str]:
        """Node id by rank."""
        return {name: seat.node for name, seat in self.seats.items() if isinstance(name, int)}

    def reserve(self, seats: Sequence[Seat], deadline_s: float = READY_DEADLINE_S) -> list[str]:
        """Reserve seats, one group a node. Returns the nodes that did not grant theirs in time."""
        asked: dict[str, tuple[PlacementGroup, list[Seat]]] = {}
        for node in dict.fromkeys(seat.node for seat in seats):
            here = [seat for seat in seats if seat.node == node]
            bundles = [self._bundle(seat) for seat in here]
            where = [{NODE_LABEL: node}] * len(bundles)
            asked[node] = placement_group(bundles, strategy="PACK", bundle_label_selector=where), here
        refused = []
        for node, (group, here) in asked.items():
            if group.wait(deadline_s):
                for index, seat in enumerate(here):
                    self.seats[seat.name], self._bundles[seat.name] = seat, (group, index)
            else:
                remove_placement_group(group)
                refused.append(node)
        return refused

    def _bundle(self, seat: Seat) -> dict[str, float]:
        device = self.gpus and isinstance(seat.name, int)
        return {"CPU": 1.0, "GPU": 1.0} if device else {"CPU": 1.0}

    def give_up(self, names: Sequence[int | str]) -> None:
        """Forget these seats; a group none of whose bundles is used any more is given back."""
        groups = {id(group): group for name in names if name in self._bundles
                  for group, _ in [self._bundles[name]]}  # fmt: skip
        for name in names:
            self.seats.pop(name, None)
            self._bundles.pop(name, None)
        kept = {id(group) for group, _ in self._bundles.values()}
        for key, group in groups.items():
            if key not in kept:
                remove_placement_group(group)

    def release(self) -> None:
        """Give everything back; whatever still runs there ends."""
        self.give_up(list(self.seats))

    def lease(self, name: int | str) -> dict[str, Any]:
        """Ray options that place an actor on the seat, or beside the driver if there is no such seat."""
        if name not in self._bundles:
            return self.beside_driver()
        group, bundle = self._bundles[name]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        )
        device = self.gpus and isinstance(name, int)
        options: dict[str, Any] = {"scheduling_strategy": strategy, "num_cpus": 0}
        return options | ({"num_gpus": GPU_SHARE} if device else {})

    def beside_driver(self) -> dict[str, Any]:
        """Ray options that keep an actor on the driver's node, so that losing another never takes it."""
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(self.home, soft=False), "num_cpus": 0}


async def seat_all(seats: Seats, ranks: Sequence[int], workers: Sequence[str], one_machine: bool) -> None:
    """Reserve what a job starts with; ``one_machine``: weights are published in the memory of one.

    Raises ConfigError when the cluster has not enough, or the ranks would lie on several machines.
    """
    deadline = time.monotonic() + FREE_WAIT_S
    while True:
        plan(ranks, workers, whole := seats.nodes(), seats.gpus)  # can it ever fit?
        try:
            planned = plan(ranks, workers, await asyncio.to_thread(seats.nodes, True), seats.gpus)
            break
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)
    machines = {node.address for node in whole if node.id in {seat.node for seat in planned}}
    if len(machines) > 1 and one_machine:
        raise ConfigError(
            f"the ranks lie on {len(machines)} machines, and weights are published in the "
            "memory of one: set cluster.weights_folder to a folder that all of them share"
        )
    if refused := await asyncio.to_thread(seats.reserve, planned):
        raise ConfigError(f"node {refused[0]} did not grant its seats within {READY_DEADLINE_S:.0f} s")
