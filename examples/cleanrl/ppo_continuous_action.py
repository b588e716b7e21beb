"""PPO for continuous actions in one file, in CleanRL's manner, with the environments here or elsewhere.

    python examples/cleanrl/ppo_continuous_action.py --remote-port 8000
    plugrl-env-client --env-factory examples.cleanrl.ppo_continuous_action:make_env --num-envs 16

Without ``--remote-port`` the same environments run in this process, and the weights come out the same. The two arms
differ in the line of ``main`` that makes ``envs``. It runs with Gymnasium 0.29.1, which CleanRL pins, and with 1.x.
Needs the extras ``cleanrl`` and ``mujoco``.
"""

from __future__ import annotations

import hashlib
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
import tyro
from torch import nn
from torch.distributions import Normal
from torch.utils.tensorboard import SummaryWriter

from plugrl_bridges.cleanrl import make_envs

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# From Gymnasium 1.1 on a vector env must be told to begin the next episode in the step that ends one, as 0.29 does.
SAME_STEP: dict[str, Any] = (
    {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP} if hasattr(gym.vector, "AutoresetMode") else {}
)


@dataclass
class Args:
    """Settings of a run."""

    exp_name: str = "ppo_continuous_action"
    """name of the experiment"""
    seed: int = 1
    """seed of everything; environment i gets seed + i"""
    remote_port: int | None = None
    """port to listen on for env clients; None runs the environments in this process"""
    env_id: str = "HalfCheetah-v5"
    """environments of this process; a client is told with its --env-kwargs"""
    normalize: bool = True
    """normalise and clip observations and rewards in each environment; a client is told with its --env-kwargs"""
    num_envs: int = 16
    """environments, here or of all clients together"""
    total_timesteps: int = 409_600
    """env steps of all environments together"""
    num_steps: int = 128
    """steps of each environment per rollout"""
    learning_rate: float = 3e-4
    """at the beginning"""
    anneal_lr: bool = True
    """let the learning rate fall to 0"""
    gamma: float = 0.99
    """discount; the factory's default is the same"""
    gae_lambda: float = 0.95
    """of generalised advantage estimation"""
    num_minibatches: int = 32
    """minibatches per epoch"""
    update_epochs: int = 10
    """epochs per rollout"""
    norm_adv: bool = True
    """normalise the advantages of a minibatch"""
    clip_coef: float = 0.2
    """how far the ratio of probabilities may go from 1"""
    clip_vloss: bool = True
    """clip the change of the value too"""
    ent_coef: float = 0.0
    """weight of the entropy"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """of the gradient of all parameters"""
    target_kl: float | None = None
    """stop the epochs of a rollout beyond this divergence"""
    cuda: bool = False
    """compute on the accelerator if there is one"""
    threads: int = 1
    """torch's threads; with more, sums depend on the machine, and clients beside this process get less of it"""
    runs: Path = Path("runs")
    """folder for what is logged"""


# Environments: this part also runs in the client ----------------------------------------------------------------------


class Clip(gym.Wrapper[Any, Any, Any, Any]):
    """Clip observations and rewards to [-10, 10] once they are normalised."""

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Clip the first observation."""
        observation, info = self.env.reset(**kwargs)
        return np.clip(observation, -10, 10), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Clip the observation and the reward."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return np.clip(observation, -10, 10), min(max(float(reward), -10.0), 10.0), terminated, truncated, info


def make_env(
    env_id: str = Args.env_id, gamma: float = Args.gamma, *, normalize: bool = Args.normalize
) -> gym.Env[Any, Any]:
    """Make one environment with the usual wrappers; here, or in the client as its ``--env-factory``.

    The statistics stand below the normalisation, so that the returns logged are those of the task.
    """
    env: gym.Env[Any, Any] = gym.wrappers.FlattenObservation(gym.make(env_id))
    env = gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(env))
    if normalize:
        env = Clip(gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(env), gamma=gamma))
    return env


def finished_episodes(infos: Mapping[str, Any]) -> Iterator[tuple[float, int]]:
    """Give return and length of each episode that ended in this step, from the infos of any Gymnasium since 0.29."""
    final = infos.get("final_info")
    if isinstance(final, dict):  # 1.x, SAME_STEP: arrays, and a mask beside them
        ended, record = infos["_final_info"], final["episode"]
    elif final is not None:  # 0.29: a dict or None per environment, and a record of arrays of one
        for info in final:
            if info is not None:
                yield np.asarray(info["episode"]["r"]).item(), np.asarray(info["episode"]["l"]).item()
        return
    elif "episode" in infos:  # 1.x, NEXT_STEP
        ended, record = infos["_episode"], infos["episode"]
    else:
        return
    for row in np.flatnonzero(ended):
        yield np.asarray(record["r"][row]).item(), np.asarray(record["l"][row]).item()


# Policy ---------------------------------------------------------------------------------------------------------------


def linear(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    """Make a layer with orthogonal weights and no bias to begin with."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def network(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Make two hidden layers of 64 and an output."""
    return nn.Sequential(linear(inputs, 64), nn.Tanh(), linear(64, 64), nn.Tanh(), linear(64, outputs, last_gain))


class Agent(nn.Module):
    """Value and Gaussian policy of a flat observation, with one deviation per action for all states."""

    def __init__(self, observations: int, actions: int) -> None:
        super().__init__()
        self.critic = network(observations, 1, 1.0)
        self.actor_mean = network(observations, actions, 0.01)
        self.actor_logstd = nn.Parameter(torch.zeros(1, actions))

    def value(self, observation: torch.Tensor) -> torch.Tensor:
        """Give the values, shape [n]."""
        value: torch.Tensor = self.critic(observation)
        return value.squeeze(-1)

    def policy(self, observation: torch.Tensor) -> Any:
        """Give the distribution of the actions, a `Normal`; torch's distributions have no types."""
        mean: torch.Tensor = self.actor_mean(observation)
        return Normal(mean, self.actor_logstd.exp().expand_as(mean))


# Training -------------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """What a rollout holds, time first: tensors [num_steps, num_envs, ...]."""

    observations: torch.Tensor
    actions: torch.Tensor
    logprobs: torch.Tensor
    rewards: torch.Tensor
    begins: torch.Tensor
    """1 where the observation is the first of its episode"""
    values: torch.Tensor

    def flat(self, data: torch.Tensor) -> torch.Tensor:
        """Join steps and environments to one axis."""
        return data.reshape(-1, *data.shape[2:])


def advantages_of(rollout: Rollout, next_value: torch.Tensor, next_begin: torch.Tensor, args: Args) -> torch.Tensor:
    """Estimate the advantages (GAE); an episode's end cuts them off."""
    steps = len(rollout.rewards)
    advantages = torch.zeros_like(rollout.rewards)
    following = torch.zeros_like(next_value)
    for t in reversed(range(steps)):
        last = t == steps - 1
        goes_on = 1.0 - (next_begin if last else rollout.begins[t + 1])
        value = next_value if last else rollout.values[t + 1]
        delta = rollout.rewards[t] + args.gamma * value * goes_on - rollout.values[t]
        following = delta + args.gamma * args.gae_lambda * goes_on * following
        advantages[t] = following
    return advantages


def update(
    agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, advantages: torch.Tensor, args: Args
) -> dict[str, float]:
    """Improve the agent on one rollout; give what is to be logged."""
    observations, actions = rollout.flat(rollout.observations), rollout.flat(rollout.actions)
    logprobs, values = rollout.flat(rollout.logprobs), rollout.flat(rollout.values)
    advantages = rollout.flat(advantages)
    returns = advantages + values
    size = len(values)
    order = np.arange(size)
    clipped: list[float] = []
    logged: dict[str, float] = {}
    for _ in range(args.update_epochs):
        np.random.shuffle(order)  # noqa: NPY002 - CleanRL's manner: one global generator, seeded once
        for start in range(0, size, size // args.num_minibatches):
            picked = torch.as_tensor(order[start : start + size // args.num_minibatches], device=values.device)
            policy, value = agent.policy(observations[picked]), agent.value(observations[picked])
            log_ratio = policy.log_prob(actions[picked]).sum(1) - logprobs[picked]
            ratio = log_ratio.exp()
            with torch.no_grad():
                kl = ((ratio - 1) - log_ratio).mean().item()  # the estimator that is never negative
                clipped.append(((ratio - 1).abs() > args.clip_coef).float().mean().item())
            gain = advantages[picked]
            if args.norm_adv:
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            bounded = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            policy_loss = torch.max(-gain * ratio, -gain * bounded).mean()
            errors = (value - returns[picked]) ** 2
            if args.clip_vloss:
                near = values[picked] + (value - values[picked]).clamp(-args.clip_coef, args.clip_coef)
                errors = torch.max(errors, (near - returns[picked]) ** 2)
            value_loss = 0.5 * errors.mean()
            entropy = policy.entropy().sum(1).mean()
            loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            logged = {
                "value_loss": value_loss.item(), "policy_loss": policy_loss.item(), "entropy": entropy.item(),
                "approx_kl": kl, "clipfrac": float(np.mean(clipped)),
            }  # fmt: skip
        if args.target_kl is not None and logged["approx_kl"] > args.target_kl:
            break
    spread = returns.var().item()
    logged["explained_variance"] = 1 - (returns - values).var().item() / spread if spread else float("nan")
    return logged


def train(envs: gym.vector.VectorEnv[Any, Any, Any], args: Args, writer: SummaryWriter) -> Agent:
    """Train on a vector env; give the agent."""
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    observation_space, action_space = envs.single_observation_space, envs.single_action_space
    if not isinstance(observation_space, gym.spaces.Box) or not isinstance(action_space, gym.spaces.Box):
        raise TypeError(f"expected Box spaces, got {observation_space} and {action_space}")
    agent = Agent(int(np.prod(observation_space.shape)), int(np.prod(action_space.shape))).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    shape = (args.num_steps, args.num_envs)
    rollout = Rollout(
        torch.zeros(*shape, *observation_space.shape, device=device),
        torch.zeros(*shape, *action_space.shape, device=device),
        *(torch.zeros(shape, device=device) for _ in range(4)),
    )

    step, episodes, started = 0, 0, time.perf_counter()
    first, _ = envs.reset(seed=args.seed)
    observation = torch.as_tensor(first, dtype=torch.float32, device=device)
    begin = torch.ones(args.num_envs, device=device)
    iterations = args.total_timesteps // (args.num_steps * args.num_envs)
    for iteration in range(iterations):
        if args.anneal_lr:
            optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / iterations)
        for t in range(args.num_steps):
            with torch.no_grad():
                policy = agent.policy(observation)
                action = policy.sample()
                rollout.values[t] = agent.value(observation)
            rollout.observations[t], rollout.actions[t], rollout.begins[t] = observation, action, begin
            rollout.logprobs[t] = policy.log_prob(action).sum(1)
            following, reward, terminated, truncated, infos = envs.step(action.cpu().numpy())
            done = np.logical_or(terminated, truncated)
            rollout.rewards[t] = torch.as_tensor(reward, dtype=torch.float32, device=device)
            observation = torch.as_tensor(following, dtype=torch.float32, device=device)
            begin = torch.as_tensor(done, dtype=torch.float32, device=device)
            step += args.num_envs
            told = list(finished_episodes(infos))
            if len(told) != done.sum():  # a layout of the infos that is not known would log nothing, without a word
                raise RuntimeError(f"{done.sum()} episodes ended, but the infos tell of {len(told)}: {infos}")
            for ret, length in told:
                episodes += 1
                writer.add_scalar("charts/episodic_return", ret, step)
                writer.add_scalar("charts/episodic_length", length, step)
            if told:
                print(f"global_step={step}, episodic_return={np.mean([ret for ret, _ in told]):.1f}", flush=True)
        with torch.no_grad():
            advantages = advantages_of(rollout, agent.value(observation), begin, args)
        for name, value in update(agent, optimizer, rollout, advantages, args).items():
            writer.add_scalar(f"losses/{name}", value, step)
        writer.add_scalar("charts/learning_rate", optimizer.param_groups[0]["lr"], step)
        writer.add_scalar("charts/SPS", step / (time.perf_counter() - started), step)
    print(f"SPS: {step / (time.perf_counter() - started):.0f}, {episodes} episodes")
    return agent


def main(args: Args) -> str:
    """Train; give the SHA-256 of the weights."""
    folder = args.runs / f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
    writer = SummaryWriter(str(folder))
    rows = "".join(f"|{name}|{value}|\n" for name, value in asdict(args).items())
    writer.add_text("hyperparameters", f"|name|value|\n|-|-|\n{rows}")
    random.seed(args.seed)
    np.random.seed(args.seed)  # noqa: NPY002 - see update
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    makers = [lambda: make_env(args.env_id, args.gamma, normalize=args.normalize)] * args.num_envs
    envs: gym.vector.VectorEnv[Any, Any, Any] = (
        gym.vector.SyncVectorEnv(makers, **SAME_STEP)
        if args.remote_port is None
        else make_envs(num_envs=args.num_envs, port=args.remote_port, episode_log=folder / "episodes.csv")
    )
    agent = train(envs, args, writer)
    envs.close()
    writer.close()
    sha = hashlib.sha256()
    for key, value in agent.state_dict().items():
        sha.update(key.encode() + value.cpu().numpy().tobytes())
    print(f"weights: sha256 {sha.hexdigest()}\nlogged in {folder}")
    return sha.hexdigest()


if __name__ == "__main__":
    main(tyro.cli(Args))
