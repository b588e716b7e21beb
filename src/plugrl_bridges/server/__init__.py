"""The bridge: a protocol-speaking server inside the trainer's process.

``hub`` carries messages, ``slots`` says who sits where, ``lockstep`` makes vector steps of both. Adapters call
``lockstep.Lockstep``; nothing in here knows a trainer.
"""

from __future__ import annotations

__all__: list[str] = []
