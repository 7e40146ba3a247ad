"""Times `fit` in env steps per second after warm-up, and against Stable-Baselines3 on the same work.

    python tests/benchmarks/fit_speed.py                       # DQN on 1 and 8 lanes
    python tests/benchmarks/fit_speed.py --peer .peers/bin/python --rounds 5
    python tests/benchmarks/fit_speed.py --agent ppo --peer .peers/bin/python --rounds 5     # PPO on 8 and 64 lanes

The work: CartPole-v1, network 64-64, Adam, in-process lanes, one intra-op thread on both sides. DQN: batch 32, one
gradient step per env step, target copied every 500 env steps. PPO: tanh, 128 steps per lane, 4 epochs of batches of
256; 64 lanes, in this process and in worker processes, are compared with the peer's 8. The peer's Python needs
`stable-baselines3` and a CPU build of `torch`.
Rounds alternate between the two; the ratio is taken within a round and the median is reported.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap
import time

DQN = """
    import sys, time
    from rl import backend
    backend.set_threads(1)
    import gymnasium, keras
    from rl.agents import DQNAgent
    from rl.common.vec_env import DummyVecEnv
    from rl.memory import SequentialMemory

    lanes, steps, profile = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "profile"
    make = lambda: gymnasium.make("CartPole-v1")
    env = make() if lanes == 1 else DummyVecEnv([make] * lanes)
    layers = [keras.layers.Input((1, 4)), keras.layers.Flatten(), keras.layers.Dense(64, "relu"),
              keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
    agent = DQNAgent(keras.Sequential(layers), nb_actions=2, memory=SequentialMemory(50_000, window_length=1),
                     nb_steps_warmup=1000, target_model_update=500)
    agent.compile(keras.optimizers.Adam(1e-3))
    agent.fit(env, nb_steps=max(2000, steps // 3), verbose=0)
"""

PPO = """
    import sys, time
    from rl import backend
    backend.set_threads(1)
    import gymnasium, keras
    from rl.agents import PPOAgent
    from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
    from rl.networks import actor_critic

    lanes, steps, profile, workers = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "profile", sys.argv[5] != "0"
    make = lambda: gymnasium.make("CartPole-v1")
    env = SubprocVecEnv([make] * lanes) if workers else DummyVecEnv([make] * lanes)
    agent = PPOAgent(*actor_critic(env), env.action_space, nb_rollout_steps=128, nb_epochs=4, batch_size=256)
    agent.compile(keras.optimizers.Adam(3e-4, epsilon=1e-5))
    agent.fit(env, nb_steps=max(2 * 128 * lanes, steps // 3), verbose=0)
"""

TIMED = """
    spent = {}
    if profile:
        def timed(owner, name, label):
            inner = getattr(owner, name)
            def call(*args, **kwargs):
                start = time.perf_counter()
                try:
                    return inner(*args, **kwargs)
                finally:
                    spent[label] = spent.get(label, 0.0) + time.perf_counter() - start
            object.__setattr__(owner, name, call)
        driver = agent._lanes.driver
        timed(driver, "step", "env")
        timed(driver, "observe", "env")
        timed(agent, "act", "act")
        memory = getattr(agent, "memory", None)
        timed(memory or agent.storage, "extend" if memory else "append", "memory: store")
        if memory:
            timed(memory, "sample_batch", "memory: sample")
        timed(agent, "_update" if memory else "_learn", "update")
    start, first = time.perf_counter(), agent.step
    agent.fit(env, nb_steps=steps, verbose=0)
    wall, done = time.perf_counter() - start, agent.step - first
    print("RESULT", done / wall)
    if profile:
        spent["update"] -= spent.get("memory: sample", 0.0)
        spent["loop, hooks, schedule"] = wall - sum(spent.values())
        for label, seconds in spent.items():
            print(f"{label:24s} {1e6 * seconds / (done / lanes):8.1f} us per vector step")
"""

PEER = """
    import sys, time
    import torch
    torch.set_num_threads(1)
    from stable_baselines3 import DQN, PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    lanes, steps = int(sys.argv[1]), int(sys.argv[2])

    class Stopwatch(BaseCallback):
        start = None
        def _on_step(self):
            if self.start is None and self.num_timesteps >= max(2000, steps // 3):
                self.start, self.first = time.perf_counter(), self.num_timesteps
            return True
        def _on_training_end(self):
            print("RESULT", (self.num_timesteps - self.first) / (time.perf_counter() - self.start))

    env = make_vec_env("CartPole-v1", n_envs=lanes, seed=0)
    if sys.argv[4] == "ppo":
        model = PPO("MlpPolicy", env, n_steps=128, batch_size=256, n_epochs=4, device="cpu")
    else:
        model = DQN("MlpPolicy", env, learning_rate=1e-3, buffer_size=50_000, learning_starts=1000, batch_size=32,
                    train_freq=1, gradient_steps=lanes, target_update_interval=500,
                    policy_kwargs=dict(net_arch=[64, 64]), device="cpu")
    model.learn(steps + max(2000, steps // 3), callback=Stopwatch())
"""


# Of each agent: our code; what is timed: (lanes, in worker processes?, lanes of the peer to compare with).
AGENTS = {
    "dqn": (DQN + TIMED, [(1, False, 1), (8, False, 8)]),
    "ppo": (PPO + TIMED, [(8, False, 8), (64, False, 8), (64, True, 8)]),
}


def rate(python: str, code: str, lanes: int, steps: int, mode: str, agent: str, workers: bool) -> float:
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    command = [python, "-c", textwrap.dedent(code), str(lanes), str(steps), mode, agent, str(int(workers))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} failed:\n{done.stderr}")
    if mode == "profile":
        print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("RESULT")))
    return float(next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=list(AGENTS), default="dqn")
    parser.add_argument("--steps", type=int, default=None, help="timed env steps per 8 lanes, half of it on one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", help="a Python with stable-baselines3")
    parser.add_argument("--profile", action="store_true", help="show where the time of a vector step goes")
    parser.add_argument("--json", help="write all figures to this file")
    args = parser.parse_args()

    code, compared = AGENTS[args.agent]
    total = args.steps or {"dqn": 8000, "ppo": 40_000}[args.agent]
    figures: dict[str, list[float]] = {}
    for lanes, workers, peer_lanes in compared:
        steps, peer_steps = (total * max(n, 4) // 8 for n in (lanes, peer_lanes))
        if args.profile:
            print(f"{lanes} lane(s){', worker processes' * workers}:")
            rate(sys.executable, code, lanes, steps, "profile", args.agent, workers)
            continue
        ours, peers = [], []
        for _ in range(args.rounds):
            ours.append(rate(sys.executable, code, lanes, steps, "plain", args.agent, workers))
            if args.peer:
                peers.append(rate(args.peer, PEER, peer_lanes, peer_steps, "plain", args.agent, False))
        name = f"{lanes} lane(s){', worker processes' * workers}"
        figures[f"ours, {name}"], figures[f"sb3, {peer_lanes} lane(s), beside {name}"] = ours, peers
        line = f"{name}: {statistics.median(ours):7.0f} env steps/s"
        if peers:
            ratios = sorted(a / b for a, b in zip(ours, peers, strict=True))
            peer = f"Stable-Baselines3 on {peer_lanes} {statistics.median(peers):7.0f}"
            line += f", {peer}, ratio {statistics.median(ratios):.2f}"
            line += f" ({ratios[0]:.2f} to {ratios[-1]:.2f} in {args.rounds} rounds)"
        print(line, flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"time": time.strftime("%Y-%m-%d"), **figures}, file, indent=1)


if __name__ == "__main__":
    main()
