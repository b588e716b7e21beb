"""Own the checks of one observation [5.2]: its keys, its arrays, and how many rows they have.

Part of ``client_checks``, which is the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import numpy as np

if TYPE_CHECKING:
    from plugrl_bridges.conformance.report import Report
    from plugrl_bridges.wire.codec import Array, Value

__all__ = ["check_observation", "describe", "is_int_array"]

_KEYS = {"images", "states", "text"}


def check_observation(report: Report, value: Value, n: int, what: str, clause: str) -> dict[str, Array] | None:
    """Check an observation of n rows.

    Args:
        report: Where to write what is found.
        value: What stands where an observation is due.
        n: Rows that must be there.
        what: Its name, for details.
        clause: Clause of the message it is part of.

    Returns:
        The states; None if there is a fault that leaves no way to use them.
    """
    if not isinstance(value, dict):
        report.violation(clause, f"{what}: expected a map with the keys images, states, text; got {describe(value)}")
        return None
    if value.keys() != _KEYS:
        got = sorted(str(key)[:40] for key in list(value)[:12])
        report.violation(clause, f"{what}: an observation has exactly the keys images, states, text; got {got}")
    else:
        report.passed(clause, "an observation has exactly the keys images, states, text")
    images, states = value.get("images", {}), value.get("states", {})
    if not isinstance(images, dict) or not isinstance(states, dict):
        report.violation(clause, f"{what}: images and states must be maps")
        return None
    faults = [fault for name, array in images.items() if (fault := _image_fault(name, array, n))]
    faults += [fault for name, array in states.items() if (fault := _state_fault(name, array, n))]
    for fault in faults:
        report.violation(clause, f"{what}: {fault}")
    if images and not faults:
        report.passed(clause, "images are uint8 arrays [n, h, w, c], one row per env")
    if states and not faults:
        report.passed(clause, "states are arrays [n, ...], one row per env")
    if faults:
        return None  # the text may be wrong for the same reason
    if "text" in value:
        _check_text(report, value["text"], n, what)
    return {str(name): array for name, array in states.items() if isinstance(array, np.ndarray)}


def _image_fault(name: object, array: Value, n: int) -> str | None:
    if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.ndim != 4 or array.dtype != np.uint8:
        return f"image {str(name)[:40]!r} must be a uint8 array [n, h, w, c], got {describe(array)}"
    return _row_fault(name, array, n)


def _state_fault(name: object, array: Value, n: int) -> str | None:
    if not isinstance(name, str) or not isinstance(array, np.ndarray) or array.ndim < 1:
        return f"state {str(name)[:40]!r} must be an array [n, ...], got {describe(array)}"
    return _row_fault(name, array, n)


def _row_fault(name: str, array: Array, n: int) -> str | None:
    if len(array) == n:
        return None
    return f"{name[:40]!r} has a leading dimension of {len(array)}, expected {n} rows"


def _check_text(report: Report, text: Value, n: int, what: str) -> None:
    """Check the text [3.4], of which three forms are in use."""
    if isinstance(text, np.ndarray) and text.dtype.kind == "U" and text.ndim == 1 and len(text) in {n, n or len(text)}:
        report.passed("3.4", "text is an array of str, one per env")
    elif isinstance(text, str):
        report.note("3.4", "text is one str for all envs; servers differ in whether they read that, an array is safe")
    elif isinstance(text, list) and len(text) in {n, n or len(text)} and all(isinstance(item, str) for item in text):
        report.note("3.4", "text is a list of str; servers differ in whether they read that, an array is safe")
    else:
        report.violation(
            "3.4", f"{what}: text must hold {n} str (an array, a list) or be one str, got {describe(text)}"
        )


def is_int_array(value: Value) -> TypeGuard[Array]:
    """Say whether a value is a one-dimensional array of ints."""
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "iu"


def describe(value: Value) -> str:
    """Describe a value without repeating its contents."""
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str}{list(value.shape)}"
    if isinstance(value, (list, dict)):
        return f"a {'map' if isinstance(value, dict) else 'list'} of {len(value)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
