"""Fixtures for the tests in this folder."""

from tests.identical.weights import one_thread

__all__ = ["one_thread"]
