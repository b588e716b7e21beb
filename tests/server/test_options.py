"""The options: every bad argument is refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.server.options import BridgeOptions

if TYPE_CHECKING:
    from pathlib import Path

WRONG_WHOLE = [1.5, "3", True, np.True_, np.array([1, 2]), float("nan")]
SECONDS = [0, -1, float("nan"), float("inf"), np.float32(0)]
WRONG_SECONDS = ["3", True, np.True_]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_envs", 0),
        ("num_envs", -1),
        ("action_horizon", 0),
        ("action_horizon", -1),
        ("port", -1),
        ("port", 65536),
        ("max_message_bytes", 0),
        ("max_message_bytes", 1023),
        *(("timeout", value) for value in SECONDS),
        *(("connect_timeout", value) for value in SECONDS),
        *(("ping_interval", value) for value in SECONDS),
        *(("ping_timeout", value) for value in SECONDS),
        ("on_client_loss", "ignore"),
        ("on_client_loss", None),
        ("api_key", ""),
        ("api_key", "one\ntwo"),
        ("episode_log", "/no/such/folder/episodes.csv"),
        ("episode_log", "/"),
    ],
)
def test_a_value_out_of_range_is_a_value_error_that_names_the_argument(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{name}"):
        BridgeOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_envs", value) for value in WRONG_WHOLE),
        *(("action_horizon", value) for value in [*WRONG_WHOLE, None]),
        *(("port", value) for value in [*WRONG_WHOLE, None]),
        *(("max_message_bytes", value) for value in [*WRONG_WHOLE, None]),
        *(("timeout", value) for value in [*WRONG_SECONDS, None]),
        *(("connect_timeout", value) for value in WRONG_SECONDS),
        *(("ping_interval", value) for value in WRONG_SECONDS),
        *(("ping_timeout", value) for value in WRONG_SECONDS),
        ("observation_space", (3,)),
        ("action_space", "Box"),
        ("image_key", 3),
        ("state_key", b"obs"),
        ("host", 127),
        ("host", ""),
        ("host", None),
        ("api_key", b"secret"),
        ("ssl", True),
        ("allowed_origins", "http://localhost"),
        ("episode_log", 3),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error_that_names_the_argument(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"^{name}"):
        BridgeOptions(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {"num_envs": np.int64(4)},
        {"port": 0},
        {"port": 65535},
        {"timeout": 1},
        {"timeout": np.float64(0.5)},
        {"connect_timeout": None},
        {"ping_interval": None, "ping_timeout": None},
        {"on_client_loss": "raise"},
        {"host": "::1"},
    ],
)
def test_a_value_in_range_is_taken(given: dict[str, Any]) -> None:
    options = BridgeOptions(**given)
    assert {name: getattr(options, name) for name in given} == given


def test_an_episode_log_may_be_a_path_or_a_str(tmp_path: Path) -> None:
    for path in (tmp_path / "a.csv", str(tmp_path / "a.csv")):
        assert BridgeOptions(episode_log=path).episode_log == path


def test_the_defaults_are_safe() -> None:
    options = BridgeOptions()
    assert (options.host, options.port, options.allowed_origins) == ("127.0.0.1", 8000, ())
    assert options.max_message_bytes >= 1 << 30


def test_everything_is_by_keyword() -> None:
    with pytest.raises(TypeError):
        BridgeOptions(4)  # type: ignore[call-arg]
