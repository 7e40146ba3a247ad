"""keras-rl's contract: `forward` and `backward`, overridden in `fit` and `test`, and by hand."""

from collections import Counter, defaultdict

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents import A2CAgent, CEMAgent, DQNAgent, SARSAAgent
from rl.callbacks import Callback
from rl.common.vec_env import DummyVecEnv
from rl.core import Agent, Processor
from rl.memory import EpisodeParameterMemory, SequentialMemory
from rl.networks import actor_critic
from rl.policy import EpsGreedyQPolicy, LinearAnnealedPolicy
from tests.integration.test_every_agent import each, make_agent, make_env
from tests.toy_agents import Noting, recorder
from tests.toy_envs import ConstantReward, Counting, TwoStateMDP

QUIET = {"verbose": 0, "visualize": False}


# ---- the golden trace --------------------------------------------------------------------------------------------


class Line:
    """A line of calls; not a list, which Keras would wrap."""

    def __init__(self):
        self.calls = []

    def add(self, *words):
        self.calls.append(" ".join(str(word) for word in words))


class TracedEnv(gym.Env):
    observation_space = gym.spaces.Box(0, 99, (), np.float32)
    action_space = gym.spaces.Discrete(9)

    def __init__(self, line, lengths):
        self.line, self.lengths, self.episode = line, lengths, -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        self.line.add("env.reset")
        return np.float32(0), {}

    def step(self, action):
        self.t += 1
        self.line.add("env.step", action)
        return np.float32(self.t), 1.0, self.t == self.lengths[self.episode % len(self.lengths)], False, {"n": 1}


class TracedProcessor(Processor):
    def __init__(self, line):
        self.line = line

    def process_observation(self, observation):
        self.line.add("process_observation", int(observation))
        return observation

    def process_action(self, action):
        self.line.add("process_action", action)
        return action

    def process_step(self, observation, reward, done, info):
        self.line.add("process_step", int(observation), done)
        return observation, 10 * reward, done, info


class TracedAgent(Agent):
    """As classes for keras-rl were written; the actions are 0, 1, 2, ..."""

    def __init__(self, line, **kwargs):
        super().__init__(**kwargs)
        self.line = line
        self.nb_asked = 0
        self.step = 0
        self.training = False

    def compile(self, optimizer, metrics=[]):  # noqa: B006
        self.compiled = True

    def forward(self, observation):
        self.line.add("forward", int(observation), f"step={self.step}", "training" if self.training else "test")
        self.recent_observation, self.recent_action = observation, self.nb_asked % 9
        self.nb_asked += 1
        return self.recent_action

    def backward(self, reward, terminal):
        self.line.add("backward", reward, terminal, f"step={self.step}")
        return [float(self.step)]

    @property
    def metrics_names(self):
        return ["count"]

    def reset_states(self):
        self.line.add("reset_states", self.recent_action)

    def layers(self):
        return []

    def get_config(self):
        return {}

    def _on_train_begin(self):
        self.line.add("_on_train_begin")

    def _on_train_end(self):
        self.line.add("_on_train_end")

    def _on_test_begin(self):
        self.line.add("_on_test_begin")

    def _on_test_end(self):
        self.line.add("_on_test_end")


class TracedCallback(Callback):
    def __init__(self, line):
        super().__init__()
        self.line = line

    def on_train_begin(self, logs=None):
        self.line.add("on_train_begin")

    def on_train_end(self, logs=None):
        self.line.add("on_train_end", logs["did_abort"])

    def on_episode_begin(self, episode, logs=None):
        self.line.add("on_episode_begin", episode)

    def on_episode_end(self, episode, logs=None):
        keys = ("episode_reward", "nb_episode_steps", "nb_steps")
        self.line.add("on_episode_end", episode, *[logs[key] for key in keys])

    def on_step_begin(self, step, logs=None):
        self.line.add("on_step_begin", step)

    def on_step_end(self, step, logs=None):
        self.line.add("on_step_end", step, logs["reward"], *logs.get("metrics", []), logs["info"]["n"])

    def on_action_begin(self, action, logs=None):
        self.line.add("on_action_begin", action)

    def on_action_end(self, action, logs=None):
        self.line.add("on_action_end", action)


def traced(lengths=(3, 2)):
    line = Line()
    agent = TracedAgent(line, processor=TracedProcessor(line))
    agent.compile("adam")
    return agent, TracedEnv(line, lengths), TracedCallback(line), line.calls


def play(action, observation, done=False):
    """What one step of the env looks like."""
    return [
        f"on_action_begin {action}",
        f"env.step {action}",
        f"process_step {observation} {done}",
        f"on_action_end {action}",
    ]


# Two episodes, written down after keras-rl's loop. One difference is meant: an env is reset before the hooks of the
# episode, the first time before those of the run, since agent and env are checked against the first observation.
FIT = [
    *["env.reset", "process_observation 0"],
    *["_on_train_begin", "on_train_begin"],
    *["on_episode_begin 0", "reset_states None"],
    *["on_step_begin 0", "forward 0 step=0 training", "process_action 0"],
    *play(0, 1),
    *["backward 10.0 False step=0", "on_step_end 0 10.0 0.0 1"],
    *["on_step_begin 1", "forward 1 step=1 training", "process_action 1"],
    *play(1, 2),
    *["backward 10.0 False step=1", "on_step_end 1 10.0 1.0 1"],
    *["on_step_begin 2", "forward 2 step=2 training", "process_action 2"],
    *play(2, 3, True),
    *["backward 10.0 True step=2", "on_step_end 2 10.0 2.0 1"],
    *["forward 3 step=3 training", "backward 0.0 False step=3"],  # the last observation, shown once more
    "on_episode_end 0 30.0 3 3",
    *["env.reset", "process_observation 0"],
    *["on_episode_begin 1", "reset_states 3"],
    *["on_step_begin 0", "forward 0 step=3 training", "process_action 4"],
    *play(4, 1),
    *["backward 10.0 False step=3", "on_step_end 0 10.0 3.0 1"],
    *["on_step_begin 1", "forward 1 step=4 training", "process_action 5"],
    *play(5, 2, True),
    *["backward 10.0 True step=4", "on_step_end 1 10.0 4.0 1"],
    *["forward 2 step=5 training", "backward 0.0 False step=5"],
    "on_episode_end 1 20.0 2 5",
    *["on_train_end False", "_on_train_end"],
]


def test_golden_trace_of_two_episodes_in_fit():
    agent, env, callback, calls = traced()
    agent.fit(env, nb_steps=5, callbacks=[callback], verbose=0)
    assert calls == FIT
    assert agent.step == 5


def test_golden_trace_of_two_episodes_in_test():
    agent, env, callback, calls = traced()
    agent.test(env, nb_episodes=2, callbacks=[callback], **QUIET)

    def as_in_test(call):
        name, *words = call.split()
        if name == "on_step_end":
            del words[2]  # no metrics
        if name == "on_episode_end":
            words[3] = words[2]  # nb_steps are those of the episode
        return " ".join([name.replace("_on_train", "_on_test"), *words]).replace("training", "test")

    assert calls == [as_in_test(call) for call in FIT]
    assert agent.step == 0


def test_golden_trace_with_action_repetition_and_start_steps():
    agent, env, callback, calls = traced(lengths=(4, 2))
    starts = []
    agent.fit(
        env,
        nb_steps=3,
        callbacks=[callback],
        action_repetition=2,
        nb_max_start_steps=2,
        start_step_policy=lambda observation: starts.append(int(observation)) or 8,
        seed=0,
        verbose=0,
    )
    start = ["process_action 8", "env.step 8", "process_step 1 False"]  # recorded nowhere
    assert calls == [
        *["env.reset", "process_observation 0", *start],
        *["_on_train_begin", "on_train_begin"],
        *["on_episode_begin 0", "reset_states None"],
        *["on_step_begin 0", "forward 1 step=0 training", "process_action 0"],
        *[*play(0, 2), *play(0, 3)],
        *["backward 20.0 False step=0", "on_step_end 0 20.0 0.0 2"],
        *["on_step_begin 1", "forward 3 step=1 training", "process_action 1"],
        *play(1, 4, True),  # an end stops the repetition
        *["backward 10.0 True step=1", "on_step_end 1 10.0 1.0 1"],
        *["forward 4 step=2 training", "backward 0.0 False step=2"],
        "on_episode_end 0 30.0 2 2",
        *["env.reset", "process_observation 0"],  # the draw is 0
        *["on_episode_begin 1", "reset_states 2"],
        *["on_step_begin 0", "forward 0 step=2 training", "process_action 3"],
        *[*play(3, 1), *play(3, 2, True)],
        *["backward 20.0 True step=2", "on_step_end 0 20.0 2.0 2"],
        *["forward 2 step=3 training", "backward 0.0 False step=3"],
        "on_episode_end 1 20.0 1 3",
        *["on_train_end False", "_on_train_end"],
    ]
    assert starts == [0]


def test_a_time_limit_is_told_as_the_end_of_the_episode():
    agent, env, callback, calls = traced(lengths=(9,))
    agent.fit(env, nb_steps=4, nb_max_episode_steps=2, callbacks=[callback], verbose=0)
    backward = [call.split()[1:3] for call in calls if call.startswith("backward")]
    assert backward == [["10.0", "False"], ["10.0", "True"], ["0.0", "False"]] * 2


def test_a_second_fit_goes_on_with_the_open_episode_and_the_count_of_steps():
    agent, env, callback, calls = traced()
    for nb_steps in (2, 1, 2):
        agent.fit(env, nb_steps=nb_steps, callbacks=[callback], verbose=0)
    parts = ("forward", "backward", "env.reset", "reset_states", "process_action")
    assert [c for c in calls if c.startswith(parts)] == [c for c in FIT if c.startswith(parts)]


def test_a_test_in_between_leaves_step_training_and_what_was_noted():
    agent, env, _, _ = traced()
    agent.fit(env, nb_steps=4, verbose=0)
    before = agent.step, agent.training, agent.recent_observation, agent.recent_action
    agent.test(traced()[1], nb_episodes=2, **QUIET)
    assert (agent.step, agent.training, agent.recent_observation, agent.recent_action) == before


# ---- classes on the library's agents -------------------------------------------------------------------------------


def network(nb_inputs=3, nb_actions=3, window=1):
    init = [keras.initializers.GlorotUniform(seed=i) for i in range(2)]
    return keras.Sequential(
        [
            keras.layers.Input((window, nb_inputs)),
            keras.layers.Flatten(),
            keras.layers.Dense(8, activation="tanh", kernel_initializer=init[0]),
            keras.layers.Dense(nb_actions, kernel_initializer=init[1]),
        ]
    )


def passing(cls, calls=None):
    """A class that overrides both methods and changes nothing."""

    def forward(self, observation):
        return super(subclass, self).forward(observation)

    def backward(self, reward, terminal=False):
        return super(subclass, self).backward(reward, terminal=terminal)

    subclass = type(f"Passing{cls.__name__}", (cls,), {"forward": forward, "backward": backward})
    return subclass


def dqn(cls=DQNAgent, window=1, compile_options=None, nb_inputs=3, nb_actions=3, **options):
    options = {"nb_steps_warmup": 6, "batch_size": 4, "target_model_update": 10, "gamma": 0.9} | options
    memory = SequentialMemory(500, window_length=window)
    agent = cls(network(nb_inputs, nb_actions, window), nb_actions=nb_actions, memory=memory, **options)
    agent.compile(keras.optimizers.SGD(0.01), jit_compile=False, **(compile_options or {}))
    return agent


def sarsa(cls=SARSAAgent, **options):
    agent = cls(network(), 3, nb_steps_warmup=3, policy=EpsGreedyQPolicy(0.5), **options)
    agent.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    return agent


def cem(cls=CEMAgent):
    memory = EpisodeParameterMemory(50)
    agent = cls(network(), 3, memory=memory, batch_size=8, elite_frac=0.5, train_interval=6, nb_steps_warmup=0)
    agent.compile(jit_compile=False)
    return agent


def a2c(cls=A2CAgent):
    env = Counting()
    keras.utils.set_random_seed(1)
    agent = cls(*actor_critic(env, hidden=(8,)), env.action_space, nb_rollout_steps=8)
    agent.compile(keras.optimizers.SGD(0.01), jit_compile=False)
    return agent


AGENTS = {
    "dqn": (dqn, DQNAgent),
    "dqn window": (lambda cls: dqn(cls, window=3), DQNAgent),
    "dqn intervals": (lambda cls: dqn(cls, train_interval=3, memory_interval=2, target_model_update=0.1), DQNAgent),
    "sarsa": (sarsa, SARSAAgent),
    "expected sarsa, 3 steps": (lambda cls: sarsa(cls, expected=True, nb_return_steps=3), SARSAAgent),
    "cem": (cem, CEMAgent),
    "a2c": (a2c, A2CAgent),
}


def rows_of(memory):
    """The stored rows in order, without the observations after them."""
    n = memory.nb_entries
    return [np.asarray(part[:n]) for part in (memory.observations, memory.actions, memory.rewards, memory.terminals)]


def sampled(agent):
    """A batch of many rows, without the axis of gradient steps."""
    batch = agent.memory.sample_batch(200, gamma=0.9)
    return batch._replace(**{name: getattr(batch, name)[0] for name in ("state0", "action", "state1", "terminal1")})


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("name", [name for name in AGENTS if name not in ("cem", "a2c")])
def test_overriding_both_and_changing_nothing_learns_the_same_bits(name, truncate):
    make, cls = AGENTS[name]
    plain, old = make(cls), make(passing(cls))
    histories = []
    for agent in (plain, old):
        agent.seed(3)
        env = Counting(lengths=(3, 5, 4, 1), truncate=truncate)
        parts = [agent.fit(env, nb_steps=n, **QUIET).history for n in (20, 6, 26)]  # two of which end amid an episode
        agent.test(Counting(), nb_episodes=1, **QUIET)
        parts.append(agent.fit(env, nb_steps=13, **QUIET).history)
        histories.append(parts)
    assert plain.run_state.nb_updates == old.run_state.nb_updates > 0
    for a, b in zip(plain.get_weights(), old.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(*histories, strict=True):
        for key in a.keys() - {"duration", "steps_per_second"}:
            np.testing.assert_array_equal(a[key], b[key], key)
    if cls is DQNAgent:
        for a, b in zip(rows_of(plain.memory), rows_of(old.memory), strict=True):
            np.testing.assert_array_equal(a, b)


@each
def test_of_every_agent_such_a_class_learns_the_same_bits(name):
    plain, old = make_agent(name), make_agent(name)
    old.__class__ = passing(type(old))
    for agent in (plain, old):
        env = make_env(name)
        agent.fit(env, nb_episodes=9, seed=3, **QUIET)
        agent.test(make_env(name), nb_episodes=2, **QUIET)
        agent.fit(env, nb_episodes=8, **QUIET)
    assert plain.run_state.nb_updates == old.run_state.nb_updates > 0
    for a, b in zip(plain.get_weights(), old.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


class CopiedForward(DQNAgent):
    """Methods as keras-rl's own were written, which users copied and changed."""

    def forward(self, observation):
        state = self.memory.get_recent_state(observation)
        q_values = self.compute_q_values(state)
        policy = self.policy if self.training else self.test_policy
        action = policy.select_action(q_values=q_values)
        self.recent_observation = observation
        self.recent_action = action
        return action


@pytest.mark.parametrize("window", [1, 3])
def test_a_forward_copied_from_keras_rl_sees_the_same_states(window):
    # Without a gradient step: such a class chooses before the step that led here is learnt from.
    options = {"policy": EpsGreedyQPolicy(0.0), "nb_steps_warmup": 1000}
    plain, old = (dqn(cls, window, **options) for cls in (DQNAgent, CopiedForward))
    for agent in (plain, old):
        env = Counting(lengths=(3, 5, 4))
        agent.fit(env, nb_steps=22, **QUIET)  # which ends amid an episode
        agent.test(Counting(), nb_episodes=1, **QUIET)
        agent.fit(env, nb_steps=14, **QUIET)
    for a, b in zip(rows_of(plain.memory), rows_of(old.memory), strict=True):
        np.testing.assert_array_equal(a, b)
    assert len(set(rows_of(old.memory)[1])) > 1
    batch = sampled(old)
    np.testing.assert_array_equal(batch.state1[:, -1, :2], batch.state0[:, -1, :2])


@pytest.mark.parametrize("cls", [SARSAAgent, DQNAgent])
def test_a_forward_copied_from_keras_rl_learns(cls):
    class Copied(cls):
        def forward(self, observation):
            q_values = self.compute_q_values([observation])
            self.recent_observation = observation
            self.recent_action = (self.policy if self.training else self.test_policy).select_action(q_values=q_values)
            return self.recent_action

    agent = (sarsa if cls is SARSAAgent else dqn)(Copied)
    history = agent.fit(Counting(lengths=(3, 5, 4)), nb_steps=48, **QUIET).history
    plain = (sarsa if cls is SARSAAgent else dqn)(cls)
    plain.fit(Counting(lengths=(3, 5, 4)), nb_steps=48, **QUIET)
    assert agent.run_state.nb_updates == plain.run_state.nb_updates > 30
    assert np.isfinite(history["loss"][-1])


class CopiedBackward(CopiedForward):
    """Learns by itself, from the memory's own interface."""

    def backward(self, reward, terminal):
        self.memory.append(self.recent_observation, self.recent_action, reward, terminal, training=self.training)
        if not self.training or self.step <= self.nb_steps_warmup:
            return [np.nan for _ in self.metrics_names]
        experiences = self.memory.sample(self.batch_size)
        state0 = self.process_state_batch([e.state0 for e in experiences])
        state1 = self.process_state_batch([e.state1 for e in experiences])
        best = self.compute_batch_q_values(state1).max(axis=-1)
        going_on = np.array([0.0 if e.terminal1 else 1.0 for e in experiences])
        targets = self.compute_batch_q_values(state0).copy()
        for i, e in enumerate(experiences):
            targets[i, e.action] = e.reward + self.gamma * going_on[i] * best[i]
        for e in experiences:
            assert (np.asarray(e.state1)[0, 1] == np.asarray(e.state0)[0, 1]).all()  # of one episode
        error = float(np.abs(targets - self.compute_batch_q_values(state0)).mean())
        return [error, 0.0]


def test_a_backward_copied_from_keras_rl_finds_its_memory():
    agent = dqn(CopiedBackward)
    history = agent.fit(Counting(lengths=(3, 5, 4)), nb_steps=48, **QUIET).history
    assert len(history["episode_reward"]) == 12
    assert np.isfinite(history["loss"][-1])
    # keras-rl's rows: one more per episode, with its last observation
    assert agent.memory.nb_entries == 48 + 12
    assert int(np.sum(rows_of(agent.memory)[3])) == 12


class OwnCompile(CopiedBackward):
    def compile(self, optimizer, metrics=[]):  # noqa: B006
        self.model.compile(optimizer, loss="mse")
        self.compiled = True


def test_a_class_may_compile_and_learn_without_the_agents_optimizer():
    agent = OwnCompile(network(), nb_actions=3, memory=SequentialMemory(100, window_length=1), nb_steps_warmup=6)
    agent.compile("sgd")
    assert np.isfinite(agent.fit(Counting(), nb_steps=24, **QUIET).history["loss"][-1])
    agent.test(Counting(), nb_episodes=1, **QUIET)
    agent = type("Careless", (DQNAgent,), {"compile": OwnCompile.compile})(
        network(), nb_actions=3, memory=SequentialMemory(100, window_length=1), nb_steps_warmup=6
    )
    agent.compile("sgd")
    with pytest.raises(RuntimeError, match=r"Careless has no optimizer: its compile\(\) has to call super"):
        agent.fit(Counting(), nb_steps=24, **QUIET)


class OwnExploration(DQNAgent):
    def __init__(self, *args, note=True, **kwargs):
        super().__init__(*args, **kwargs)
        self.note, self.dice = note, np.random.default_rng(0)

    def forward(self, observation):
        action = super().forward(observation)
        if self.training and self.dice.random() < 0.5:
            action = int(self.dice.integers(self.nb_actions))
            if self.note:
                self.recent_action = action
        return action


def test_a_class_with_exploration_of_its_own_stores_what_was_done_and_learns():
    agent = dqn(OwnExploration, nb_inputs=2, nb_actions=2, policy=EpsGreedyQPolicy(0.0), batch_size=32)
    agent.compile(keras.optimizers.Adam(0.02), jit_compile=False)
    done = []

    class Noting(Callback):
        def on_step_end(self, step, logs=None):
            done.append(logs["action"])

    agent.fit(TwoStateMDP(), nb_steps=400, callbacks=[Noting()], seed=0, **QUIET)
    stored = list(rows_of(agent.memory)[1])
    assert len(stored) >= 399 and stored == done[: len(stored)]
    agent.fit(TwoStateMDP(), nb_steps=1100, **QUIET)
    q = agent.compute_batch_q_values([[np.eye(2, dtype="f4")[i]] for i in range(2)])
    np.testing.assert_allclose(q, TwoStateMDP.Q_STAR, atol=0.1)


def test_an_action_that_was_done_but_not_noted_is_told_once():
    agent = dqn(OwnExploration, note=False)
    with pytest.warns(UserWarning, match=r"OwnExploration.forward\(\) returned .* set self.recent_action") as caught:
        agent.fit(Counting(), nb_steps=40, **QUIET)
    assert sum("recent_action" in str(w.message) for w in caught) == 1


@pytest.mark.parametrize("truncate", [False, True])
def test_what_a_class_does_not_note_is_noted_for_it(truncate):
    class Fixed(DQNAgent):
        def forward(self, observation):
            return int(observation[2]) % 3

    agent = dqn(Fixed)
    agent.fit(Counting(lengths=(4,), truncate=truncate), nb_steps=24, **QUIET)
    assert agent.memory.nb_entries == 24
    batch = sampled(agent)
    np.testing.assert_array_equal(batch.action, batch.state0[:, 0, 2].astype(int) % 3)
    np.testing.assert_array_equal(batch.state1[:, 0], batch.state0[:, 0] + [0, 0, 1])


class Reshaped(DQNAgent):
    def backward(self, reward, terminal=False):
        return super().backward(reward * 0.5 - 1, terminal=terminal)


def test_a_class_that_reshapes_rewards():
    plain, old = dqn(), dqn(Reshaped)
    for agent in (plain, old):
        agent.seed(0)
        agent.fit(Counting(), nb_steps=36, **QUIET)
    observations, _, rewards, terminals = rows_of(old.memory)
    expected = rows_of(plain.memory)
    np.testing.assert_array_equal(observations, expected[0])
    np.testing.assert_array_equal(rewards, 0.5 * expected[2] - 1)
    np.testing.assert_array_equal(terminals, expected[3])
    assert len(rewards) == 36


class Augmented(DQNAgent):
    def forward(self, observation):
        return super().forward(observation * 0.1)


def test_a_class_that_changes_observations_learns_from_what_it_acted_on():
    agent = dqn(Augmented)
    agent.fit(Counting(lengths=(3,)), nb_steps=12, **QUIET)
    batch = sampled(agent)
    np.testing.assert_allclose(batch.state1[:, 0, 2], batch.state0[:, 0, 2] + 0.1, rtol=1e-6)  # the last ones, too
    assert batch.state1.max() < 1.0


class EndsEarly(DQNAgent):
    """A lost life is an end to the learner, not to the env."""

    def backward(self, reward, terminal=False):
        return super().backward(reward, terminal=terminal or reward == 2)


class NeverEnds(DQNAgent):
    def backward(self, reward, terminal=False):
        return super().backward(reward, terminal=False)


@pytest.mark.parametrize(("cls", "ends"), [(EndsEarly, [0, 1, 0, 1]), (NeverEnds, [0, 0, 0, 0])])
def test_a_class_may_say_where_an_episode_ends(cls, ends):
    agent = dqn(cls)
    agent.fit(Counting(lengths=(4,)), nb_steps=8, **QUIET)
    np.testing.assert_array_equal(rows_of(agent.memory)[3], 2 * ends)
    batch = sampled(agent)
    np.testing.assert_array_equal(batch.state1[:, 0, 2], batch.state0[:, 0, 2] + 1)
    np.testing.assert_array_equal(batch.terminal1, np.array(ends)[batch.state0[:, 0, 2].astype(int)])


def test_a_time_limit_is_stored_as_one_whatever_backward_is_told():
    told = []

    class Told(DQNAgent):
        def backward(self, reward, terminal=False):
            told.append(terminal)
            return super().backward(reward, terminal=terminal)

    agent = dqn(Told, nb_inputs=1, nb_actions=2, batch_size=16, target_model_update=0.05)
    agent.compile(keras.optimizers.Adam(0.05), jit_compile=False)
    agent.fit(ConstantReward(limit=5), nb_steps=800, seed=0, **QUIET)
    assert sum(told) == 160
    q = agent.compute_q_values([np.ones(1, "f4")])
    np.testing.assert_allclose(q.max(), 10.0, atol=0.5)


def test_a_lone_reset_states_is_called_where_an_episode_begins():
    calls = []

    class Resetting(DQNAgent):
        def reset_states(self):
            calls.append(self.step)
            super().reset_states()

    agent = dqn(Resetting)
    agent.fit(Counting(lengths=(3, 5, 4)), nb_steps=12, **QUIET)
    assert calls == [0, 3, 8]
    agent.test(Counting(lengths=(3,)), nb_episodes=2, **QUIET)
    assert len(calls) == 5
    with pytest.raises(TypeError, match=r"Resetting overrides reset_states\(\)"):
        agent.fit(lanes(), nb_steps=3, **QUIET)


def test_schedules_see_the_agents_step():
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.0, 0.0, nb_steps=40)
    agent = dqn(passing(DQNAgent), policy=policy)
    agent.fit(Counting(), nb_steps=30, **QUIET)
    assert agent.step == 30
    agent.training = True
    assert policy.get_current_value() == pytest.approx(0.25)


def test_a_test_in_a_callback_leaves_the_training_as_it_is():
    def trained(callbacks):
        agent = dqn(passing(DQNAgent), window=3)
        agent.seed(1)
        agent.fit(Counting(), nb_steps=48, callbacks=callbacks, **QUIET)
        return agent.get_weights()

    class Testing(Callback):
        def on_step_end(self, step, logs=None):
            if self.model.step % 5 == 0:
                self.model.test(Counting(), nb_episodes=1, **QUIET)

    for a, b in zip(trained([]), trained([Testing()]), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- classes on `Agent`, from scratch ------------------------------------------------------------------------------


class TabularQ(Agent):
    """Q-learning with a table, as written for keras-rl: no act(), no observe(), no loss."""

    def __init__(self, nb_actions, alpha=0.2, gamma=0.9, eps=0.3, **kwargs):
        super().__init__(**kwargs)
        self.nb_actions, self.alpha, self.gamma, self.eps = nb_actions, alpha, gamma, eps
        self.table = defaultdict(lambda: np.zeros(nb_actions))
        self.rng = np.random.default_rng(0)

    def compile(self, optimizer=None, metrics=[]):  # noqa: B006
        self.compiled = True

    @property
    def metrics_names(self):
        return ["td_error"]

    @property
    def layers(self):
        return []

    def reset_states(self):
        self.recent_observation = self.recent_action = None
        self.last = None

    def forward(self, observation):
        state = tuple(np.atleast_1d(observation).tolist())
        if self.training and self.last is not None:
            before, action, reward, terminal = self.last
            target = reward + (0.0 if terminal else self.gamma * self.table[state].max())
            self.table[before][action] += self.alpha * (target - self.table[before][action])
        explore = self.training and self.rng.random() < self.eps
        values = np.zeros(self.nb_actions) if explore else self.table[state]
        action = int(self.rng.choice(np.flatnonzero(values == values.max())))
        self.recent_observation, self.recent_action = state, action
        return action

    def backward(self, reward, terminal):
        self.last = (self.recent_observation, self.recent_action, reward, terminal)

    def save_weights(self, filepath, overwrite=False):
        np.savez(filepath, **{str(key): value for key, value in self.table.items()})


def test_a_table_learns_the_two_state_mdp_in_two_fits():
    agent = TabularQ(2)
    agent.compile()
    env = TwoStateMDP()
    first = agent.fit(env, nb_steps=1500, seed=1, **QUIET)
    agent.fit(env, nb_steps=1500, **QUIET)
    assert agent.step == 3000
    assert np.isnan(first.history["td_error"]).all()  # backward() returns None
    q = np.array([agent.table[(1.0, 0.0)], agent.table[(0.0, 1.0)]])
    np.testing.assert_allclose(q, TwoStateMDP.Q_STAR, atol=0.02)
    table = {key: value.copy() for key, value in agent.table.items()}
    returns = agent.test(env, nb_episodes=3, nb_max_episode_steps=20, **QUIET).history["episode_reward"]
    assert len(returns) == 3
    for key, value in table.items():
        np.testing.assert_array_equal(agent.table[key], value)


def test_two_agents_take_turns_on_one_env():
    env, agents = TwoStateMDP(), [TabularQ(2), TabularQ(2)]
    for agent in agents:
        agent.compile()
    for _ in range(6):
        for agent in agents:
            agent.fit(env, nb_steps=300, **QUIET)
    for agent in agents:
        assert agent.step == 1800
        q = np.array([agent.table[(1.0, 0.0)], agent.table[(0.0, 1.0)]])
        np.testing.assert_allclose(q, TwoStateMDP.Q_STAR, atol=0.05)


def reporting(answer):
    class Reporting(TabularQ):
        def backward(self, reward, terminal):
            super().backward(reward, terminal)
            return answer

    agent = Reporting(2)
    agent.compile()
    return agent


@pytest.mark.parametrize("answer", [0.5, [0.5], (0.5, 7.0), np.array([0.5], "f4"), np.float32(0.5)])
def test_backward_may_return_numbers_of_any_kind(answer):
    history = reporting(answer).fit(Counting(), nb_steps=12, **QUIET).history
    assert history["td_error"] == [0.5] * 3


def test_backward_may_return_none_and_values_without_a_name_are_not_logged():
    history = reporting(None).fit(Counting(), nb_steps=12, **QUIET).history
    assert np.isnan(history["td_error"]).all()
    nameless = type("Nameless", (TabularQ,), {"metrics_names": [], "backward": lambda self, reward, terminal: [1.0]})
    agent = nameless(2)
    agent.compile()
    assert set(agent.fit(Counting(), nb_steps=12, verbose=2, visualize=False).history) >= {"episode_reward"}


def test_fewer_values_than_names_are_refused():
    with pytest.raises(ValueError, match=r"Reporting.backward\(\) returned 0 values for metrics_names=\['td_error'\]"):
        reporting([]).fit(Counting(), nb_steps=12, **QUIET)


def test_a_forward_without_an_answer_is_named():
    agent = type("Silent", (TabularQ,), {"forward": lambda self, observation: None})(2)
    agent.compile()
    with pytest.raises(TypeError, match=r"Silent.forward\(\) returned None"):
        agent.fit(Counting(), nb_steps=3, **QUIET)


def test_ctrl_c_in_a_subclass_returns_the_history():
    class Interrupted(TabularQ):
        def backward(self, reward, terminal):
            if self.step == 7:
                raise KeyboardInterrupt
            super().backward(reward, terminal)

    agent, calls = Interrupted(2), []
    agent.compile()
    history = agent.fit(Counting(), nb_steps=30, callbacks=[recorder(calls)], **QUIET)
    assert history.history["episode_reward"] == [6.0]
    assert calls[-1] == ("on_train_end", {"did_abort": True})
    agent.backward = None  # the instance's own attributes decide nothing
    assert agent.step == 8


def test_observations_are_copies_that_a_class_may_change():
    class Writing(TabularQ):
        def forward(self, observation):
            observation += 100
            return super().forward(observation)

    agent, seen = Writing(2), []

    class Observations(Callback):
        def on_step_end(self, step, logs=None):
            seen.append(float(logs["observation"][2]))

    agent.compile()
    agent.fit(Counting(lengths=(3,)), nb_steps=6, callbacks=[Observations()], **QUIET)
    assert seen == [1, 2, 3, 1, 2, 3]


def test_containers_with_defaults_stay_what_they_are():
    agent = TabularQ(2)
    agent.counts, agent.nested = Counter("aab"), {"tables": [defaultdict(int), defaultdict(int)]}
    agent.networks = [network()]
    assert type(agent.table) is defaultdict and type(agent.counts) is Counter
    agent.nested["tables"][1]["x"] += 1
    assert agent.nested["tables"][1] == {"x": 1}
    assert len(agent.weights) == 4  # lists of networks are still Keras'


# ---- what cannot work says so ---------------------------------------------------------------------------------------


def lanes(n=3, **options):
    return DummyVecEnv([lambda i=i: Counting(i, **options) for i in range(n)])


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("method", ["fit", "test"])
def test_on_a_vector_env_one_error_names_what_to_add(method, n):
    agent, env = dqn(Reshaped), lanes(n)
    expected = rf"Reshaped overrides backward\(\).*vector env of {n}.*act\(observation\) and observe\(transition\).*"
    with pytest.raises(TypeError, match=expected + r"explore\(outputs\) and loss_fn\(batch\)"):
        getattr(agent, method)(env, 10, **QUIET)
    table = TabularQ(2)
    table.compile()
    with pytest.raises(
        TypeError, match=r"TabularQ overrides forward\(\) and backward\(\) and reset_states\(\)"
    ) as error:
        getattr(table, method)(env, 10, **QUIET)
    assert "explore" not in str(error.value)
    assert env.get_attr("nb_resets") == [0] * n and agent.step == 0


def test_half_of_the_contract_is_not_enough():
    half = {"forward": lambda self, observation: 0}
    agent = type("Half", (Agent,), half)()
    agent.compile()
    with pytest.raises(TypeError, match=r"Half overrides forward\(\), and must implement backward\(reward, terminal\)"):
        agent.fit(Counting(), nb_steps=3, **QUIET)


def test_act_and_observe_of_the_same_class_decide():
    class Both(TabularQ):
        def forward(self, observation):
            raise AssertionError

        backward = reset_states = forward

        def act(self, observation):
            return np.zeros(len(observation), int)

        def observe(self, transition):
            return None

    agent = Both(2)
    agent.compile()
    assert len(agent.fit(lanes(), nb_steps=36, **QUIET).history["episode_reward"]) == 9
    assert len(agent.fit(Counting(), nb_steps=12, **QUIET).history["episode_reward"]) == 3


# ---- by hand ---------------------------------------------------------------------------------------------------------


def drive(agent, env, nb_steps, last="reset"):
    """A loop of the user's own; says the last metrics."""
    metrics, steps = None, 0
    while steps < nb_steps:
        if last == "reset":
            agent.reset_states()
        observation, end = env.reset()[0], False
        while not end and steps < nb_steps:
            action = agent.forward(observation)
            observation, reward, terminated, truncated, _ = env.step(int(action))
            metrics, end, steps = agent.backward(reward, terminal=terminated), terminated or truncated, steps + 1
            if truncated:
                agent.forward(observation)
        if last == "pair":
            agent.forward(observation)
            agent.backward(0.0, False)
    return metrics


def fitted_and_driven(make, cls, truncate=False):
    fitted, driven = make(cls), make(cls)
    fitted.seed(3)
    fitted.fit(Counting(lengths=(3, 5, 4, 1), truncate=truncate), nb_steps=52, **QUIET)
    driven.seed(3)
    driven.training = True
    drive(driven, Counting(lengths=(3, 5, 4, 1), truncate=truncate), 52)
    driven.reset_states()
    assert driven.step == fitted.step == 52
    assert driven.run_state.nb_updates == fitted.run_state.nb_updates > 0
    for a, b in zip(fitted.get_weights(), driven.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    return fitted, driven


@pytest.mark.parametrize("name", AGENTS)
def test_driven_by_hand_agents_learn_what_they_learn_in_fit(name):
    fitted_and_driven(*AGENTS[name])


def test_an_episode_that_is_cut_by_hand_is_stored_as_one():
    def greedy(cls):  # another draw is asked for where the last observation is shown
        return dqn(cls, window=3, policy=EpsGreedyQPolicy(0.0))

    fitted, driven = fitted_and_driven(greedy, DQNAgent, truncate=True)
    for a, b in zip(rows_of(fitted.memory), rows_of(driven.memory), strict=True):
        np.testing.assert_array_equal(a, b)
    batch = sampled(driven)
    assert not batch.terminal1.any()
    np.testing.assert_array_equal(batch.state1[:, -1], batch.state0[:, -1] + [0, 0, 1])


def test_the_pair_on_the_last_observation_is_no_step():
    agent = dqn()
    agent.training = True
    metrics = drive(agent, Counting(lengths=(3, 5, 4)), 36, last="pair")
    assert len(metrics) == len(agent.metrics_names) and np.isfinite(metrics).all()
    assert agent.step == agent.memory.nb_entries == 36
    observations, _, rewards, terminals = rows_of(agent.memory)
    np.testing.assert_array_equal(rewards, observations[:, 2] + 1)
    assert int(np.sum(terminals)) == 9


def test_an_episode_that_is_left_by_hand_is_cut():
    agent = dqn()
    agent.training = True
    env = Counting(lengths=(9,))
    for _ in range(4):
        drive(agent, env, 3)
    agent.reset_states()
    assert agent.memory.nb_entries == agent.step == 8  # nobody knows where the last step of each led
    batch = sampled(agent)
    np.testing.assert_array_equal(batch.state1[:, 0], batch.state0[:, 0] + [0, 0, 1])
    assert not batch.terminal1.any()


def test_by_hand_and_fit_in_turn():
    agent = dqn(window=3)
    agent.fit(lanes(), nb_steps=30, **QUIET)
    agent.training = True
    drive(agent, Counting(lengths=(5,)), 20, last="pair")
    agent.fit(lanes(2), nb_steps=30, **QUIET)
    assert agent.step == 80
    agent.training = False
    rows, weights = agent.memory.nb_entries, agent.get_weights()
    drive(agent, Counting(), 20, last="pair")  # as in test: nothing is stored or learnt
    assert (agent.memory.nb_entries, agent.step) == (rows, 80)
    for a, b in zip(weights, agent.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    agent.training = True
    drive(agent, Counting(lengths=(5,)), 20, last="pair")
    assert agent.step == 100
    batch = sampled(agent)
    np.testing.assert_array_equal(batch.state0[:, -1, :2], batch.state1[:, -1, :2])


def test_backward_before_forward_and_a_reward_that_is_none_are_refused():
    agent = dqn()
    agent.training = True
    with pytest.raises(RuntimeError, match=r"backward\(\) was called before forward\(\)"):
        agent.backward(1.0)
    agent.forward(np.zeros(3, "f4"))
    with pytest.raises(ValueError, match="reward must be finite, got nan"):
        agent.backward(np.nan)


def test_dict_observations_by_hand():
    class Dicts(Noting):
        def act(self, observation):
            assert observation["a"].shape == (1, 2) and observation["b"].shape == (1,)
            return super().act(observation["a"])

    agent = Dicts()
    agent.training = True
    for t in range(3):
        agent.forward({"a": np.full(2, t), "b": t})
        agent.backward(float(t))
    first, second = agent.transitions()
    np.testing.assert_array_equal(first.next_observation["a"], second.observation["a"])
    assert (first.reward[0], second.reward[0]) == (0.0, 1.0)
