"""The count of what remote envs did while each went at its own pace: per env, per connection, and altogether.

Pure but for the episode log. ``server.policy_server`` tells it of every message; it knows no sockets and no policy.
(Of the vector steps of a lockstep ``episodes`` keeps count.)

An env is known by its connection and its index there. In the log it has a slot: the lowest number that no env has which
is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from plugrl_bridges.server.episodes import EpisodeLog
from plugrl_bridges.wire.info import episode_records

if TYPE_CHECKING:
    import os

    from plugrl_bridges.wire.info import EpisodeRecord
    from plugrl_bridges.wire.messages import Feedback, Infer

__all__ = ["ServedClient", "ServedEpisode", "Tally"]


@dataclass(frozen=True)
class ServedEpisode:
    """One finished episode.

    Attributes:
        client: Number of its connection.
        env: Its env's index on that connection.
        ret: Sum of its rewards, in float64.
        length: Env steps.
        terminated: Whether it terminated; it was truncated otherwise.
        success: What the client says of it, or None.
    """

    client: int
    env: int
    ret: float
    length: int
    terminated: bool
    success: bool | None = None


@dataclass
class ServedClient:
    """Count what one connection did.

    Attributes:
        number: Of the connection, from 1.
        address: Where it came from.
        name: What the client says that it is.
        num_envs: Envs that it has named so far.
        feedbacks: Feedback messages that came.
        steps: Env steps.
        returns: Of its finished episodes, in the order of their ends.
        connected: Whether it is still there.
    """

    number: int
    address: str
    name: str
    num_envs: int = 0
    feedbacks: int = 0
    steps: int = 0
    returns: list[float] = field(default_factory=list)
    connected: bool = True


@dataclass(eq=False)
class _Run:
    """One env on one connection.

    Attributes:
        partial: Whether the running episode began before this connection did.
        ret: Of the running episode, as far as it was seen.
        length: Likewise.
        finished: Its episodes, and how many of all envs' had ended before.
    """

    client: int
    env: int
    slot: int
    partial: bool
    ret: float = 0.0
    length: int = 0
    finished: list[tuple[int, ServedEpisode]] = field(default_factory=list)


class Tally:
    """Count steps and episodes.

    Args:
        horizon: Actions per env in one exchange. With more than one a chunk may end early, and the length of an episode
            is what the client reports in ``info["episode"]``, or else the steps that were sent.

    Attributes:
        clients: Every connection so far, by number.
        episodes: Finished episodes so far.
        steps: Env steps so far.
    """

    def __init__(self, horizon: int) -> None:
        self.clients: dict[int, ServedClient] = {}
        self.episodes = 0
        self.steps = 0
        self._horizon = horizon
        self._feedbacks = 0
        self._runs: dict[int, dict[int, _Run]] = {}
        self._gone: list[tuple[int, ServedEpisode]] = []
        self._free_slots: set[int] = set()
        self._logged: dict[int, int] = {}
        self._log: EpisodeLog | None = None

    @property
    def envs_here(self) -> int:
        """Number of envs on the connections that are there."""
        return sum(map(len, self._runs.values()))

    def write_to(self, path: str | os.PathLike[str]) -> None:
        """Write an episode log from now on; an existing file is replaced."""
        self._log = EpisodeLog(path)

    def arrive(self, number: int, address: str, name: str) -> None:
        """Record a new connection."""
        self.clients[number] = ServedClient(number, address, name)
        self._runs[number] = {}

    def ask(self, number: int, infer: Infer) -> None:
        """Record an infer: an env that it names for the first time gets a slot."""
        runs = self._runs[number]
        for env, chunks in zip(infer.env_indices.tolist(), infer.step_ids.tolist(), strict=True):
            if env not in runs:
                runs[env] = _Run(number, env, self._take_slot(), partial=chunks > 0)
                self.clients[number].num_envs += 1

    def feed_back(self, number: int, feedback: Feedback) -> None:
        """Record a feedback, without the rows of envs that held no action."""
        client, runs = self.clients[number], self._runs[number]
        client.feedbacks += 1
        self._feedbacks += 1
        names = feedback.env_indices.tolist()
        records = episode_records(feedback.info, len(names)) if feedback.info else [None] * len(names)
        for env, reward, terminated, truncated, record in zip(
            names, feedback.rewards.tolist(), feedback.terminated.tolist(), feedback.truncated.tolist(), records,
            strict=True,
        ):  # fmt: skip
            run = runs[env]
            run.ret += reward
            run.length += self._horizon
            self._add_steps(client, self._horizon)
            if terminated or truncated:
                self._end(client, run, terminated=terminated, record=record)

    def leave(self, number: int) -> None:
        """Record the end of a connection: episodes that are running on it are lost, and not counted."""
        if number not in self._runs:
            return
        self.clients[number].connected = False
        for run in self._runs.pop(number).values():
            if run.length:
                self._write(run, "lost")
            self._gone += run.finished
            self._free_slots.add(run.slot)

    def complete(self, episodes: int) -> bool:
        """Return whether so many episodes are there, by each env its share: short ones must not crowd out long ones.

        The shares are those of Stable-Baselines3's ``evaluate_policy``: as equal as can be, the last envs having one
        more. What envs had finished that are gone counts in full, and the others share the rest.
        """
        shares = self._shares(episodes)
        return len(self._gone) >= episodes or (
            bool(shares) and all(len(run.finished) >= share for run, share in shares.items())
        )

    def counted(self, episodes: int | None = None) -> list[ServedEpisode]:
        """Return finished episodes in the order of their ends.

        Args:
            episodes: Only the shares of so many, as `complete` has them; None gives all.
        """
        shares = {run: len(run.finished) for runs in self._runs.values() for run in runs.values()}
        if episodes is not None:
            shares = self._shares(episodes)
        gone = sorted(self._gone, key=lambda each: each[0])[:episodes]
        found = [*gone, *(each for run, share in shares.items() for each in run.finished[:share])]
        return [episode for _, episode in sorted(found, key=lambda each: each[0])]

    def close(self) -> None:
        """Close the episode log."""
        if self._log is not None:
            self._log.close()

    def _shares(self, episodes: int) -> dict[_Run, int]:
        runs = sorted((run for runs in self._runs.values() for run in runs.values()), key=lambda run: run.slot)
        rest = max(0, episodes - len(self._gone))
        return {run: (rest + at) // len(runs) for at, run in enumerate(runs)}

    def _take_slot(self) -> int:
        if self._free_slots:
            slot = min(self._free_slots)
            self._free_slots.remove(slot)
            return slot
        return self.envs_here

    def _add_steps(self, client: ServedClient, steps: int) -> None:
        client.steps += steps
        self.steps += steps

    def _end(self, client: ServedClient, run: _Run, *, terminated: bool, record: EpisodeRecord | None) -> None:
        if record is not None and run.partial:  # only the client has seen all of it
            run.ret, run.length = record.ret, record.length
        elif record is not None and 0 < record.length < run.length and self._horizon > 1:
            self._add_steps(client, record.length - run.length)
            run.length = record.length
        success = None if record is None else record.success
        episode = ServedEpisode(client.number, run.env, run.ret, run.length, terminated, success)
        run.finished.append((self.episodes, episode))
        client.returns.append(run.ret)
        self.episodes += 1
        self._write(run, "terminated" if terminated else "truncated")
        run.ret, run.length, run.partial = 0.0, 0, False

    def _write(self, run: _Run, end: str) -> None:
        at = self._logged.get(run.slot, 0)
        self._logged[run.slot] = at + 1
        if self._log is not None:
            self._log.add(episode=at, slot=run.slot, ret=run.ret, length=run.length, end=end, step=self._feedbacks)
