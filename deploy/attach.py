"""A second process's hold on a running job: its controller, by the address in the run folder."""

import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from cluster.errors import ConfigError
from deploy.local import join

CALL_DEADLINE_S = 60.0
RETRY_S = 0.5


class RunningJob:
    """``deploy.scale.Operator`` over Ray."""

    def __init__(self, controller: Any) -> None:
        self._controller = controller

    def status(self) -> dict[str, Any]:
        """See ``Controller.status``."""
        status: dict[str, Any] = self._ask("status")
        return status

    def scale(self, counts: Mapping[str, int]) -> dict[str, Any]:
        """See ``Controller.scale``. Raises ConfigError."""
        plan: dict[str, Any] = self._ask("scale", **counts)
        return plan

    def close(self) -> None:
        """Leave the cluster; nothing of the job is touched."""
        ray.shutdown()

    def _ask(self, method: str, **arguments: Any) -> Any:
        deadline = time.monotonic() + CALL_DEADLINE_S
        while True:
            try:
                return self._ask_once(method, arguments, max(1.0, deadline - time.monotonic()))
            except ActorUnavailableError as error:  # it is being restarted
                if time.monotonic() > deadline:
                    raise ConfigError("the job's controller does not come back") from error
                time.sleep(RETRY_S)

    def _ask_once(self, method: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        try:
            return ray.get(getattr(self._controller, method).remote(**arguments), timeout=timeout_s)
        except ActorUnavailableError:
            raise
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ConfigError):
                raise ConfigError(str(cause)) from error
            raise ConfigError(f"the controller refused: {type(cause).__name__}: {cause}") from error
        except RayActorError as error:
            raise ConfigError("the job has ended") from error
        except GetTimeoutError as error:
            raise ConfigError(f"the job's controller does not answer within {timeout_s:.0f} s") from error


def attach(place: Mapping[str, str]) -> RunningJob:
    """Connect to the job at ``address`` and ``namespace``. Raises ConfigError."""
    join(place["address"], {"namespace": place["namespace"], "log_to_driver": False,
                            "logging_level": "ERROR", "configure_logging": True})  # fmt: skip
    try:
        return RunningJob(ray.get_actor("controller"))
    except ValueError as error:
        ray.shutdown()
        raise ConfigError(f"no job runs at {place['address']} any more ({place['namespace']})") from error
