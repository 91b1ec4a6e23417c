"""A second process's hold on a running job: its controller, by the address in the run folder."""

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from cluster.errors import ConfigError
from deploy.local import join

CALL_DEADLINE_S = 60.0


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
        try:
            return ray.get(getattr(self._controller, method).remote(**arguments), timeout=CALL_DEADLINE_S)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, ConfigError):
                raise ConfigError(str(cause)) from error
            raise ConfigError(f"the controller refused: {type(cause).__name__}: {cause}") from error
        except (RayActorError, GetTimeoutError) as error:
            raise ConfigError(f"the job's controller does not answer: {type(error).__name__}") from error


def attach(place: Mapping[str, str]) -> RunningJob:
    """Connect to the job at ``address`` and ``namespace``. Raises ConfigError."""
    join(place["address"], {"namespace": place["namespace"], "log_to_driver": False,
                            "logging_level": "ERROR", "configure_logging": True})  # fmt: skip
    try:
        return RunningJob(ray.get_actor("controller"))
    except ValueError as error:
        ray.shutdown()
        raise ConfigError(f"no job runs at {place['address']} any more ({place['namespace']})") from error
