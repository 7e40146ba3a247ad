"""Long runs and many agents in one process, awkward observations and infos, callbacks that look at every step."""

import gc
import subprocess
import sys
import tracemalloc
import weakref
from pathlib import Path

import gymnasium as gym
import keras
import numpy as np
import pytest
from gymnasium.vector import SyncVectorEnv

from rl.agents.dqn import DQNAgent
from rl.callbacks import Callback
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.core import Agent
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy
from tests.toy_envs import Awkward, Counting

LAYERS = keras.layers
ROOT = Path(__file__).resolve().parents[2]


def network(nb_units=16):
    layers = [LAYERS.Input((1, 3)), LAYERS.Flatten(), LAYERS.Rescaling(0.1), LAYERS.Dense(nb_units, "relu")]
    return keras.Sequential([*layers, LAYERS.Dense(3)])


def make_agent(**options):
    options = {"nb_steps_warmup": 20, "target_model_update": 0.1, "batch_size": 8} | options
    agent = DQNAgent(network(), nb_actions=3, memory=SequentialMemory(1000), **options)
    agent.compile("adam", metrics=["mae"], jit_compile=False)
    return agent


def lanes_of(nb_lanes, **options):
    return DummyVecEnv([lambda i=i: Counting(i) for i in range(nb_lanes)], **options)


def resident_megabytes():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


# ---- memory and traces ---------------------------------------------------------------------------------------------


def test_memory_and_traces_do_not_grow_with_the_steps():
    agent, env, other = make_agent(target_model_update=50), lanes_of(4, autoreset_mode="NextStep"), lanes_of(3)

    def rounds(nb_rounds):
        for _ in range(nb_rounds):
            agent.fit(env, 250, verbose=0)
            agent.test(other, 2, verbose=0, visualize=False)

    rounds(6)
    traces = [function.nb_traces for function in agent._functions]
    assert traces == [2, 1, 1]  # acting on 3 lanes and on 4
    before = resident_megabytes()
    tracemalloc.start()
    first, _ = tracemalloc.get_traced_memory()
    rounds(16)
    gc.collect()
    last, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert resident_megabytes() - before < 20
    assert last - first < 0.5e6
    assert [function.nb_traces for function in agent._functions] == traces
    assert agent.step == 5500


def nb_graphs():
    gc.collect()
    return sum(type(thing).__name__ == "FuncGraph" for thing in gc.get_objects())


def drop_agents():
    """Makes, trains and drops ten agents; returns by how many megabytes the last five of them made the process grow."""
    sizes, agents, before = [], [], nb_graphs()
    for _ in range(10):
        agent = make_agent()
        env = lanes_of(2)
        agent.fit(env, 60, verbose=0)
        agent.test(env, 2, verbose=0, visualize=False)
        agents.append(weakref.ref(agent))
        del agent, env
        if len(agents) in (5, 10):
            sizes.append(resident_megabytes())
    assert [ref() for ref in agents] == [None] * 10
    assert nb_graphs() <= before
    return sizes[1] - sizes[0]


def test_agents_that_are_dropped_are_gone():
    # In a process of its own: the heap of one that has run a thousand tests grows by its own rules.
    code = f"from {__name__} import drop_agents; print(drop_agents())"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 8  # Keras keeps half a megabyte per model until clear_session()


@pytest.mark.parametrize("verbose", [1, 2])
def test_loggers_keep_no_observations(verbose):
    class Images(gym.Env):
        observation_space = gym.spaces.Box(0, 255, (84, 84, 4), np.uint8)
        action_space = gym.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            return np.zeros((84, 84, 4), np.uint8), {}

        def step(self, action):
            return np.zeros((84, 84, 4), np.uint8), 1.0, False, False, {}

    class Constant(Agent):
        metrics_names = ["loss"]

        def act(self, observation):
            return np.zeros(len(observation), int)

        def observe(self, transition):
            return [1.0]

    agent, env = Constant(), Images()
    agent.compile()
    agent.fit(env, 10, verbose=verbose)
    tracemalloc.start()
    agent.fit(env, 2000, verbose=verbose, log_interval=500)  # one episode, of 56 MB
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3e6


# ---- a callback at each step ---------------------------------------------------------------------------------------


class Recorder(Callback):
    """Records state, action and reward of each step, by episode."""

    def __init__(self):
        super().__init__()
        self.steps, self.ends = {}, {}

    def on_step_end(self, step, logs=None):
        rows = self.steps.setdefault(logs["episode"], [])
        assert step == len(rows)
        rows.append((logs["observation"], logs["action"], logs["reward"], logs["metrics"], logs["info"]))

    def on_episode_end(self, episode, logs=None):
        self.ends[episode] = logs


@pytest.mark.parametrize(
    "make", [lambda: lanes_of(8), lambda: SubprocVecEnv([lambda i=i: Counting(i) for i in range(8)])]
)
def test_a_callback_at_each_step_on_eight_lanes(make):
    plain, watched, recorder = make_agent(), make_agent(), Recorder()
    histories = []
    for agent, callbacks in ((plain, []), (watched, [recorder])):
        agent.model.set_weights(plain.model.get_weights())
        env = make()
        histories.append(agent.fit(env, 400, callbacks=callbacks, seed=1, verbose=0).history)
        env.close()
    assert sum(map(len, recorder.steps.values())) == watched.step == 400
    for episode, logs in recorder.ends.items():
        observations, actions, rewards, metrics, infos = zip(*recorder.steps[episode], strict=True)
        length = logs["nb_episode_steps"]
        assert [int(o[2]) for o in observations] == list(range(1, length + 1))
        assert {int(o[0]) for o in observations} == {logs["lane"]}
        assert len({int(o[1]) for o in observations}) == 1
        assert sum(rewards) == logs["episode_reward"]
        assert np.array(metrics).shape == (length, 3)
        assert [info["total"] for info in infos] == list(range(infos[0]["total"], infos[0]["total"] + length))
        assert {int(a) for a in actions} <= {0, 1, 2}
    assert histories[0]["episode_reward"] == histories[1]["episode_reward"]


# ---- awkward observations and infos --------------------------------------------------------------------------------


class Success(Callback):
    """Logs how an episode ended, and checks every info on the way."""

    def __init__(self):
        super().__init__()
        self.nb_steps, self.last = 0, {}

    def on_step_end(self, step, logs=None):
        info, t = logs["info"], step + 1
        self.nb_steps += 1
        assert info["action_mask"].tolist() == [True, False, t % 2 == 0]
        assert info["name"] == f"step {t}"
        assert info["nested"] == {"position": [t, -t], "deeper": {"t": t}}
        assert info["nothing"] is None
        assert info["flag"] == (t % 2 == 0)
        assert info["count"] == t
        assert set(logs["observation"]) == {"image", "vector"}
        assert logs["observation"]["image"].dtype == np.uint8
        assert (logs["observation"]["image"] == t).all()
        self.last[logs["lane"]] = info

    def on_episode_end(self, episode, logs=None):
        logs["success"] = float(self.last.pop(logs["lane"])["is_success"])


def dict_agent():
    image, vector = LAYERS.Input((1, 4, 4, 1), name="image"), LAYERS.Input((1, 2), name="vector")
    x = LAYERS.Concatenate()([LAYERS.Flatten()(LAYERS.Rescaling(0.1)(image)), LAYERS.Flatten()(vector)])
    model = keras.Model({"image": image, "vector": vector}, LAYERS.Dense(3)(x))
    agent = DQNAgent(
        model, nb_actions=3, memory=SequentialMemory(300), nb_steps_warmup=20, batch_size=8, policy=EpsGreedyQPolicy()
    )
    agent.compile("adam", jit_compile=False)
    return agent


MAKERS = [lambda i=i: Awkward(i) for i in range(2)]


@pytest.mark.parametrize(
    "make",
    [Awkward, lambda: DummyVecEnv(MAKERS), lambda: SubprocVecEnv(MAKERS)],
    ids=["single", "dummy", "subproc"],
)
def test_dict_observations_and_awkward_infos(make, capsys):
    agent, env = dict_agent(), make()
    for verbose in (0, 1, 2):
        success = Success()
        history = agent.fit(env, 40, callbacks=[success], verbose=verbose, log_interval=15).history
        assert success.nb_steps == 40
        assert set(history["success"]) == {0.0, 1.0}
        assert len(history["success"]) == len(history["episode_reward"])
        assert "nan" not in capsys.readouterr().out.lower()
    assert agent.run_state.nb_updates == 100
    history = agent.test(env, 4, callbacks=[Success()], visualize=False, verbose=1).history
    assert len(history["success"]) == 4
    getattr(env, "close", lambda: None)()


def test_gymnasiums_vector_env_passes_such_infos_on():
    class Simple(Success):
        def on_step_end(self, step, logs=None):
            self.nb_steps += 1
            info = self.last[logs["lane"]] = logs["info"]
            assert info["name"] == f"step {step + 1}"
            assert info["action_mask"].tolist() == [True, False, (step + 1) % 2 == 0]

    agent, success = dict_agent(), Simple()
    history = agent.fit(SyncVectorEnv(MAKERS), 40, callbacks=[success], verbose=2).history
    assert success.nb_steps == agent.step
    assert agent.step >= 40
    assert set(history["success"]) == {0.0, 1.0}


def test_repeated_actions_sum_numbers_and_leave_the_rest():
    class Infos(Callback):
        def on_step_end(self, step, logs=None):
            infos.append(logs["info"])

    infos = []
    dict_agent().fit(Awkward(), 4, action_repetition=2, callbacks=[Infos()], verbose=2)
    first, last = infos[:2]
    assert (first["count"], last["count"]) == (3, 7)
    assert first["name"] == "step 2"
    assert first["action_mask"].tolist() == [True, False, True]
    assert first["nothing"] is None
    assert first["flag"] is True
    assert first["nested"]["deeper"] == {"t": 2}
    assert "is_success" not in first
    assert "is_success" in last


# ---- a second fit --------------------------------------------------------------------------------------------------


def test_a_second_fit_keeps_network_optimizer_and_memory():
    agent = make_agent()
    agent.fit(Counting(), 60, verbose=0)
    weights, iterations, stored = agent.get_weights(), int(agent.optimizer.iterations), agent.memory.nb_entries
    assert (iterations, stored) == (40, 60)
    agent.fit(lanes_of(3), 0.3e1, verbose=0)  # another env, another number of lanes
    assert int(agent.optimizer.iterations) == iterations + 3
    assert agent.memory.nb_entries == stored + 3
    change = max(float(np.abs(a - b).max()) for a, b in zip(weights, agent.get_weights(), strict=True))
    assert 0 < change < 0.05


def test_the_score_of_a_search_does_not_depend_on_what_ran_before_in_the_process():
    def objective(nb_units):
        keras.utils.set_random_seed(0)
        agent = DQNAgent(network(nb_units), nb_actions=3, memory=SequentialMemory(200), nb_steps_warmup=10)
        agent.compile(keras.optimizers.Adam(1e-3), jit_compile=False)
        history = agent.fit(lanes_of(2), 60, verbose=0, seed=0)
        agent.test(Counting(), 2, verbose=0, visualize=False)
        return history.history["loss"][-1]

    scores = [objective(nb_units) for nb_units in (4, 8, 4, 8)]
    assert scores[:2] == scores[2:]
    assert scores[0] != scores[1]
