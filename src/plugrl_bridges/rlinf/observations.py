"""How observations look to RLinf's policies: ``states``, three kinds of images, and ``task_descriptions``.

Pure translation of ``server.lockstep``'s arrays, one per leaf of the space, by the names that the config gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from plugrl_bridges.errors import SpaceError
from plugrl_bridges.spaces import Channel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_bridges.rlinf.options import ObservationNames
    from plugrl_bridges.spaces import ObservationLayout
    from plugrl_bridges.wire.codec import Array

__all__ = ["Observations", "RLinfObservation"]

RLinfObservation: TypeAlias = "dict[str, Any]"
"""Tensors ``states``, ``main_images``, ``wrist_images``, ``extra_view_images``, and the list ``task_descriptions``."""


class Observations:
    """Translator of batched leaves into RLinf's observations.

    Args:
        layout: Of one env's observation.
        names: Which entries become what.

    Raises:
        SpaceError: naming the entry that is missing or has another kind, and what there is.
    """

    def __init__(self, layout: ObservationLayout, names: ObservationNames) -> None:
        self._leaves = layout.leaves
        self._at = {leaf.name: at for at, leaf in enumerate(layout.leaves)}
        by_channel = {channel: [leaf.name for leaf in layout.leaves if leaf.channel is channel] for channel in Channel}
        texts = [leaf.name for leaf in layout.leaves if leaf.dtype.kind == "U"]
        states = [name for name in by_channel[Channel.STATES] if name not in texts]
        self._states = [self._numbers(name) for name in (states if names.states is None else names.states)]
        used = {names.wrist_image, *names.extra_view_images}
        main = names.main_image
        if main is None:
            images = [name for name in by_channel[Channel.IMAGES] if name not in used]
            main = _only(images, "observation.main_image: several images", "say which is the main one")
        self._main = None if main is None else self._image(main)
        self._wrist = None if names.wrist_image is None else self._image(names.wrist_image)
        self._extra = [self._image(name) for name in names.extra_view_images]
        if len({self._leaves[at].shape for at in self._extra}) > 1:
            raise SpaceError(f"observation.extra_view_images: {list(names.extra_view_images)} differ in their shapes")
        self._description = names.task_description
        task = names.task_text
        if task is None and self._description is None:
            task = _only(texts, "observation.task_text: several texts", "say which is the task's")
        self._task = None if task is None else self._text(task)

    @property
    def states_width(self) -> int:
        """Width of ``states``; 0 if there are none."""
        return sum(int(np.prod(self._leaves[at].shape)) for at in self._states)

    def of(self, arrays: Sequence[Array]) -> RLinfObservation:
        """Return what a policy sees; the tensors are RLinf's own.

        Args:
            arrays: One ``[num_envs, *shape]`` per leaf.
        """
        n = len(arrays[0])
        observation: RLinfObservation = {}
        if self._states:
            parts = [arrays[at].reshape(n, -1).astype(np.float32) for at in self._states]
            observation["states"] = torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))
        for key, at in (("main_images", self._main), ("wrist_images", self._wrist)):
            if at is not None:
                observation[key] = torch.from_numpy(arrays[at].copy())
        if self._extra:
            observation["extra_view_images"] = torch.from_numpy(np.stack([arrays[at] for at in self._extra], axis=1))
        if self._task is not None:
            observation["task_descriptions"] = arrays[self._task].tolist()
        elif self._description is not None:
            observation["task_descriptions"] = [self._description] * n
        return observation

    def _numbers(self, name: str) -> int:
        at = self._find("states", name)
        if self._leaves[at].dtype.kind == "U":
            raise SpaceError(f"observation.states: {name!r} is text")
        return at

    def _image(self, name: str) -> int:
        at = self._find("images", name)
        if len(self._leaves[at].shape) != 3:
            raise SpaceError(
                f"observation: {name!r} has the shape {list(self._leaves[at].shape)}, an image has [h, w, c]"
            )
        if self._leaves[at].dtype != np.uint8:
            raise SpaceError(f"observation: {name!r} has the dtype {self._leaves[at].dtype}, an image has uint8")
        return at

    def _text(self, name: str) -> int:
        at = self._find("task_text", name)
        if self._leaves[at].dtype.kind != "U":
            raise SpaceError(
                f"observation.task_text: {name!r} must be a Text entry, got the dtype {self._leaves[at].dtype}"
            )
        return at

    def _find(self, key: str, name: str) -> int:
        if name not in self._at:
            raise SpaceError(
                f"observation.{key}: the clients' observations have no {name!r}; they have {list(self._at)}"
            )
        return self._at[name]


def _only(names: Sequence[str], several: str, advice: str) -> str | None:
    """Return the only one of some entries, or None without any."""
    if len(names) > 1:
        raise SpaceError(f"{several} {names}: {advice}")
    return names[0] if names else None
