"""What lets RLinf run where there is no accelerator; does nothing where there is one.

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
    """Return whether RLinf finds no accelerator on this machine."""
    return bool(AcceleratorUtil.get_accelerator_type() == AcceleratorType.NO_ACCEL)


def install() -> None:
    """Set a CPU platform on RLinf's workers, if they have no other; idempotent.

    RLinf sets both attributes to None on the class *and* on the worker, right before it loads extensions. A data
    descriptor on the class goes before the worker's own attribute; one that was overwritten is put back here.
    """
    if not needed():
        return
    for name, value in (("torch_platform", CpuPlatform()), ("torch_device_type", "cpu")):
        if not isinstance(vars(Worker).get(name), _Constant):
            setattr(Worker, name, _Constant(value))


class _Constant:
    """Attribute with one value, whether the class is asked or a worker; what workers set is ignored."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> Any:  # noqa: ANN401 - a module, or what stands in for one
        return self._value

    def __set__(self, instance: object, value: object) -> None:
        """Ignore it: RLinf's `Worker.__new__` sets None."""


class _Nothing:
    """Stand-in for a stream or an event: on a CPU everything has happened when a call returns."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def _do_nothing(self, *_args: object) -> None:
        pass

    record = wait = synchronize = _do_nothing

    def query(self) -> bool:
        """Return that it is done, as `torch.cuda.Event.query` would."""
        return True


def _returning(value: Any) -> Any:  # noqa: ANN401 - as the function that is stood in for
    """Return a function that returns a value, whatever it is called with."""
    return staticmethod(lambda *_args, **_kwargs: value)


class CpuPlatform:
    """Stand-in for the module `torch.cuda`, with those of its functions that RLinf calls."""

    # Streams and events: the collectives and weight syncers order copies by them.
    Stream = _Nothing
    Event = _Nothing
    current_stream = _returning(_Nothing())
    stream = _returning(contextlib.nullcontext())
    synchronize = _returning(None)

    # The device: the actor and the rollout worker ask which one they have. RLinf asks whether there is one before it
    # moves a model, and asserts it for an actor; whether a context of it exists, before collectives of accelerators.
    is_available = _returning(True)
    is_initialized = _returning(False)
    set_device = _returning(None)
    current_device = _returning(torch.device("cpu"))  # a number would name an accelerator
    device_count = _returning(1)

    # Memory: RLinf frees caches between phases and logs what is used.
    empty_cache = _returning(None)
    ipc_collect = _returning(None)
    memory_allocated = _returning(0)
    memory_reserved = _returning(0)

    # Random numbers: checkpoints save and restore the device's state.
    get_rng_state = staticmethod(lambda _device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, _device=None: torch.set_rng_state(state))
    manual_seed_all = staticmethod(torch.manual_seed)
