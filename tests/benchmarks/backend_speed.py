"""Times the two compiled functions of a DQN agent on each backend, in microseconds per call.

    python tests/benchmarks/backend_speed.py --rounds 5

Network 64-64, Adam, batch 32. `act` evaluates the network on 8 states; `update` is what one vector step of 1 or 8
lanes owes: as many gradient steps, and the network on the next states, in one call; `64 updates` the same with
`steps_per_execution=64`. Rounds alternate between the backends, each in a process of its own with one thread. A round
counts its fifth-fastest call of each 25; the table has medians over rounds, and the median of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import textwrap

CODE = """
    import json, time
    from rl import backend
    backend.set_threads(1)
    import gymnasium, keras, numpy as np
    from rl.agents import DQNAgent
    from rl.common.vec_env import DummyVecEnv
    from rl.memory import SequentialMemory

    def cost(call, seconds=1.0):
        costs, until = [], time.perf_counter() + seconds
        while time.perf_counter() < until:
            start = time.perf_counter()
            call()
            costs.append(time.perf_counter() - start)
        return 1e6 * float(np.percentile(costs, 20))  # what others do on the machine only makes calls slower

    figures = {}
    for lanes, k in ((1, 1), (8, 1), (8, 64)):
        layers = [keras.layers.Input((1, 4)), keras.layers.Flatten(), keras.layers.Dense(64, "relu"),
                  keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]
        agent = DQNAgent(keras.Sequential(layers), nb_actions=2, memory=SequentialMemory(5000, window_length=1),
                         nb_steps_warmup=100, target_model_update=500)
        agent.compile(keras.optimizers.Adam(1e-3), steps_per_execution=k)
        agent.fit(DummyVecEnv([lambda: gymnasium.make("CartPole-v1")] * lanes), nb_steps=400, verbose=0)
        states, k = np.zeros((lanes, 1, 4), "float32"), max(lanes, k)
        fields = tuple(agent.memory.sample_batch(32, k=k, gamma=0.99))[:-1]
        act, update = agent._functions[0], agent._functions[1]
        if k == 8:
            figures["act, 8 states"] = cost(lambda: act(states))
        figures[f"{k} update(s)"] = cost(lambda: update(fields, np.int32(k), states))
    print(json.dumps(figures))
"""


def measure(name: str) -> dict[str, float]:
    env = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.getcwd(), "KERAS_BACKEND": name}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(CODE)], env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = [(measure("tensorflow"), measure("jax")) for _ in range(parser.parse_args().rounds)]
    print("| us per call | TensorFlow | JAX | ratio |\n| --- | --- | --- | --- |")
    for what in rounds[0][0]:
        ours = [statistics.median(figures[what] for figures in column) for column in zip(*rounds, strict=True)]
        ratio = statistics.median(tf[what] / jax[what] for tf, jax in rounds)
        print(f"| {what} | {ours[0]:.0f} | {ours[1]:.0f} | {ratio:.1f} |")


if __name__ == "__main__":
    main()
