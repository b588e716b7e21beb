"""The options of everything that listens: names, types, defaults, meanings and checks, each said here once.

`BridgeOptions` holds one of each. The typed dicts say which of them a signature takes; `takes` makes the signature and
the documentation of an adapter from them. What the options do is the concern of ``server.lockstep`` and of
``server.policy_server``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import ssl as ssl_module
import textwrap
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypedDict, TypeVar

from gymnasium import spaces

from plugrl_bridges import arguments
from plugrl_bridges.server.autoreset import AutoresetMode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = [
    "BridgeOptions",
    "ListenOptions",
    "OnClientLoss",
    "Timing",
    "TrainerOptions",
    "VecEnvOptions",
    "VectorOptions",
    "Verify",
    "takes",
]

Space: TypeAlias = "spaces.Space[Any]"

OnClientLoss: TypeAlias = Literal["truncate", "raise"]
"""What a step does when an env client goes away."""

Verify: TypeAlias = Literal[False, True, "raise", "warn"]
"""Whether steps are compared with what the envs took and gave, and whether a difference is an error or a warning."""

_Taker = TypeVar("_Taker", bound="Callable[..., Any]")

_MAX_PORT = 65535
_KINDS: dict[str, tuple[Any, str]] = {
    "observation_space": (spaces.Space | None, "a gymnasium space or None"),
    "action_space": (spaces.Space | None, "a gymnasium space or None"),
    "image_key": (str | None, "a str or None"),
    "state_key": (str | None, "a str or None"),
    "host": (str, "a host name or address"),
    "autoreset_mode": (AutoresetMode, "an AutoresetMode"),
    "ssl": (ssl_module.SSLContext | None, "an ssl.SSLContext or None"),
    "episode_log": (str | os.PathLike | None, "a path or None"),
}


class ListenOptions(TypedDict, total=False):
    """Options of whatever listens for env clients."""

    host: str
    port: int
    observation_space: Space | None
    action_space: Space | None
    image_key: str | None
    state_key: str | None
    timeout: float
    connect_timeout: float | None
    episode_log: str | os.PathLike[str] | None
    api_key: str | None
    ssl: ssl_module.SSLContext | None
    allowed_origins: Sequence[str]
    ping_interval: float | None
    ping_timeout: float | None
    max_message_bytes: int


class TrainerOptions(ListenOptions, total=False):
    """Options of the adapters of trainers."""

    on_client_loss: OnClientLoss
    verify: Verify


class VectorOptions(TrainerOptions, total=False):
    """Options of the adapters with several slots."""

    num_envs: int | None


class VecEnvOptions(VectorOptions, total=False):
    """Options of the adapters whose exchanges may carry several actions."""

    action_horizon: int


@dataclass(frozen=True, kw_only=True)
class Timing:
    """How often a server looks, and for how long it is patient, in seconds: internal, and the same for all servers."""

    keeper_period_s: float = 0.1
    chores_period_s: float = 0.2
    slice_s: float = 0.5
    first_report_s: float = 5.0
    handshake_timeout_s: float = 10.0
    first_message_timeout_s: float = 60.0  # a client may build its simulators after it connected
    reset_patience: float = 3.0  # times the timeout: clients that come and go do not keep up a reset for ever


@dataclass(frozen=True, kw_only=True)
class BridgeOptions:
    """Checked options of a bridge.

    Attributes:
        num_envs: Slots; None takes the envs of the first client.
        host: Address to listen on; loopback unless told otherwise.
        port: Port to listen on; 0 takes a free one, which ``port`` of the result tells.
        observation_space: One env's space; None takes what the client announces, else infers it.
        action_space: One env's space; None takes what the client announces.
        image_key: Surface only this image entry of the observations.
        state_key: Surface only this state entry of the observations.
        action_horizon: Actions per env in one exchange; above 1 an action is ``[H, *shape]`` and a reward a sum.
        timeout: Seconds a step or reset may take, and a lost slot may stay vacant.
        connect_timeout: Seconds to wait for the first clients; None waits for ever.
        on_client_loss: ``"truncate"``: a lost client's episodes are truncated and a replacement is waited for;
            ``"raise"``: a `ClientLost` is raised.
        episode_log: CSV file to write one row per finished episode to; an existing one is replaced.
        api_key: Clients must send it; None admits all.
        ssl: Server-side context for ``wss``; None speaks plain ``ws``.
        allowed_origins: Web origins whose pages may connect.
        ping_interval: Seconds between pings; None sends none.
        ping_timeout: Seconds a waiting client may leave a ping unanswered; None for ever.
        max_message_bytes: Larger messages close their connection with 1009.
        autoreset_mode: When the trainer sees the episode that follows another.
        verify: Compare each step with what the env took and gave, by clients with ``--verify``. A difference is a
            `LedgerMismatch` and a client without ``--verify`` an `UnverifiedClientError`; with ``"warn"`` they are
            warnings.

    Raises:
        ValueError: naming the argument, for a value out of its range.
        TypeError: naming the argument, for a value of the wrong type.
    """

    timing: ClassVar[Timing] = Timing()

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
        checked = {
            "num_envs": arguments.whole_or_none("num_envs", self.num_envs, 1),
            "port": arguments.whole("port", self.port, 0, _MAX_PORT),
            "action_horizon": arguments.whole("action_horizon", self.action_horizon, 1),
            "max_message_bytes": arguments.whole("max_message_bytes", self.max_message_bytes, 1024),
            "timeout": arguments.seconds("timeout", self.timeout),
            "connect_timeout": arguments.seconds_or_none("connect_timeout", self.connect_timeout),
            "ping_interval": arguments.seconds_or_none("ping_interval", self.ping_interval),
            "ping_timeout": arguments.seconds_or_none("ping_timeout", self.ping_timeout),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        arguments.api_key(self.api_key)
        self._check_types()
        if self.on_client_loss not in ("truncate", "raise"):
            raise ValueError(f"on_client_loss must be 'truncate' or 'raise', got {self.on_client_loss!r}")
        self._check_episode_log()
        self._check_verify()

    def _check_types(self) -> None:
        for name, (kind, expected) in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise arguments.wrong_type(name, expected, getattr(self, name))
        if not self.host:
            raise arguments.wrong_type("host", _KINDS["host"][1], self.host)
        # A str is a sequence too, of one-letter origins.
        if not isinstance(self.allowed_origins, (list, tuple)) or not all(
            isinstance(origin, str) for origin in self.allowed_origins
        ):
            raise arguments.wrong_type("allowed_origins", "a sequence of str", self.allowed_origins)

    def _check_episode_log(self) -> None:
        if self.episode_log is None:
            return
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


_FIELDS = {each.name: each for each in fields(BridgeOptions)}
# Each entry of the docstring above as it stands there, whole; none where Python runs without docstrings.
_MEANINGS = {
    entry[1]: entry[0]
    for entry in re.finditer(
        r"^    (\w+): .*(?:\n     .*)*", inspect.cleandoc(BridgeOptions.__doc__ or ""), re.MULTILINE
    )
}


def takes(options: Any) -> Callable[[_Taker], _Taker]:  # noqa: ANN401 - a TypedDict, for which there is no type
    """Return a decorator for a class or function whose ``**options`` are those of a typed dict.

    Its signature then shows each option with its default, unknown names are refused, and in its docstring the options
    take the place of the entry ``**options``; those that the docstring describes itself are left to it.

    Args:
        options: `ListenOptions`, or one of the typed dicts that add to it.
    """
    names = [name for name in _FIELDS if name in options.__optional_keys__]

    def decorate(taker: _Taker) -> _Taker:
        taken = taker
        if isinstance(taker, type):
            taker.__init__ = _refusing_others(taker.__init__, taker.__name__, names)  # type: ignore[misc]
        else:
            taken = _refusing_others(taker, taker.__name__, names)
        taken.__doc__ = _described(taker.__doc__, names)
        return taken

    return decorate


def _refusing_others(function: _Taker, title: str, names: Sequence[str]) -> _Taker:
    """Return the function with its true signature, refusing what it does not take."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    known = [each.name for each in own] + list(names)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function is called with
        for name in kwargs:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                advice = f". Did you mean {close[0]!r}?" if close else ""
                raise TypeError(f"{title}() got an unexpected keyword argument {name!r}{advice}")
        return function(*args, **kwargs)

    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=_FIELDS[name].default, annotation=_FIELDS[name].type
        )
        for name in names
    ]
    checked.__signature__ = signature.replace(parameters=own + keywords)  # type: ignore[attr-defined]
    return checked  # type: ignore[return-value]  # of the same parameters, and with a name less to mistake


def _described(docstring: str | None, names: Sequence[str]) -> str | None:
    """Return the docstring with the meaning of each option."""
    place = re.search(r"^( *)\*\*options: .*(?:\n\1 +.*)*$", docstring or "", re.MULTILINE)
    if docstring is None or place is None:  # Python runs without docstrings
        return docstring
    indent = place[1]
    missing = [_MEANINGS[name] for name in names if f"\n{indent}{name}: " not in docstring]
    lines = textwrap.indent(textwrap.dedent("\n".join(missing)), indent)
    return docstring[: place.start()] + lines + docstring[place.end() :]
