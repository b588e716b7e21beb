"""A whole client of the probe environment that is right, or wrong in one way that is named on its command line.

    python -m tests.conformance.scripted_client URL ENVS [FAULT]

It stands on the websockets library, msgpack and numpy; nothing of this library is in it. Its digests are
those of the golden vectors' own generator.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.vectors.digest_cases import MASK, Case, Happening, Part, chained, words_of_event

__all__ = ["main"]

WIDTH = 7
DIGESTED = Case(
    "probe",
    "the probe environment",
    (Part(np.dtype("<f4"), (WIDTH,)),),
    (Part(np.dtype("<f8"), (1,), "t"), Part(np.dtype("<f8"), (WIDTH,), "a")),
)


def _box(dtype: str, *shape: int) -> dict[str, Any]:
    bound = np.array([np.inf], dtype)
    return {"type": "Box", "shape": list(shape), "dtype": dtype, "low": -bound, "high": bound}


def _to_map(value: Any) -> Any:
    array = np.asarray(value)
    return {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": array.dtype.str, b"shape": array.shape}


def _from_map(value: dict[Any, Any]) -> Any:
    if b"__ndarray__" in value:
        return np.ndarray(value[b"shape"], np.dtype(value[b"dtype"]), value[b"data"])
    return value


class Env:
    """The probe environment [8.1]."""

    def __init__(self, index: int) -> None:
        self.length = 3 + 2 * (index % 3)
        self.t = 0
        self.a: Any = np.zeros(WIDTH)

    def reset(self) -> None:
        self.t, self.a = 0, np.zeros(WIDTH)


class Client:
    def __init__(self, url: str, count: int, fault: str) -> None:
        self.url, self.count, self.fault = url, count, fault
        self.envs = [Env(index) for index in range(count)]
        self.chunks: dict[int, Any] = {}
        self.used: dict[int, int] = {}
        self.totals = [0.0] * count
        self.ended: set[int] = set()
        self.fed: set[int] = set()
        self.held: bytes | None = None
        self.connections = 0
        self.features: list[str] = []
        self.exchanges = 0
        self.chains = [0] * count
        for row in range(count):
            self.digest(row)

    # What it says ----------------------------------------------------------------------------------------------------

    def observation(self, rows: list[int], *, fed_back: bool = False) -> dict[str, Any]:
        """Return the observation of an infer or, ``fed_back``, of a feedback, where "… in feedback" is wrong alone."""
        n, fault = len(rows), self.fault.removesuffix(" in feedback") if fed_back else self.fault
        text: Any = np.full(n, "", "<U1")
        if fault == "text as a list":
            text = [""] * n
        elif fault == "text as one str":
            text = ""
        elif fault == "text too short":
            text = [""] * (n + 1)
        states: dict[str, Any] = {
            "t": np.array([[self.envs[row].t] for row in rows], np.float64).reshape(n, 1),
            "a": np.array([self.envs[row].a for row in rows], np.float64).reshape(n, WIDTH),
        }
        images: dict[str, Any] = {}
        if fault == "no batch dimension":
            states["t"] = states["t"][:1]
        if fault == "other states":
            states = {"obs": states["a"]}
        if fault == "float images":
            images["camera"] = np.zeros((n, 4, 4, 3), np.float32)
        elif fault == "images":
            images["camera"] = np.zeros((n, 4, 4, 3), np.uint8)
        observation = {"images": images, "states": states, "text": text}
        if fault == "no text":
            del observation["text"]
        return observation

    def marked(self, rows: list[int]) -> list[int]:
        """Give the envs whose observation need not be sent [10.1]."""
        if "reuse-feedback-obs" not in self.features:
            return rows if self.fault == "reuse unasked" and self.fed else []
        if self.fault == "feature unused":
            return []
        if self.fault == "reuse after an end":
            return [row for row in rows if row in self.fed]
        if self.fault == "reuse on a fresh connection" and self.connections > 1:
            return rows
        return [row for row in rows if row in self.fed and row not in self.ended]

    def digest(self, row: int, action: Any = None, *, over: bool = False) -> None:
        """Chain the digest of a reset or, with an action, of a step [step-digest]."""
        env, chain = self.envs[row], self.chains[row]
        if action is not None and self.fault == "digest of another action":
            action = action + 0.5 * (np.arange(WIDTH) == 2)
        words = words_of_event(
            DIGESTED,
            Happening(
                None if action is None else (action,),
                0.0 if action is None or self.fault == "digest without reward" else 1.0,
                terminated=over and self.fault != "digest without flags",
                truncated=False,
                observation=(np.array([env.t]), env.a),
            ),
        )
        self.chains[row] = chained(chain, words)
        if action is None and self.fault == "digest not begun anew":
            self.chains[row] = (self.chains[row] + chain * 0xD1342543DE82EF95) & MASK
        if action is not None and self.fault == "digest wrong from one step on" and self.exchanges == 1 and row == 0:
            self.chains[row] ^= 1 << 40
        if action is not None and self.fault == "digest wrong after a resync" and self.connections == 2:
            self.chains[row] ^= (row == 0 and env.t == 2) << 40

    def digests(self, rows: list[int], message: str) -> dict[str, Any]:
        """Give what a message says of the digests."""
        asked = "step-digest" in self.features and self.fault not in {"digests unused", "spec without features"}
        if (not asked and self.fault != "digest unasked") or self.fault == f"no digest in {message}":
            return {}
        digest = np.array([self.chains[row] for row in rows], "<u8")
        if self.fault == f"digest wrong in one {message}" and self.exchanges == 1:
            digest[0] += 1
        return {"digest": digest.astype("<i8") if self.fault == "digests with a sign" else digest}

    def spec(self) -> dict[str, Any]:
        """Give what is said of the envs in the first infer of a connection [env-spec]."""
        if "step-digest" not in self.features:
            return {}
        spec: dict[str, Any] = {
            "observation_space": {"type": "Dict", "spaces": {"t": _box("<f8", 1), "a": _box("<f8", WIDTH)}},
            "action_space": _box("<f4", WIDTH),
            "features": ["step-digest"],
        }
        if self.fault in {"digest not announced", "digests unused"}:
            spec["features"] = []
        elif self.fault == "spec without features":
            del spec["features"]
        elif self.fault == "digests without spaces":
            del spec["action_space"]
        elif self.fault == "spec with no such space":
            spec["action_space"]["type"] = "Ball"
        elif self.fault == "spec of other observations":
            spec["observation_space"]["spaces"]["a"] = _box("<f8", WIDTH + 1)
        return {"env_spec": spec}

    def infer(self, rows: list[int], *, first: bool = False) -> dict[str, Any]:
        marked = self.marked(rows)
        for row in self.ended.intersection(rows):
            if self.fault != "no reset":
                self.envs[row].reset()
                self.digest(row)
            if self.fault == "stale infer":
                self.fed.discard(row)
        self.ended.difference_update(rows)
        if self.fault == "stale infer":
            for row in self.fed.intersection(rows):
                self.envs[row].a = self.envs[row].a + 1
        message: dict[str, Any] = {
            "message_type": "infer",
            "data": self.observation([row for row in rows if row not in marked]),
            "env_indices": np.array(rows),
            "step_ids": np.array([0 if self.fault == "step ids of 0" else self.envs[row].t for row in rows]),
            **(self.spec() if first else {}),
            **self.digests(rows, "infer"),
        }
        if marked:
            message["reuse"] = np.array([row in marked for row in rows])
        none = np.zeros(0, int)
        spoilt: dict[str, dict[str, Any]] = {
            "repeats an index": {"env_indices": np.zeros(len(rows), int)},
            "indices as a list": {"env_indices": rows},
            "no step_ids": {"step_ids": None},
            "names no env": {"env_indices": none, "step_ids": none, "data": self.observation([])},
            "unknown message_type": {"message_type": "observe"},
            "spec unasked": {"env_spec": {}},
        }
        return {**message, **spoilt.get(self.fault, {})}

    def feedback(self, rows: list[int], rewards: list[float]) -> dict[str, Any]:
        over = np.array([row in self.ended for row in rows])
        episode = {"r": np.array([self.totals[row] for row in rows]), "l": np.array([self.envs[row].t for row in rows])}
        if self.fault == "wrong return":
            episode["r"] = episode["r"] - 1
        data: dict[str, Any] = {
            "obs": self.observation(rows, fed_back=True),
            "rewards": np.array(rewards, {"float64 rewards": "<f8", "float16 rewards": "<f2"}.get(self.fault, "<f4")),
            "terminated": over,
            "truncated": np.zeros(len(rows), bool),
            "info": {"episode": {**episode, "s": over, "mask": over}},
        }
        if self.fault == "wrong feedback keys":
            data["reward"] = data.pop("rewards")
        elif self.fault == "flags as ints":
            data["terminated"] = over.astype(int)
        elif self.fault == "rewards as a list":
            data["rewards"] = rewards
        elif self.fault == "unsplittable info":
            data["info"] = {"task": "pick"}
        elif self.fault == "truncates":
            data["terminated"], data["truncated"] = data["truncated"], data["terminated"]
        named = list(rows)
        if self.fault == "feeds back a stranger":
            for key, value in self.observation([*rows, 0])["states"].items():
                data["obs"]["states"][key] = value
            data["obs"]["text"] = np.full(len(rows) + 1, "", "<U1")
            named = [*rows, 40]
            for key in ("rewards", "terminated", "truncated"):
                data[key] = np.append(data[key], data[key][:1])
            data["info"] = {}
        return {
            "message_type": "feedback",
            "env_indices": np.array(named),
            "step_ids": np.array(named),
            "data": data,
            **self.digests(rows, "feedback"),
        }

    # What it does ----------------------------------------------------------------------------------------------------

    def take(self, rows: list[int], action: Any) -> None:
        if self.fault == "crashes":
            os._exit(9)
        horizon, n = action.shape[:2]
        if self.fault == "assumes float32":
            action = np.frombuffer(action.tobytes(), "<f4")[: action.size].reshape(action.shape)
        elif self.fault == "reads env-major":
            action = action.reshape(n, horizon, -1).swapaxes(0, 1)
        elif self.fault == "wrong env":
            action = action[:, ::-1]
        elif self.fault == "refuses float64" and action.dtype != np.float32:
            raise TypeError("float32, please")
        for at, row in enumerate(rows):
            self.chunks[row] = action[:, at]
            self.used[row] = 0

    def run_chunk(self, row: int, longest: int) -> tuple[float, bool]:
        """Run an env for some steps; give the reward, and whether its chunk has ended."""
        env, chunk, reward = self.envs[row], self.chunks[row], 0.0
        horizon = len(chunk)
        limit = horizon + (self.fault == "runs H+1 steps")
        steps = min(limit - self.used[row], longest)
        if self.fault == "one step of each chunk":
            steps, limit = 1, self.used[row] + 1
        for _ in range(steps):
            at = self.used[row]
            self.used[row] += 1
            env.t += 1
            env.a = np.zeros(WIDTH) if self.fault == "no action" else np.array(chunk[min(at, horizon - 1)])
            reward = 1.0 if self.fault == "last-step reward" else reward + 1.0
            self.totals[row] += 1.0
            over = env.t == env.length
            if "step-digest" in self.features:
                self.digest(row, env.a, over=over)
            if over and self.fault == "ends a chunk late, resetting" and self.used[row] < horizon:
                env.reset()
            elif over and not (self.fault == "ends a chunk late" and self.used[row] < horizon):
                self.ended.add(row)
                if self.fault == "resets inside step":
                    env.reset()
                return reward, True
        return reward, self.used[row] >= limit

    def step(self) -> tuple[list[int], list[float]]:
        """Step until the chunk of an env has ended; give those whose has, and their rewards."""
        if self.fault != "ragged":
            rows = sorted(self.chunks)
            return rows, [self.run_chunk(row, 1000)[0] for row in rows]
        while True:
            done = [row for row in sorted(self.chunks) if self.run_chunk(row, 1)[1]]
            if done:
                return done, [float(self.used[row]) for row in done]

    def serve(self, websocket: Any) -> None:
        self.connections += 1
        self.fed.clear()
        self.chunks.clear()
        rows = list(range(self.count))
        if self.fault == "sends before metadata":
            self.send(websocket, self.infer(rows))
        metadata = msgpack.unpackb(websocket.recv(), object_hook=_from_map)["data"]
        self.features = metadata.get("features", [])
        if self.fault == "requires a key":
            metadata["action_horizon"]
        if self.held is not None and self.fault == "resends held feedback":
            websocket.send(self.held)  # no action has come since: it may not have arrived
        self.held = None
        if self.fault != "sends before metadata":
            self.send(websocket, self.infer(rows, first=True))
        while True:
            data = self.next(websocket)
            if isinstance(data, str):
                self.give_up(websocket, rows)
                continue
            self.take(rows, msgpack.unpackb(data, object_hook=_from_map)["data"]["action"])
            self.hang_if_it_must()
            done, rewards = self.step()
            if self.fault == "feeds back half":
                done, rewards = done[:1], rewards[:1]
            self.held = self.packed(self.feedback(done, rewards))
            for row in done:
                del self.chunks[row]
                if row in self.ended:
                    self.totals[row] = 0.0
            if self.fault == "two infers":
                self.send(websocket, self.infer(rows))
            websocket.send(self.held)
            self.fed.update(done)
            self.exchanges += 1
            if self.fault.startswith("finishes") and self.exchanges == 5:
                self.finish(websocket)
            rows = list(range(self.count)) if self.fault == "feeds back half" else done
            self.send(websocket, self.infer(rows))

    def next(self, websocket: Any) -> Any:
        if self.fault == "stops reading":
            os.kill(os.getpid(), signal.SIGSTOP)
        return websocket.recv()

    def give_up(self, websocket: Any, rows: list[int]) -> None:
        """Deal with a text frame [7.4]."""
        if self.fault == "answers a text frame":
            self.send(websocket, self.infer(rows))
        elif self.fault != "ignores a text frame":
            sys.exit(0 if self.fault == "exits with 0 after text" else 4)

    def finish(self, websocket: Any) -> None:
        """Leave as a client does that has had enough [7.5]."""
        if self.fault == "finishes without a close frame":
            os._exit(0)
        websocket.close()
        sys.exit(6 if self.fault == "finishes badly" else 0)

    def hang_if_it_must(self) -> None:
        if self.fault != "hangs" or self.exchanges < 2:
            return
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stderr.write(f"\nhanging: {os.getpid()} {child.pid}\n")
        sys.stderr.flush()
        time.sleep(600)

    def packed(self, message: Any) -> bytes:
        packed: bytes = msgpack.packb(message, default=_to_map)
        return packed

    def send(self, websocket: Any, message: Any) -> None:
        if self.fault == "json":
            websocket.send(b'{"message_type": "infer"}')
        elif self.fault == "text frames":
            websocket.send('{"message_type": "infer"}')
        else:
            websocket.send(self.packed(message))

    def run(self) -> int:
        options: dict[str, Any] = {
            "compression": "deflate" if self.fault == "offers compression" else None,
            "max_size": 2**20 if self.fault == "keeps the 1 MiB cap" else None,
        }
        status = None
        while status is None:
            status = self.attempt(options)
        return status

    def attempt(self, options: dict[str, Any]) -> int | None:
        """Connect and serve; give the exit status, or None to come back."""
        try:
            with connect(self.url, **options) as websocket:
                if self.fault == "leaves at once":
                    return 0
                if self.fault == "two connections":
                    with connect(self.url, **options):
                        self.serve(websocket)
                self.serve(websocket)
        except ConnectionRefusedError:
            return 1
        except ConnectionClosed as closed:
            reason = "" if closed.rcvd is None else closed.rcvd.reason
            if reason == "plugrl-server-resync":
                return 5 if self.fault == "quits at a resync" else None
            if reason != "plugrl-server-stop":
                return 1
            if self.fault == "reconnects after stop":
                return None
            if self.fault == "lingers after stop":
                time.sleep(600)
            return 3 if self.fault == "exits non-zero" else 0
        raise AssertionError("serving ends by raising")


def main() -> int:
    url, count, *fault = sys.argv[1:]
    if fault == ["never connects"]:
        return 7
    return Client(url, int(count), fault[0] if fault else "").run()


if __name__ == "__main__":
    sys.exit(main())
