"""Fixtures for the tests in this folder."""

from tests.remote import make_env, quick_keeper, remote

__all__ = ["make_env", "quick_keeper", "remote"]
