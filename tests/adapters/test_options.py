"""Each adapter's signature and documentation are made of the one list of options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from plugrl_bridges.cleanrl import make_envs
from plugrl_bridges.client import EnvClient
from plugrl_bridges.gym import PlugRLVectorEnv, RemoteEnv
from plugrl_bridges.sb3 import PlugRemoteVecEnv
from plugrl_bridges.server.options import BridgeOptions, ListenOptions, TrainerOptions, VecEnvOptions, takes
from plugrl_bridges.server.policy_server import PolicyServer
from tests.support import CountingEnv

if TYPE_CHECKING:
    from collections.abc import Callable

FIELDS = {field.name: field for field in dataclasses.fields(BridgeOptions)}
NOT_SERVING = {"on_client_loss", "verify", "autoreset_mode"}

# Each taker, its own arguments, and the options that it does not take.
TAKERS: list[tuple[Callable[..., Any], set[str], set[str]]] = [
    (PlugRemoteVecEnv, set(), {"autoreset_mode"}),
    (PlugRLVectorEnv, set(), set()),
    (RemoteEnv, set(), {"num_envs", "action_horizon", "autoreset_mode"}),
    (make_envs, {"info_dialect"}, {"action_horizon"}),
    (PolicyServer, {"policy", "episodes", "steps", "accepts", "on_progress"}, NOT_SERVING),
]

each_taker = pytest.mark.parametrize(
    ("taker", "own", "without"), TAKERS, ids=lambda value: getattr(value, "__name__", "")
)


@each_taker
def test_the_signature_shows_every_option_with_its_default(
    taker: Callable[..., Any], own: set[str], without: set[str]
) -> None:
    parameters = inspect.signature(taker).parameters
    assert set(parameters) - own == set(FIELDS) - without
    for name in set(parameters) - own:
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default == FIELDS[name].default


@each_taker
def test_every_argument_is_documented_once(taker: Callable[..., Any], own: set[str], without: set[str]) -> None:
    del own, without
    doc = inspect.getdoc(taker) or ""
    names = inspect.signature(taker).parameters
    assert {name: doc.count(f"\n    {name}: ") for name in names} == dict.fromkeys(names, 1)
    assert "**options" not in doc


@each_taker
@pytest.mark.parametrize("name", ["time_out", "autoreset_modes", "colour"])
def test_an_unknown_option_is_refused_with_a_suggestion(
    taker: Callable[..., Any], own: set[str], without: set[str], name: str
) -> None:
    del own
    close = {"time_out": "timeout", "autoreset_modes": "autoreset_mode"}.get(name)
    advice = f". Did you mean {close!r}?" if close is not None and close not in without else ""
    with pytest.raises(TypeError) as caught:
        taker(**{name: 1})
    assert str(caught.value) == f"{taker.__name__}() got an unexpected keyword argument {name!r}{advice}"


@each_taker
def test_an_option_of_others_is_refused(taker: Callable[..., Any], own: set[str], without: set[str]) -> None:
    del own
    for name in without:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            taker(**{name: 1})


@each_taker
def test_options_are_by_keyword(taker: Callable[..., Any], own: set[str], without: set[str]) -> None:
    del own, without
    with pytest.raises(TypeError, match="positional"):
        taker("127.0.0.1", 8000)


def test_the_typed_dicts_have_the_types_of_the_options() -> None:
    types = {name: annotation.__forward_arg__ for name, annotation in VecEnvOptions.__annotations__.items()}
    assert types == {name: field.type for name, field in FIELDS.items() if name != "autoreset_mode"}


def test_what_a_docstring_says_of_an_option_itself_stands() -> None:
    @takes(ListenOptions)
    def listen(**options: Any) -> Any:
        """Listen.

        Args:
            timeout: Patience.
            **options: Those of
                `BridgeOptions`.

        Returns:
            The options.
        """
        return options

    doc = inspect.getdoc(listen) or ""
    assert doc.count("timeout: ") == 3  # and those of connections and pings
    assert "\n    timeout: Patience.\n    host: Address" in doc
    assert "with 1009.\n\nReturns:" in doc
    assert listen(port=3) == {"port": 3}


def test_a_subclass_may_take_more() -> None:
    @takes(TrainerOptions)
    class Base:
        def __init__(self, **options: Any) -> None:
            self.options = options

    class More(Base):
        def __init__(self, extra: int, **options: Any) -> None:
            super().__init__(**options)
            self.extra = extra

    assert list(inspect.signature(More).parameters) == ["extra", "options"]
    assert More(3, port=1).options == {"port": 1}


def test_numbers_of_numpy_are_taken_everywhere() -> None:
    assert "2 envs" in repr(EnvClient(CountingEnv, num_envs=np.int64(2), max_backoff=np.float32(0.5)))  # type: ignore[arg-type]
    env = PlugRLVectorEnv(num_envs=np.int64(2), port=0, timeout=np.float32(0.5))  # type: ignore[arg-type]
    env.close()
    assert BridgeOptions(num_envs=np.int64(2)).num_envs == 2  # type: ignore[arg-type]
