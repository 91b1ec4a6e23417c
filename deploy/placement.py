"""Where ranks live: a placement group per node reserves them once; roles are leases over bundles.

``plan`` is pure: it deals the job's ranks to nodes. A bundle is one device slot: a GPU with a
core on a CUDA cluster, a core elsewhere.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cluster.errors import ConfigError

READY_DEADLINE_S = 60.0


@dataclass(frozen=True)
class Node:
    """One machine of the cluster and the device slots that are free on it."""

    address: str
    slots: int


@dataclass(frozen=True)
class Seat:
    """Where one rank lives: bundle ``bundle`` of the placement group of node ``address``."""

    rank: str
    address: str
    bundle: int


def plan(ranks: Sequence[str], nodes: Sequence[Node]) -> list[Seat]:
    """Deal ranks to nodes, fullest node first, in the order given (learners stay together).

    Raises ConfigError naming how many slots are missing.
    """
    total = sum(node.slots for node in nodes)
    if total < len(ranks):
        raise ConfigError(
            f"the job needs {len(ranks)} ranks (generator.replicas + learner.ranks + scorer.replicas), "
            f"the cluster has {total} free slots on {len(nodes)} nodes"
        )
    seats: list[Seat] = []
    waiting = list(ranks)
    for node in sorted(nodes, key=lambda n: (-n.slots, n.address)):
        here, waiting = waiting[: node.slots], waiting[node.slots :]
        seats += [Seat(rank, node.address, i) for i, rank in enumerate(here)]
    return seats


def nodes_of(cluster: Sequence[Mapping[str, Any]], gpus: bool, reserved: int) -> list[Node]:
    """Nodes from ``ray.nodes()``; ``reserved`` cores of the cluster are kept for CPU actors."""
    found = []
    for entry in cluster:
        if not entry["Alive"]:
            continue
        resources = entry["Resources"]
        slots = int(resources.get("GPU" if gpus else "CPU", 0))
        kept = 0 if gpus else min(slots, reserved)
        reserved -= kept
        found.append(Node(entry["NodeManagerAddress"], slots - kept))
    return found


class Ranks:
    """The reserved ranks of a job."""

    def __init__(self, ranks: Sequence[str], gpus: bool, reserved: int) -> None:
        self.gpus = gpus
        self.seats = {seat.rank: seat for seat in plan(ranks, nodes_of(ray.nodes(), gpus, reserved))}
        self.groups: dict[str, PlacementGroup] = {}
        for address in sorted({seat.address for seat in self.seats.values()}):
            count = sum(seat.address == address for seat in self.seats.values())
            bundle = {"CPU": 1.0, f"node:{address}": 0.001} | ({"GPU": 1.0} if gpus else {})
            self.groups[address] = placement_group([bundle] * count, strategy="PACK")
        for address, group in self.groups.items():
            if not group.wait(READY_DEADLINE_S):
                self.release()
                raise ConfigError(f"node {address} did not grant its ranks within {READY_DEADLINE_S:.0f} s")

    def release(self) -> None:
        """Give the reserved ranks back; whatever still runs on them ends."""
        for group in self.groups.values():
            remove_placement_group(group)

    def lease(self, rank: str) -> dict[str, Any]:
        """Ray options that place an actor on its rank."""
        seat = self.seats[rank]
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.groups[seat.address], placement_group_bundle_index=seat.bundle
        )
        options: dict[str, Any] = {"scheduling_strategy": strategy, "num_cpus": 1}
        return options | ({"num_gpus": 1} if self.gpus else {})
