"""Own what lets RLinf run where there is no accelerator; does nothing where there is one.

RLinf reaches the device through ``Worker.torch_platform`` (a module such as ``torch.cuda``) and
``Worker.torch_device_type``, which are None without an accelerator. Each shim below says what it stands in for; take
one away once RLinf does without.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from rlinf.scheduler.hardware import AcceleratorType, AcceleratorUtil
from rlinf.scheduler.worker.worker import Worker

__all__ = ["CpuPlatform", "install", "needed"]


def needed() -> bool:
    """Tell whether RLinf finds no accelerator on this machine."""
    return bool(AcceleratorUtil.get_accelerator_type() == AcceleratorType.NO_ACCEL)


def install() -> None:
    """Give RLinf's workers a CPU platform, if they have no other; idempotent.

    RLinf sets both attributes to None on the class *and* on the worker, right before it loads extensions. A data
    descriptor on the class goes before the worker's own attribute; one that was overwritten is put back here.
    """
    if not needed():
        return
    for name, value in (("torch_platform", CpuPlatform()), ("torch_device_type", "cpu")):
        if not isinstance(vars(Worker).get(name), _Constant):
            setattr(Worker, name, _Constant(value))


class _Constant:
    """Give one value whether the class is asked or a worker, and let workers set what they like in vain."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> Any:  # noqa: ANN401 - a module, or what stands in for one
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        """Ignore it: RLinf's `Worker.__new__` sets None."""


class _Nothing:
    """Stand in for a stream or an event: on a CPU everything has happened when a call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def record(self, *_args: object) -> None:
        """Do nothing, as `torch.cuda.Event.record` would without work in flight."""

    def wait(self, *_args: object) -> None:
        """Do nothing, as `torch.cuda.Event.wait` would."""

    def synchronize(self) -> None:
        """Do nothing, as `torch.cuda.Stream.synchronize` would."""

    def query(self) -> bool:
        """Say that it is done, as `torch.cuda.Event.query` would."""
        return True


class CpuPlatform:
    """Stand in for the module `torch.cuda`, with what RLinf asks of it."""

    # Streams and events: the collectives and weight syncers order copies by them.
    Stream = _Nothing
    Event = _Nothing

    @staticmethod
    def current_stream(_device: object = None) -> _Nothing:
        """Stand in for `torch.cuda.current_stream`, which the weight syncers synchronise with."""
        return _Nothing()

    @staticmethod
    def stream(_stream: object) -> contextlib.AbstractContextManager[None]:
        """Stand in for `torch.cuda.stream`, the context of a copy stream."""
        return contextlib.nullcontext()

    @staticmethod
    def synchronize(_device: object = None) -> None:
        """Stand in for `torch.cuda.synchronize`, which timers call."""

    # The device: the actor and the rollout worker ask which one they have.
    @staticmethod
    def is_available() -> bool:
        """Say that there is a device: RLinf asks before it moves a model, and asserts it for an actor."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """Say that no accelerator context exists, which is asked before accelerator collectives."""
        return False

    @staticmethod
    def set_device(_device: object) -> None:
        """Stand in for `torch.cuda.set_device`: there is one CPU."""

    @staticmethod
    def current_device() -> torch.device:
        """Give the CPU where `torch.cuda.current_device` gives a number, which would name an accelerator."""
        return torch.device("cpu")

    @staticmethod
    def device_count() -> int:
        """Stand in for `torch.cuda.device_count`."""
        return 1

    # Memory: RLinf frees caches between phases and logs what is used.
    @staticmethod
    def empty_cache() -> None:
        """Stand in for `torch.cuda.empty_cache`."""

    @staticmethod
    def ipc_collect() -> None:
        """Stand in for `torch.cuda.ipc_collect`."""

    @staticmethod
    def memory_allocated(_device: object = None) -> int:
        """Stand in for `torch.cuda.memory_allocated`."""
        return 0

    @staticmethod
    def memory_reserved(_device: object = None) -> int:
        """Stand in for `torch.cuda.memory_reserved`."""
        return 0

    # Random numbers: checkpoints save and restore the device's state.
    @staticmethod
    def get_rng_state(_device: object = None) -> torch.Tensor:
        """Give the CPU's state where `torch.cuda.get_rng_state` gives the device's."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, _device: object = None) -> None:
        """Set the CPU's state where `torch.cuda.set_rng_state` sets the device's."""
        torch.set_rng_state(state)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Stand in for `torch.cuda.manual_seed_all`."""
        torch.manual_seed(seed)
