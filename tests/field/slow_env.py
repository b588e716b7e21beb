"""An env for client processes whose step takes until the test says so: it dials ``STEP_PORT`` and waits for a byte."""

from __future__ import annotations

import os
import socket
from typing import Any

from tests.support import CountingEnv


class Dialling(CountingEnv):
    def step(self, action: Any) -> Any:
        with socket.create_connection(("127.0.0.1", int(os.environ["STEP_PORT"])), 60) as said:
            assert said.recv(1) == b"."
        return super().step(action)
