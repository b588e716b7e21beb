"""Fixtures for the tests in this folder."""

from tests.remote import make_env, remote

__all__ = ["make_env", "remote"]
