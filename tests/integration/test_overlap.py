"""`fit(overlap=True)`: the learner works while the workers step; order, numbers, refusals, what errors leave behind."""

import keras
import numpy as np
import pytest

from rl.agents import DQNAgent, PPOAgent
from rl.callbacks import Callback
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.common.vec_env.wrappers import VecEnvWrapper
from rl.memory import SequentialMemory
from rl.networks import actor_critic
from tests.agents.test_replay import make_agent, weights
from tests.toy_agents import Noting
from tests.toy_envs import Counting, TwoStateMDP

QUIET = {"verbose": 0, "visualize": False}


def make_env(lanes, cls=DummyVecEnv, **options):
    return cls([lambda i=i: Counting(i, **options) for i in range(lanes)])


class Traced(VecEnvWrapper):
    """Notes when a step begins and when its results are asked for, in the list of the agent's calls."""

    def __init__(self, venv, calls):
        super().__init__(venv)
        self.calls = calls

    def step_async(self, actions):
        self.calls.append("step_async")
        super().step_async(actions)

    def step_wait(self, timeout=None):
        self.calls.append("step_wait")
        return super().step_wait(timeout)


class Overlapping(Noting):
    can_overlap = True

    def learn(self):
        self.calls.append(("learn", self.step))
        return None


class Ends(Callback):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def on_train_end(self, logs=None):
        self.calls.append("on_train_end")


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_what_is_learnt_during_a_step_comes_from_the_steps_before(lanes):
    agent = Overlapping()
    calls = agent.calls
    agent.fit(Traced(make_env(lanes), calls), nb_steps=2 * lanes, overlap=True, callbacks=[Ends(calls)], **QUIET)
    names = [call if isinstance(call, str) else call[0] for call in calls]
    step = ["act", "step_async", "learn", "step_wait", "observe"]
    assert names == ["open_lanes", *step, *step, "learn", "on_train_end"]
    assert [call[1] for call in calls if call[0] == "learn"] == [0, lanes, 2 * lanes]


@pytest.mark.parametrize("lanes", [1, 3, 8])
@pytest.mark.parametrize("execution", [1, 5])
def test_as_many_gradient_steps_and_copies_as_without(lanes, execution):
    counts = []
    for overlap in (False, True):
        agent = make_agent(target_model_update=16, train_interval=2, compile_options={"steps_per_execution": execution})
        env = make_env(lanes)
        for nb_steps in (24, 24):
            agent.fit(env, nb_steps=nb_steps, overlap=overlap, **QUIET)
        counts.append((agent.step, agent.run_state.nb_updates, agent.run_state.owed, int(agent.optimizer.iterations)))
        if agent.run_state.nb_updates:
            copied = [
                np.array_equal(a, b) for a, b in zip(weights(agent.target_model), weights(agent.model), strict=True)
            ]
            assert all(copied) == (agent.step % 16 == 0)
    assert counts[0] == counts[1]
    assert counts[1][1] > 0


def test_the_metrics_of_a_step_are_those_of_what_was_learnt_meanwhile():
    class Metrics(Callback):
        seen = []

        def on_step_end(self, step, logs=None):
            self.seen.append(logs["metrics"])

    agent = make_agent(nb_steps_warmup=4, batch_size=4)
    agent.fit(make_env(2), nb_steps=20, overlap=True, callbacks=[Metrics()], **QUIET)
    learnt = [bool(np.isfinite(m[0])) for m in Metrics.seen[::2]]
    # Warm-up ends within the first two vector steps; the third one is learnt from while the fourth takes place.
    assert learnt == [False] * 3 + [True] * 7
    assert all(len(m) == len(agent.metrics_names) for m in Metrics.seen)


@pytest.mark.parametrize("cls", [DummyVecEnv, SubprocVecEnv])
def test_q_learning_finds_the_known_values(cls):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1, 2)), keras.layers.Flatten(), keras.layers.Dense(2, use_bias=False)])
    memory = SequentialMemory(2000, window_length=1)
    agent = DQNAgent(
        model, nb_actions=2, memory=memory, gamma=TwoStateMDP.GAMMA, nb_steps_warmup=100, target_model_update=0.05
    )
    agent.policy.eps = 1.0
    agent.compile(keras.optimizers.Adam(0.02), jit_compile=False)
    with cls([TwoStateMDP] * 4) as env:
        agent.fit(env, nb_steps=3000, overlap=True, **QUIET)
    np.testing.assert_allclose(agent.evaluate(np.eye(2, dtype="float32")[:, None]), TwoStateMDP.Q_STAR, atol=0.02)


def test_a_test_in_between_and_a_fit_without_overlap_afterwards():
    agent, env = make_agent(), make_env(3)
    agent.fit(env, nb_steps=30, overlap=True, **QUIET)
    before = weights(agent)
    agent.test(make_env(2), nb_episodes=2, **QUIET)
    for a, b in zip(before, weights(agent), strict=True):
        np.testing.assert_array_equal(a, b)
    nb_updates = agent.run_state.nb_updates
    agent.fit(env, nb_steps=30, **QUIET)
    assert agent.run_state.nb_updates == nb_updates + 30


def test_a_single_env_and_an_agent_that_learns_from_rollouts_are_refused():
    with pytest.raises(ValueError, match="overlap=True needs a vector env"):
        make_agent().fit(Counting(), nb_steps=10, overlap=True, **QUIET)
    env = make_env(2)
    ppo = PPOAgent(*actor_critic(env), env.action_space)
    ppo.compile()
    with pytest.raises(ValueError, match="PPOAgent cannot learn while the env steps: leave out overlap=True"):
        ppo.fit(env, nb_steps=10, overlap=True, **QUIET)


@pytest.mark.parametrize("error", [FloatingPointError, KeyboardInterrupt])
def test_an_error_while_the_workers_step_leaves_env_and_agent_usable(error):
    agent = make_agent()
    with make_env(3, SubprocVecEnv) as env:
        agent.fit(env, nb_steps=30, overlap=True, **QUIET)
        learn = type(agent).learn

        def failing(self):
            raise error("in the middle of a step")

        type(agent).learn = failing
        try:
            if error is KeyboardInterrupt:  # the second Ctrl-C; `fit` returns
                agent.fit(env, nb_steps=30, overlap=True, **QUIET)
            else:
                with pytest.raises(error, match="in the middle of a step"):
                    agent.fit(env, nb_steps=30, overlap=True, **QUIET)
        finally:
            type(agent).learn = learn
        step = agent.step
        agent.fit(env, nb_steps=30, overlap=True, **QUIET)
        assert agent.step == step + 30
        assert agent.run_state.overlap is False


def test_an_error_of_the_env_while_the_learner_works_is_the_one_that_is_raised():
    class Fails(Counting):
        def step(self, action):
            if self.total == 6:
                raise RuntimeError("the simulator crashed")
            return super().step(action)

    agent = make_agent()
    with pytest.raises(Exception, match="the simulator crashed"):
        agent.fit(DummyVecEnv([Fails] * 2), nb_steps=100, overlap=True, **QUIET)
    assert agent.run_state.overlap is False
    agent.fit(make_env(2), nb_steps=20, overlap=True, **QUIET)
