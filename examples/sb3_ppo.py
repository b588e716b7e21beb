"""Train PPO on the environments of whatever env client connects.

plugrl-env-client --env-id Pendulum-v1 --num-envs 16
"""

from stable_baselines3 import PPO

from plugrl_bridges.sb3 import PlugRemoteVecEnv, make_vec_env

env = make_vec_env(PlugRemoteVecEnv(port=8000))
PPO("MlpPolicy", env, seed=0, verbose=1).learn(100_000, progress_bar=True)
env.close()
