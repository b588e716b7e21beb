"""Fixtures for the tests in this folder."""

from tests.remote_vector import make_vector, remote_vector

__all__ = ["make_vector", "remote_vector"]
