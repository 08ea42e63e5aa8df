"""Checks the user's `ray_options`, without importing Ray."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping
from typing import Any

# What actors are made with is the engine's business: it replaces those that
# die, and keeps their requests in order.
_OURS = (
    "concurrency_groups",
    "get_if_exists",
    "lifetime",
    "max_concurrency",
    "max_pending_calls",
    "max_restarts",
    "max_task_retries",
    "name",
    "num_returns",
)


_TIMEOUT_S = 60.0


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked content of `ray_options`.

    Raises:
        TypeError: An option is of the wrong type.
        ValueError: An option that cannot be had.
    """

    # Arguments of `ray.init`.
    init: dict[str, Any] = dataclasses.field(default_factory=dict)
    # Arguments of each actor's `options`.
    actor: dict[str, Any] = dataclasses.field(default_factory=dict)
    # How long joining may take, and the first worker's place.
    timeout_s: float = _TIMEOUT_S

    @property
    def runtime_env(self) -> dict[str, Any]:
        """The runtime environment that the user asks for."""
        return {
            **(self.init.get("runtime_env") or {}),
            **(self.actor.get("runtime_env") or {}),
        }

    @staticmethod
    def of(given: Any) -> Options:
        """Checks the user's `ray_options`, and returns them as `Options`."""
        if given is None:
            return Options()
        if not isinstance(given, Mapping) or not all(
            isinstance(name, str) for name in given
        ):
            raise TypeError(
                "`ray_options` must be a dict, such as {'address': "
                f"'10.0.0.1:6379', 'num_cpus': 1}}. Received: {given!r}"
            )
        actor = dict(given)
        init = actor.pop("init", {})
        if not isinstance(init, Mapping):
            raise TypeError(
                "`ray_options['init']` must be a dict of arguments of "
                f"`ray.init`. Received: {init!r}"
            )
        init = dict(init)
        if "address" in actor:
            init["address"] = _address(actor.pop("address"))
        timeout_s = _seconds(actor.pop("timeout_s", _TIMEOUT_S))
        for name in _OURS:
            if name in actor:
                raise ValueError(
                    f"`ray_options[{name!r}]` is not the user's to set: dead "
                    "workers are replaced as `max_worker_restarts` says, and "
                    "each builds one batch at a time."
                )
        return Options(init, actor, timeout_s)


def _address(address: Any) -> str | None:
    if address is not None and not isinstance(address, str):
        raise TypeError(
            "`ray_options['address']` must be a string, such as "
            f"'10.0.0.1:6379', or None. Received: {address!r}"
        )
    if address is not None and address.startswith("ray://"):
        raise ValueError(
            f"`ray_options['address']={address!r}` is that of a proxy (Ray "
            "Client), through which every batch would be copied. Run the "
            "training on a node of the cluster, and leave the address out, "
            "or give 'host:port' of its head node (6379 as a rule)."
        )
    return address


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            "`ray_options['timeout_s']` must be a number of seconds. "
            f"Received: {value!r}"
        )
    seconds = float(value)
    if not seconds > 0:
        raise ValueError(
            "`ray_options['timeout_s']` must be more than 0. "
            f"Received: {value!r}"
        )
    return seconds
