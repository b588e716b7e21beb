"""What a run of the client checker is told; light, since the command's ``--help`` imports it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SCENARIOS", "ClientCheckOptions"]

SCENARIOS = ("basic", "resync", "text")
"""In the order in which ``all`` runs them."""


@dataclass(frozen=True)
class ClientCheckOptions:
    """What a run is told.

    Attributes:
        client: Shell command that starts the client, once per scenario. ``{host}``, ``{port}`` and ``{url}`` are
            replaced. None: a client comes by itself, once per scenario.
        scenarios: Some of `SCENARIOS`.
        probe: Whether the client runs the probe environment [8.1].
        steps: Exchanges per scenario.
        horizon: Steps per chunk.
        action_dim: Width of an action.
        action_dtype: Numpy name of the actions' dtype.
        features: Optional features that are offered [10]; ``step-digest`` only with ``env-spec``.
        host: Address to listen on.
        port: Port to listen on, 0 for a free one.
        timeout_s: How long to wait for anything the client owes.

    Raises:
        ValueError: for ``step-digest`` without ``env-spec``.
    """

    client: str | None = None
    scenarios: tuple[str, ...] = ("basic",)
    probe: bool = False
    steps: int = 20
    horizon: int = 4
    action_dim: int = 7
    action_dtype: str = "float32"
    features: frozenset[str] = frozenset()
    host: str = "127.0.0.1"
    port: int = 8000
    timeout_s: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what no client could use."""
        if "step-digest" in self.features and "env-spec" not in self.features:
            raise ValueError(
                "features: step-digest needs env-spec, since a client announces it in its env_spec; offer both, "
                f"got {', '.join(sorted(self.features))}"
            )
