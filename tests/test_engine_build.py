"""How an engine's process is started, without an engine."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from actors.engine_build import deaf

REPO = Path(__file__).resolve().parent.parent
TERMS = """
import signal
from actors.engine_build import deaf
with deaf():
    assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "a fresh process has no tracker yet"
assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def start(quiet: bool) -> BaseProcess:
    """A child of the kind that vLLM starts, from a thread as an engine is built."""
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60.0,))
    if quiet:
        with deaf():
            child.start()
    else:
        child.start()
    return child


@pytest.mark.parametrize("quiet", [True, False])
def test_ctrl_c_does_not_reach_a_child_that_is_starting(quiet: bool) -> None:
    with ThreadPoolExecutor(1) as builder:
        child = builder.submit(start, quiet).result(30.0)
        allowed = builder.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result(30.0)
    assert signal.SIGINT not in allowed, "the builder's thread hears it again"
    try:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)
        child.join(1.0 if quiet else 30.0)
        assert child.is_alive() is quiet
    finally:
        child.kill()
        child.join(30.0)


def test_the_helper_of_multiprocessing_does_not_let_it_through_again() -> None:
    subprocess.run([sys.executable, "-c", TERMS], cwd=REPO, check=True, timeout=150.0)


QUIET = """
from cluster.config import GeneratorConfig
from actors.engine_build import _set_environment
_set_environment(GeneratorConfig())
import vllm.triton_utils
"""


@pytest.mark.vllm
@pytest.mark.timeout(180)
def test_the_library_says_nothing_while_it_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], cwd=REPO, check=True, timeout=150.0, capture_output=True, text=True
    )
    assert "Triton" not in done.stdout + done.stderr
