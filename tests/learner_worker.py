"""One rank of a learner group in a process of its own: ``rank world port model folder job``."""

import dataclasses
import json
import os
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from learner.batch import pack
from learner.step import LearnerRank
from tests.learner_tiny import make_config, make_samples, with_behaviour

REDUCTIONS = ("token_mean", "sequence_mean", "constant")


def batches(path: Path, world: int, rank: int) -> dict:
    samples, advantage = make_samples()
    samples = with_behaviour(path, samples, noise=0.2)
    blank = [dataclasses.replace(s, mask=np.zeros(len(s.ids), bool)) for s in samples]
    lone = [samples[0], *blank[1:]]  # every other sample is masked, so one rank has nothing to train
    cases = {name: (samples, name) for name in REDUCTIONS}
    cases |= {"one_rank_masked": (lone, "token_mean"), "blank": (blank, "token_mean")}
    return {
        case: pack(chosen, advantage, 64, world, 2, reduction, 8.0).ranks[rank]
        for case, (chosen, reduction) in cases.items()
    }


def parity(learner: LearnerRank, path: Path, folder: Path) -> dict:
    """Steps on each case with a fresh gradient; rank 0 stores the gradients."""
    metrics = {}
    place, optimizer = learner.joined()
    for case, batch in batches(path, place.world, place.rank).items():
        optimizer.zero_grad(set_to_none=True)
        learner._accumulate(batch, None, place)
        named = dict(learner.model.named_parameters())
        found = {n: p.grad.full_tensor() if p.grad is not None else torch.zeros(1) for n, p in named.items()}
        if place.rank == 0:
            torch.save(found, folder / f"{case}-{place.world}.pt")
        kept = {n: p.detach().clone() for n, p in named.items()}
        moments = {p: {k: v.clone() for k, v in optimizer.state[p].items()} for p in named.values()}
        metrics[case] = learner.step(batch, learner.version + 1).metrics
        with torch.no_grad():  # undo, so that the cases do not build on each other
            for name, parameter in named.items():
                parameter.copy_(kept[name])
                optimizer.state[parameter] = moments[parameter]
    return {"metrics": metrics}


def chain(learner: LearnerRank, path: Path, folder: Path) -> dict:
    """Load the newest checkpoint if there is one, save it again, then step twice."""
    from learner.checkpoint import tensors_of
    from learner.manifest import latest_valid

    world, rank = learner.world, learner.rank
    newest = latest_valid(folder / "checkpoints")
    extra = learner.load(str(newest)) if newest else {}
    batch = batches(path, world, rank)["token_mean"]
    if newest is None:
        learner.step(batch, 1)
    _, optimizer = learner.joined()
    found = tensors_of(learner.model, optimizer)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    if rank == 0:
        torch.save(full, folder / f"state-{extra.get('count', 0)}.pt")
    empty = sum(hasattr(t, "to_local") and not t.to_local().numel() for t in found.values())
    learner.save(str(folder / "checkpoints"), {"count": extra.get("count", 0) + 1}, export=False)
    return {"version": learner.version, "extra": extra, "empty": empty}


def hand(learner: LearnerRank, path: Path, folder: Path) -> dict:
    """Adopt what an earlier world gathered, or make the first step; gather for the next; step once more."""
    from learner.checkpoint import tensors_of

    world, rank = learner.world, learner.rank
    number = len(list(folder.glob("parts-*.pt")))
    batch = batches(path, world, rank)["token_mean"]
    if number:
        earlier = torch.load(folder / f"parts-{number - 1}.pt", weights_only=False)
        learner.adopt(earlier["version"], earlier["skipped"], earlier["random"], earlier["parts"])
    else:
        learner.skipped = 2
        learner.step(batch, 1)
    drawn = [random.random(), float(np.random.random()), torch.rand(1).item()]
    gathered = learner.gather()
    (folder / f"random-{number}-{rank}").write_bytes(gathered.random)
    _, optimizer = learner.joined()
    found = tensors_of(learner.model, optimizer)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    empty = sum(hasattr(t, "to_local") and not t.to_local().numel() for t in found.values())
    torch.distributed.barrier()
    if rank == 0:
        assert gathered.parts and gathered.nbytes == sum(t.numel() * 4 for t in full.values())
        torch.save(full, folder / f"full-{number}.pt")
        told = [(folder / f"random-{number}-{r}").read_bytes() for r in range(world)]
        parts = [learner.part(i) for i in range(gathered.parts)]
        torch.save(
            {"version": gathered.version, "skipped": gathered.skipped, "random": told, "parts": parts},
            folder / f"parts-{number}.pt",
        )
        (folder / f"drawn-{number}.json").write_text(json.dumps(drawn))
    else:
        assert gathered.parts == 0
    torch.distributed.barrier()
    metrics = learner.step(batch, learner.version + 1).metrics
    return {"version": learner.version, "skipped": learner.skipped, "empty": empty, "metrics": metrics}


JOBS = {"parity": parity, "chain": chain, "hand": hand}


def main() -> None:
    rank, world, port = (int(value) for value in sys.argv[1:4])
    path, folder, job = Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    torch.set_num_threads(1)
    learner = LearnerRank(make_config(path, learner={"ranks": world}), str(path), rank, world, seed=0)
    learner.join("127.0.0.1", port)
    result = JOBS[job](learner, path, folder)
    if rank == world - 1:  # the last rank: metrics must be global, not rank 0's own
        (folder / f"{job}-{world}.json").write_text(json.dumps(result))
    learner.leave()
    # As a rank's actor does: torch's caches keep the process group's threads alive, and one that still drops
    # its last tensor while the interpreter is torn down would abort a process that has done its work.
    os._exit(0)


if __name__ == "__main__":
    main()
