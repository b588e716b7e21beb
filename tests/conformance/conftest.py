"""Fixtures for whatever leads clients through the checker."""

from __future__ import annotations

import pytest

from plugrl_bridges.conformance import client_talk


@pytest.fixture
def little_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the wait for a client that speaks before it is spoken to; one that is right never does."""
    monkeypatch.setattr(client_talk, "_LATE_S", 0.05)
