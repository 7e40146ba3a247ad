"""The works that `compare.py` times. One work runs in a process of its own, in our Python or in the peers':

    KERAS_BACKEND=jax python tests/benchmarks/works.py '{"library": "rl", "work": "dqn", "lanes": 8, "steps": 8000}'

With Adam, one thread, and CartPole-v1 with networks 64-64 unless told otherwise: `dqn` takes one gradient step of batch
32 per env step and copies the target every 500; `ppo` takes 128 steps per lane, then 4 epochs of batches of 256;
`atari` is DQN on Pong with the network of the Nature paper, a gradient step every 4 env steps; `sac` takes one gradient
step of batch 256 per env step of Pendulum-v1, networks of `units`-`units`; `step` takes random actions and learns
nothing.
The last line printed says how fast, and what was done: parameters, gradient steps per env step, CPU time per second
(above 1 more than one thread was at work), and the mean return of the last 20 training episodes.
"""

import importlib
import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace

DEFAULTS = {"library": "rl", "work": "dqn", "lanes": 1, "steps": 4000, "warmup": 3000}
DEFAULTS |= {"seed": 0, "envs": "dummy", "fused": 1, "profile": False, "units": 256}
DQN = {"learning_rate": 1e-3, "limit": 50_000, "train_interval": 1, "target": 500, "begin": 1000}
ATARI = {"learning_rate": 1e-4, "limit": 5000, "train_interval": 4, "target": 1000, "begin": 100}
SAC = {"learning_rate": 1e-3, "limit": 50_000, "batch_size": 256}


class Stopwatch:
    """Wall and CPU time of this process, and counters, from when it is made."""

    def __init__(self, steps, updates=0):
        self.steps, self.updates = steps, updates
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self, steps, updates=0, returns=(), parameters=None):
        wall, cpu, steps = time.perf_counter() - self.wall, time.process_time() - self.cpu, steps - self.steps
        last = list(returns)[-20:]
        return {
            "rate": steps / wall,
            "return": sum(map(float, last)) / len(last) if last else None,
            "updates": (updates - self.updates) / steps,
            "parameters": parameters,
            "cores": cpu / wall,
        }


def ours(spec):
    """Ours; with `profile`, where the time of a vector step goes, too."""
    from rl import backend

    backend.set_threads(1)
    import keras

    from rl.agents import DQNAgent, PPOAgent, SACAgent
    from rl.memory import SequentialMemory
    from rl.networks import actor_critic, stochastic_actor_critic
    from rl.policy import EpsGreedyQPolicy, LinearAnnealedPolicy

    keras.utils.set_random_seed(spec.seed)
    env = our_envs(spec)
    if spec.work == "ppo":
        agent = PPOAgent(*actor_critic(env), env.action_space, nb_rollout_steps=128, nb_epochs=4, batch_size=256)
        agent.compile(keras.optimizers.Adam(3e-4, epsilon=1e-5))
    elif spec.work == "sac":
        networks, begin = stochastic_actor_critic(env, (spec.units, spec.units)), min(1000, spec.warmup // 2)
        options = {"batch_size": SAC["batch_size"], "nb_steps_warmup": begin}
        agent = SACAgent(1, *networks, SequentialMemory(SAC["limit"]), **options)
        adam = keras.optimizers.Adam(SAC["learning_rate"], epsilon=1e-8)
        agent.compile(adam, steps_per_execution=spec.fused)
    else:
        given, is_atari, nb_actions = (ATARI, True, 6) if spec.work == "atari" else (DQN, False, 2)
        torch_start = keras.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
        layers = [keras.layers.Input((1, 4)), keras.layers.Flatten()]
        layers += [keras.layers.Dense(64, "relu", kernel_initializer=torch_start.clone()) for _ in range(2)]
        dense = keras.Sequential([*layers, keras.layers.Dense(2, kernel_initializer=torch_start.clone())])
        anneal = {"attr": "eps", "value_max": 1.0, "value_min": 0.05, "value_test": 0.0}
        agent = DQNAgent(
            example("dqn_atari").make_model(nb_actions) if is_atari else dense,
            nb_actions=nb_actions,
            memory=SequentialMemory(given["limit"], window_length=4 if is_atari else 1),
            policy=LinearAnnealedPolicy(EpsGreedyQPolicy(), nb_steps=(spec.warmup + spec.steps) // 10, **anneal),
            nb_steps_warmup=min(given["begin"], spec.warmup // 2),
            train_interval=given["train_interval"],
            target_model_update=given["target"],
            delta_clip=1.0,
        )
        adam = keras.optimizers.Adam(given["learning_rate"], epsilon=1e-8, global_clipnorm=10.0)
        agent.compile(adam, steps_per_execution=spec.fused)
    returns = agent.fit(env, nb_steps=spec.warmup, seed=spec.seed, verbose=0).history.get("episode_reward", [])
    spent = profiled(agent) if spec.profile else {}
    watch = Stopwatch(agent.step, agent.run_state.nb_updates)
    returns = returns + agent.fit(env, nb_steps=spec.steps, verbose=0).history.get("episode_reward", [])
    parameters = sum(math.prod(v.shape) for v in agent.trainable_variables)
    result = watch.stop(agent.step, agent.run_state.nb_updates, returns, parameters)
    env.close()
    if spent:
        spent["update"] -= spent.get("memory: sample", 0.0)
        spent["loop, hooks, schedule"] = spec.steps / result["rate"] - sum(spent.values())
        result["profile"] = {label: 1e6 * seconds * spec.lanes / spec.steps for label, seconds in spent.items()}
    return result


def our_envs(spec):
    import gymnasium

    from rl.common.cmd_util import make_gym_env
    from rl.common.vec_env import DummyVecEnv, SubprocVecEnv

    def make():
        return gymnasium.make("Pendulum-v1" if spec.work == "sac" else "CartPole-v1")

    if spec.work == "atari":
        return example("dqn_atari").make_env("ALE/Pong-v5", training=True)
    if spec.envs == "native":
        return make_gym_env("CartPole-v1", spec.lanes, seed=spec.seed, vec_env_cls="native")
    if spec.lanes == 1 and spec.work != "step":
        return make()
    return {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[spec.envs]([make] * spec.lanes)


def example(name):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
    return importlib.import_module(name)


def profiled(agent):
    """Has the parts of a vector step timed, in seconds by label, from now on."""
    spent = {}

    def timed(owner, name, label):
        inner = getattr(owner, name)

        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                spent[label] = spent.get(label, 0.0) + time.perf_counter() - start

        object.__setattr__(owner, name, call)

    timed(agent._lanes.driver, "step", "env")
    timed(agent._lanes.driver, "observe", "env")
    timed(agent, "act", "act")
    memory = getattr(agent, "memory", None)
    timed(memory or agent.storage, "extend" if memory else "append", "memory: store")
    if memory:
        timed(memory, "sample_batch", "memory: sample")
    timed(agent, "_update" if memory else "_learn", "update")
    return spent


def peer(spec):
    """Stable-Baselines3 (`sb3`), or SBX, which shares its loop and its envs (`sbx`)."""
    import torch

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    from stable_baselines3.common.callbacks import BaseCallback

    class Timed(BaseCallback):
        watch = None

        def _on_step(self):
            return True

        def _on_rollout_start(self):  # where whole rollouts, and the learning from them, lie behind
            if self.watch is None and self.num_timesteps >= spec.warmup:
                self.watch = Stopwatch(self.num_timesteps, work_done(self.model)[0])

        def _on_training_end(self):
            updates, parameters = work_done(self.model)
            returns = [episode["r"] for episode in self.model.ep_info_buffer]
            self.result = self.watch.stop(self.num_timesteps, updates, returns, parameters)

    library = importlib.import_module({"sb3": "stable_baselines3", "sbx": "sbx"}[spec.library])
    env, common = peer_envs(spec), {"seed": spec.seed, "device": "cpu"}
    if spec.work == "ppo":
        model = library.PPO("MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=4, **common)
    elif spec.work == "sac":
        model = library.SAC(
            "MlpPolicy",
            env,
            learning_rate=SAC["learning_rate"],
            buffer_size=SAC["limit"],
            learning_starts=min(1000, spec.warmup // 2),
            batch_size=SAC["batch_size"],
            train_freq=1,
            gradient_steps=spec.lanes,
            policy_kwargs={"net_arch": [spec.units, spec.units]},
            **common,
        )
    else:
        given, is_atari = (ATARI, True) if spec.work == "atari" else (DQN, False)
        model = library.DQN(
            "CnnPolicy" if is_atari else "MlpPolicy",
            env,
            learning_rate=given["learning_rate"],
            buffer_size=given["limit"],
            learning_starts=min(given["begin"], spec.warmup // 2),
            batch_size=32,
            train_freq=given["train_interval"],
            gradient_steps=spec.lanes if given["train_interval"] == 1 else 1,
            target_update_interval=given["target"],
            policy_kwargs={} if is_atari else {"net_arch": [64, 64]},
            **common,
        )
    timed = Timed()
    model.learn(spec.warmup + spec.steps, callback=timed)
    return timed.result


def peer_envs(spec):
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    def make_pong():
        import ale_py
        import gymnasium as gym

        gym.register_envs(ale_py)
        env = gym.wrappers.AtariPreprocessing(
            gym.make("ALE/Pong-v5", frameskip=1), noop_max=30, terminal_on_life_loss=True
        )
        return gym.wrappers.FrameStackObservation(gym.wrappers.ClipReward(env, -1.0, 1.0), 4)

    kind = {"dummy": DummyVecEnv, "subproc": SubprocVecEnv}[spec.envs]
    env = {"atari": make_pong, "sac": "Pendulum-v1"}.get(spec.work, "CartPole-v1")
    return make_vec_env(env, n_envs=spec.lanes, seed=spec.seed, vec_env_cls=kind)


def work_done(model):
    """How many gradient steps the optimizer has taken, and of how many parameters."""
    policy = model.policy
    if hasattr(policy, "optimizer"):
        network = getattr(policy, "q_net", policy)
        state = next(iter(policy.optimizer.state.values()), {"step": 0})
        return int(state["step"]), sum(p.numel() for p in network.parameters())
    if hasattr(policy, "critic"):  # SAC of sb3; one more is the temperature, here and below
        return model._n_updates, 1 + sum(p.numel() for x in (policy.actor, policy.critic) for p in x.parameters())
    import jax

    states = [getattr(policy, name) for name in ("qf_state", "actor_state", "vf_state") if hasattr(policy, name)]
    parameters = sum(p.size for s in states for p in jax.tree.leaves(s.params))
    return int(states[0].step), parameters + hasattr(model, "ent_coef_state")


def stepping(spec):
    """Random actions: what the envs alone can do."""
    import numpy as np

    if spec.library == "envpool":
        import envpool

        env = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=spec.lanes, num_threads=1)
    else:
        env = our_envs(spec) if spec.library == "rl" else peer_envs(spec)
    env.reset()
    actions = np.random.default_rng(spec.seed).integers(0, 2, (64, spec.lanes))
    for nb_steps in (spec.warmup, spec.steps):
        watch = Stopwatch(0)
        nb_calls = -(-nb_steps // spec.lanes)
        for i in range(nb_calls):
            env.step(actions[i % 64])
        result = watch.stop(nb_calls * spec.lanes)
    env.close()
    return result


def main():
    spec = SimpleNamespace(**(DEFAULTS | json.loads(sys.argv[1])))
    unit = spec.lanes * (128 if spec.work == "ppo" else spec.fused)  # whole rollouts, whole calls
    spec.warmup = max(2, -(-spec.warmup // unit)) * unit
    spec.steps = -(-spec.steps // unit) * unit
    run = stepping if spec.work == "step" else ours if spec.library == "rl" else peer
    print("RESULT", json.dumps(run(spec)))


if __name__ == "__main__":
    main()
