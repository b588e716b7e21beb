"""Own the options that every adapter takes, their defaults and their checks.

Knows nothing of what the options do. Adapters pass them on to ``server.lockstep``.
"""

from __future__ import annotations

import math
import os
import ssl as ssl_module
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_bridges.server.autoreset import AutoresetMode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BridgeOptions", "OnClientLoss", "Verify", "seconds", "whole"]

Space: TypeAlias = "spaces.Space[Any]"

OnClientLoss: TypeAlias = Literal["truncate", "raise"]
"""``"truncate"`` or ``"raise"``; what a step does when an env client goes away."""

Verify: TypeAlias = Literal[False, True, "raise", "warn"]
"""Whether steps are compared with what the envs took and gave, and whether a difference is an error or a warning."""

_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class BridgeOptions:
    """Hold and check the options of a bridge; hand it to ``Lockstep``.

    Attributes:
        num_envs: Slots of the vector environment; None takes the envs of the first client.
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        observation_space: One env's space; None takes the one the client announces, else infers it.
        action_space: One env's space; None takes the one the client announces.
        image_key: Surface only this image of a client that announces no space.
        state_key: Surface only this state of a client that announces no space.
        action_horizon: Actions per env in one exchange.
        timeout: Seconds a vector step or reset may take, and a lost slot may stay vacant.
        connect_timeout: Seconds to wait for the first clients; None waits for ever.
        on_client_loss: ``"truncate"`` ends the lost slots' episodes and waits for a replacement, ``"raise"`` raises.
        episode_log: CSV file with one row per finished episode; an existing one is replaced.
        api_key: Clients must send it; None admits all.
        ssl: Server-side context; None speaks plain ``ws``.
        allowed_origins: Web origins whose pages may connect; none by default.
        ping_interval: Seconds between pings to each client; None sends none.
        ping_timeout: Seconds a client that waits for the trainer may stay silent after a ping; None for ever.
        max_message_bytes: Larger messages close their connection with 1009.
        autoreset_mode: When the trainer sees the episode that follows another.
        verify: Compare each step with what the env took and gave; True or ``"raise"``: a difference is an error;
            ``"warn"``: a warning.

    Raises:
        ValueError: naming the argument, for a value out of its range.
        TypeError: naming the argument, for a value of the wrong type.
    """

    num_envs: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    observation_space: Space | None = None
    action_space: Space | None = None
    image_key: str | None = None
    state_key: str | None = None
    action_horizon: int = 1
    timeout: float = 60.0
    connect_timeout: float | None = 300.0
    on_client_loss: OnClientLoss = "truncate"
    episode_log: str | os.PathLike[str] | None = None
    api_key: str | None = None
    ssl: ssl_module.SSLContext | None = None
    allowed_origins: Sequence[str] = ()
    ping_interval: float | None = 20.0
    ping_timeout: float | None = 20.0
    max_message_bytes: int = 1 << 30
    autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP
    verify: Verify = False

    def __post_init__(self) -> None:
        """Check every value once; nothing re-checks later."""
        if self.num_envs is not None:
            whole("num_envs", self.num_envs, 1, None)
        whole("port", self.port, 0, _MAX_PORT)
        whole("action_horizon", self.action_horizon, 1, None)
        whole("max_message_bytes", self.max_message_bytes, 1024, None)
        seconds("timeout", self.timeout)
        for name in ("connect_timeout", "ping_interval", "ping_timeout"):
            if getattr(self, name) is not None:
                seconds(name, getattr(self, name))
        self._check_types()
        if self.api_key == "":
            raise ValueError("api_key must not be empty; None admits every client")
        if self.on_client_loss not in ("truncate", "raise"):
            raise ValueError(f"on_client_loss must be 'truncate' or 'raise', got {self.on_client_loss!r}")
        self._check_episode_log()
        self._check_verify()

    def _check_types(self) -> None:
        for name in ("observation_space", "action_space"):
            if not isinstance(getattr(self, name), spaces.Space | None):
                raise _wrong_type(name, "a gymnasium space or None", getattr(self, name))
        for name in ("image_key", "state_key", "api_key"):
            if not isinstance(getattr(self, name), str | None):
                raise _wrong_type(name, "a str or None", getattr(self, name))
        if not self.host or not isinstance(self.host, str):
            raise _wrong_type("host", "a host name or address", self.host)
        if not isinstance(self.autoreset_mode, AutoresetMode):
            raise _wrong_type("autoreset_mode", "an AutoresetMode", self.autoreset_mode)
        if not isinstance(self.ssl, ssl_module.SSLContext | None):
            raise _wrong_type("ssl", "an ssl.SSLContext or None", self.ssl)
        # A str is a sequence too, of one-letter origins.
        if not isinstance(self.allowed_origins, (list, tuple)) or not all(
            isinstance(origin, str) for origin in self.allowed_origins
        ):
            raise _wrong_type("allowed_origins", "a sequence of str", self.allowed_origins)

    def _check_episode_log(self) -> None:
        if self.episode_log is None:
            return
        if not isinstance(self.episode_log, str | os.PathLike):
            raise _wrong_type("episode_log", "a path or None", self.episode_log)
        path = Path(self.episode_log)
        if not path.parent.is_dir():
            raise ValueError(f"episode_log: the folder {str(path.parent)!r} does not exist")
        if path.is_dir():
            raise ValueError(f"episode_log: {str(path)!r} is a folder, expected a file name")

    def _check_verify(self) -> None:
        if self.verify not in (False, True, "raise", "warn"):
            raise ValueError(f"verify must be False, True, 'raise' or 'warn', got {self.verify!r}")
        if not self.verify:
            return
        if self.action_horizon > 1:
            raise ValueError(
                f"verify={self.verify!r} compares single steps, and action_horizon={self.action_horizon} makes several "
                "of them at once, which the trainer does not see: use one or the other"
            )
        for name in ("image_key", "state_key"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"verify={self.verify!r} compares whole observations, and {name}={getattr(self, name)!r} leaves "
                    "out a part of them: use one or the other, or leave the part out at the client, by a wrapper"
                )


def _wrong_type(name: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{name} must be {expected}, got {type(value).__name__} {value!r}")


def whole(name: str, value: object, least: int, most: int | None) -> None:
    """Check an argument that is a whole number.

    Args:
        name: Of the argument.
        value: What was passed.
        least: Smallest that is allowed.
        most: Largest that is allowed; None is no bound.

    Raises:
        ValueError: naming the argument, for anything else.
    """
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number {bounds}, got {type(value).__name__} {value!r}")
    number = value.__index__()
    if number < least or (most is not None and number > most):
        raise ValueError(f"{name} must be a whole number {bounds}, got {value!r}")


def seconds(name: str, value: object) -> None:
    """Check an argument that is a number of seconds above 0.

    Args:
        name: Of the argument.
        value: What was passed.

    Raises:
        ValueError: naming the argument, for anything else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise ValueError(  # noqa: TRY004 - one kind of error for every bad number
            f"{name} must be a number of seconds above 0, got {type(value).__name__} {value!r}"
        )
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name} must be a finite number of seconds above 0, got {value!r}")
