"""A2C's equations against a naive twin."""

import gymnasium as gym
import keras
import numpy as np
import pytest

from rl.agents.a2c import A2CAgent
from rl.agents.ppo import PPOAgent
from rl.distributions import distribution_for
from tests.policy_gradient_twin import (
    KINDS,
    Twin,
    Watched,
    Weather,
    assert_agrees,
    flat_weights,
    make_agent,
    networks,
    weather,
)


def compare(kind="discrete", lanes=3, nb_steps=60, nb_rollouts=3, **options):
    options = {"gamma": 0.9, "lam": 0.8, "entropy_weight": 0.05} | options
    agent = make_agent(A2CAgent, kind, **options)
    twin, watched = Twin(agent, kind, ppo=False, rate=0.1), Watched(agent)
    agent.fit(weather(kind, lanes), nb_steps=nb_steps, verbose=0, seed=1)
    assert_agrees(agent, watched, twin, nb_rollouts)
    assert agent.run_state.nb_updates == len(watched.rollouts) == int(agent.optimizer.iterations)
    return watched


@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_the_twins(kind):
    watched = compare(kind)
    valid = np.array([s.valid for r in watched.rollouts for s in r["steps"]])
    assert not valid.all()  # rows that are none were there
    for rollout in watched.rollouts:
        (rows,) = rollout["batches"]
        assert rows.tolist() == np.flatnonzero([s.valid for s in rollout["steps"]]).tolist()


@pytest.mark.parametrize(
    "options",
    [
        {"lanes": 1, "nb_steps": 30},
        {"shared": True},
        {"shared": True, "kind": "box"},
        {"lam": 1.0, "gamma": 1.0},
        {"lam": 0.0},
        {"gamma": 0.0},
        {"max_grad_norm": None, "normalize_advantage": True, "value_loss_weight": 0.01},
        {"value_loss_weight": 0.0, "max_grad_norm": 0.1},
        {"nb_rollout_steps": 1, "nb_steps": 30, "normalize_advantage": True, "lanes": 2},
        {"normalize_reward": True},
        {"normalize_observation": True},
    ],
    ids=str,
)
def test_updates_with_other_arguments_equal_the_twins(options):
    compare(**options)


# ---- compiled, eager, in parts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("compile_options", [{"jit_compile": True}, {"run_eagerly": True}], ids=str)
def test_xla_and_eager_give_the_same_weights(compile_options):
    plain, other = make_agent(A2CAgent, "box"), make_agent(A2CAgent, "box", compile_options=compile_options)
    for agent in (plain, other):
        agent.fit(weather("box"), nb_steps=60, verbose=0, seed=2)
    assert plain.run_state.nb_updates >= 3
    np.testing.assert_allclose(flat_weights(plain), flat_weights(other), atol=1e-5)


@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_nothing_is_traced_anew_whatever_the_number_of_rows_that_are_none(mode):
    agent, env = make_agent(A2CAgent), weather(mode=mode)
    agent.fit(env, nb_steps=60, verbose=0)
    before = [f.nb_traces for f in agent._functions]
    agent.fit(env, nb_steps=150, verbose=0)
    assert [f.nb_traces for f in agent._functions] == before
    assert before[0] == before[2] == 1


class _Driver:
    """What `prepare` asks of a driver."""

    observation_space, action_space, nb_lanes = Weather.observation_space, KINDS["discrete"][0], 1


# ---- actions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_env_gets_clipped_actions_and_the_rollout_keeps_them_as_drawn(lanes):
    agent = make_agent(A2CAgent, "box", initial_log_std=1.0)
    watched, env = Watched(agent), weather("box", lanes)
    agent.fit(env, nb_steps=30, verbose=0, seed=0)
    steps = [s for r in watched.rollouts for s in r["steps"]]
    drawn = np.array([s.action[0] for s in steps if s.valid[0]])
    got = np.array((env if lanes == 1 else env.envs[0]).actions)[: len(drawn)]
    assert np.abs(drawn).max() > 1.0
    np.testing.assert_array_equal(got, np.clip(drawn, -0.5, 0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_the_env_gets_members_of_its_space_and_a_test_takes_the_most_probable_ones(kind):
    agent, env = make_agent(A2CAgent, kind), weather(kind)
    agent.fit(env, nb_steps=60, verbose=0, seed=0)
    actions = [a for e in env.envs for a in e.actions]
    space = KINDS[kind][0]
    assert all(a in space for a in actions)
    assert len(np.unique(np.array(actions), axis=0)) > 1
    probe = weather(kind, lanes=1, ends=0.0)
    noted = []
    act = agent.act

    def noting(observation):
        noted.append(np.array(observation))
        return act(observation)

    agent.act = noting
    agent.test(probe, nb_episodes=1, nb_max_episode_steps=15, verbose=0, visualize=False)
    outputs = agent.evaluate(np.concatenate(noted)[:, None])[0]
    if kind == "multi-discrete":
        expected = np.stack([part.argmax(1) for part in np.split(outputs, [2, 5], axis=1)], 1)
    elif kind == "multi-binary":
        expected = (outputs > 0).astype(int)
    elif kind.startswith("box"):
        expected = np.clip(outputs[:, :2], -0.5, 0.5)
    else:
        expected = outputs.argmax(1) + space.start
    np.testing.assert_allclose(np.array(probe.actions), expected, atol=1e-6)


def test_each_lane_and_each_step_draws_its_own_action_from_the_policy():
    agent = make_agent(A2CAgent)
    agent.seed(3)
    agent.prepare(_Driver(), np.zeros((1, 3), np.float32))
    agent.training = True
    same = np.tile(np.array([0.3, -0.2, 1.0], np.float32), (100, 1))
    actions = np.array([agent.act(same) for _ in range(50)])
    assert actions.shape == (50, 100)
    logits = agent.evaluate(same[:1, None])[0][0]
    p = np.exp(logits) / np.exp(logits).sum()
    assert 0.05 < p.min()
    for part in (actions, actions[:, 7:8], actions[7:8]):  # all, one lane's, one step's
        expected = p * part.size
        chi_square = sum((np.sum(part == a) - expected[a]) ** 2 / expected[a] for a in range(3))
        assert chi_square < 13.8  # two degrees of freedom, p = 0.001
    agent.training = False
    assert set(agent.act(same).tolist()) == {int(p.argmax())}


# ---- step size ------------------------------------------------------------------------------------------------------


def one_step(optimizer, **options):
    """The change of the weights in the first rollout."""
    agent = make_agent(A2CAgent, optimizer=optimizer, **options)
    before = flat_weights(agent)
    agent.fit(weather(mode=gym.vector.AutoresetMode.SAME_STEP), nb_steps=15, verbose=0, seed=1)
    assert agent.run_state.nb_updates == 1
    return flat_weights(agent) - before


def sgd(**options):
    return keras.optimizers.SGD(1.0, **options)


def test_a_gradient_longer_than_max_grad_norm_is_scaled_down_to_it():
    free = one_step(sgd(), max_grad_norm=None)
    norm = np.linalg.norm(free)
    assert norm > 1
    for bound in (0.1, 0.5):
        np.testing.assert_allclose(one_step(sgd(), max_grad_norm=bound), free * bound / norm, atol=1e-6)
    np.testing.assert_allclose(one_step(sgd(), max_grad_norm=float(2 * norm)), free, atol=1e-6)


def test_the_optimizers_own_clipping_works_as_well():
    free = one_step(sgd(), max_grad_norm=None)
    norm = np.linalg.norm(free)
    alone = one_step(sgd(global_clipnorm=0.2), max_grad_norm=None)
    np.testing.assert_allclose(alone, free * 0.2 / norm, atol=1e-6)
    np.testing.assert_allclose(one_step(sgd(global_clipnorm=0.2), max_grad_norm=0.5), alone, atol=1e-6)
    half = one_step(sgd(global_clipnorm=0.5), max_grad_norm=0.2)
    np.testing.assert_allclose(half, free * 0.2 / norm, atol=1e-6)
    by_value = one_step(sgd(clipvalue=0.05), max_grad_norm=None)
    np.testing.assert_allclose(by_value, np.clip(free, -0.05, 0.05), atol=1e-6)


def test_a_schedule_advances_by_gradient_steps_and_the_rate_is_logged():
    class Halving(keras.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return 0.5 ** keras.ops.cast(step, "float32")

    agent = make_agent(A2CAgent, optimizer=keras.optimizers.SGD(Halving()))
    watched = Watched(agent)
    agent.fit(weather(mode=gym.vector.AutoresetMode.SAME_STEP), nb_steps=60, verbose=0, seed=1)
    assert [r["metrics"]["learning_rate"] for r in watched.rollouts] == [1, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("cls", [A2CAgent, PPOAgent])
def test_default_optimizers(cls):
    actor, critic = networks()
    agent = cls(actor, critic, KINDS["discrete"][0])
    agent.compile()
    if cls is A2CAgent:
        assert isinstance(agent.optimizer, keras.optimizers.RMSprop)
        assert (float(agent.optimizer.learning_rate), agent.optimizer.rho) == (pytest.approx(7e-4), 0.99)
    else:
        assert isinstance(agent.optimizer, keras.optimizers.Adam)
        assert float(agent.optimizer.learning_rate) == pytest.approx(3e-4)
    assert agent.optimizer.epsilon == 1e-5


def test_regularisers_count_and_are_in_the_loss():
    def agent_with(regulariser):
        actor, critic = networks()
        actor.layers[-1].kernel.regularizer = regulariser
        agent = A2CAgent(actor, critic, KINDS["discrete"][0], max_grad_norm=None)
        agent.compile(keras.optimizers.SGD(1.0), jit_compile=False)
        return agent, Watched(agent)

    (plain, watched), (decayed, also_watched) = agent_with(None), agent_with(keras.regularizers.L2(0.25))
    kernel = plain.actor.layers[-1].kernel.numpy()
    for agent in (plain, decayed):
        agent.fit(weather(mode=gym.vector.AutoresetMode.SAME_STEP), nb_steps=15, verbose=0, seed=1)
    losses = [w.rollouts[0]["metrics"]["loss"] for w in (watched, also_watched)]
    assert losses[1] - losses[0] == pytest.approx(0.25 * (kernel**2).sum(), abs=1e-4)
    got = decayed.actor.layers[-1].kernel.numpy() - plain.actor.layers[-1].kernel.numpy()
    np.testing.assert_allclose(got, -0.5 * kernel, atol=1e-5)


# ---- refusals -------------------------------------------------------------------------------------------------------


class Rising(Weather):
    """The first observation counts the steps, if `rises`."""

    rises = True

    def _obs(self):
        x = super()._obs()
        x[0] = len(self.actions) if self.rises else 0
        return x


@keras.saving.register_keras_serializable(package="tests")
class RootOf(keras.layers.Layer):
    """`sqrt(8.5 - first input)`: not a number from 9 on."""

    def call(self, x):
        return keras.ops.sqrt(8.5 - x[:, :1])


def fragile(cls, **options):
    actor, _ = networks()
    x = keras.layers.Input((1, 3))
    value = keras.layers.Dense(1)(RootOf()(keras.layers.Flatten()(x)))
    agent = cls(actor, keras.Model(x, value), KINDS["discrete"][0], nb_rollout_steps=4, **options)
    agent.compile(keras.optimizers.SGD(0.1), jit_compile=False)
    return agent


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (A2CAgent, {}),
        (PPOAgent, {"nb_epochs": 1, "batch_size": 4}),
        (PPOAgent, {"nb_epochs": 2, "batch_size": 2, "target_kl": 10.0}),
    ],
    ids=["a2c", "ppo", "ppo in batches"],
)
def test_a_value_that_is_not_a_number_stops_and_leaves_good_weights(cls, options):
    agent, env = fragile(cls, **options), Rising(KINDS["discrete"][0], ends=0.0)
    agent.fit(env, nb_steps=8, verbose=0, seed=1)
    good = flat_weights(agent)
    with pytest.raises(FloatingPointError, match="env step 12 .*last good"):
        agent.fit(env, nb_steps=8, verbose=0)
    # Each advantage looks ahead to the state whose value is not a number: there is no good batch.
    np.testing.assert_array_equal(flat_weights(agent), good)
    assert not agent.training
    env.rises = False
    agent.fit(env, nb_steps=8, verbose=0)  # and what was poisoned is forgotten
    assert np.isfinite(flat_weights(agent)).all()
    assert not np.array_equal(flat_weights(agent), good)


def model(*sizes, inputs=(1, 3)):
    x = keras.layers.Input(inputs)
    flat = keras.layers.Flatten()(x)
    return keras.Model(
        x, [keras.layers.Dense(n)(flat) for n in sizes] if len(sizes) > 1 else keras.layers.Dense(sizes[0])(flat)
    )


DISCRETE, BOX = gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (2,), np.float32)


@pytest.mark.parametrize("cls", [A2CAgent, PPOAgent])
@pytest.mark.parametrize(
    ("actor", "critic", "space", "text"),
    [
        (model(2), model(1), DISCRETE, r"(A2C|PPO)Agent: .*\(None, 3\)"),
        (model(3), model(1), BOX, r"(A2C|PPO)Agent: .*\(None, 2\)"),
        (model(8), model(1), gym.spaces.MultiDiscrete([2, 3, 4]), r"\(None, 9\)"),
        (model(8), model(1), gym.spaces.MultiBinary(3), r"\(None, 3\)"),
        (model(3), model(2), DISCRETE, r"Agent \(critic\): .*\(None, 1\)"),
        (model(3), None, DISCRETE, "without a critic the network must have two outputs, policy and value, got 1"),
        (model(3, 1, 1), None, DISCRETE, "must have two outputs, policy and value, got 3"),
        (model(1, 3), None, DISCRETE, r"policy output has shape \(None, 1\), expected \(None, 3\)"),
        (model(3, 2), None, DISCRETE, r"value output has shape \(None, 2\), expected \(None, 1\)"),
        (model(3, 1), model(1), DISCRETE, "got 2 outputs"),
        (model(3), model(3, 1), DISCRETE, r"Agent \(critic\): .*got 2 outputs"),
        ("actor", model(1), DISCRETE, "actor must be a keras.Model, got 'actor'"),
        (model(3), "critic", DISCRETE, "critic must be a keras.Model, got 'critic'"),
        (None, model(1), DISCRETE, "actor must be a keras.Model, got None"),
        (model(2), model(1), gym.spaces.Box(0, 9, (2,), np.int32), "action_space must be .*Box of floats.*int32"),
        (model(2), model(1), gym.spaces.Tuple([DISCRETE]), "action_space must be"),
        (model(2), model(1), gym.spaces.Dict(a=DISCRETE), "action_space must be"),
        (model(2), model(1), None, "action_space must be"),
        (model(3), model(1), 3, "action_space must be"),
    ],
)
def test_networks_that_do_not_fit_are_refused(cls, actor, critic, space, text):
    with pytest.raises(ValueError, match=text):
        cls(actor, critic, space)


@pytest.mark.parametrize("cls", [A2CAgent, PPOAgent])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"gamma": -0.1}, "gamma must be"),
        ({"gamma": float("nan")}, "gamma must be"),
        ({"lam": 1.1}, "lam must be"),
        ({"nb_rollout_steps": 0}, "nb_rollout_steps must be a whole number of at least 1, got 0"),
        ({"nb_rollout_steps": 2.5}, "nb_rollout_steps must be"),
        ({"value_loss_weight": -1}, "value_loss_weight must be"),
        ({"entropy_weight": -0.1}, "entropy_weight must be"),
        ({"max_grad_norm": 0}, "max_grad_norm must be positive, or None"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be"),
    ],
    ids=str,
)
def test_arguments_are_checked_at_construction(cls, options, text):
    with pytest.raises(ValueError, match=text):
        cls(*networks(), DISCRETE, **options)


@pytest.mark.parametrize(
    ("own", "given", "refused"),
    [
        (gym.spaces.Discrete(3), gym.spaces.Discrete(2), True),
        (gym.spaces.Discrete(3), gym.spaces.MultiBinary(3), True),
        (gym.spaces.MultiDiscrete([2, 3, 4]), gym.spaces.MultiDiscrete([4, 3, 2]), True),
        (gym.spaces.MultiDiscrete([2, 3, 4]), gym.spaces.MultiDiscrete([9]), True),
        (gym.spaces.MultiDiscrete([2, 3, 4]), gym.spaces.MultiDiscrete([2, 3, 4]), False),
        (gym.spaces.MultiBinary(3), gym.spaces.MultiBinary(4), True),
        (BOX, gym.spaces.Box(-1, 1, (3,), np.float32), True),
        (BOX, gym.spaces.Box(-3, 3, (2,), np.float32), False),
    ],
    ids=str,
)
def test_an_env_of_other_actions_is_refused(own, given, refused):
    agent = A2CAgent(model(distribution_for(own).nb_outputs), model(1), own)
    agent.compile("sgd", jit_compile=False)
    if not refused:
        agent.fit(Weather(given), nb_steps=2, verbose=0)
        return
    with pytest.raises(ValueError, match="A2CAgent was built for actions of .*action_space=env.action_space"):
        agent.fit(Weather(given), nb_steps=2, verbose=0)
    assert agent.step == 0


@pytest.mark.parametrize("actor_inputs", [(1, 3), (1, 4)])
def test_an_env_of_other_observations_is_refused_before_the_first_step(actor_inputs):
    critic_inputs = (1, 4) if actor_inputs == (1, 3) else (1, 3)
    agent = A2CAgent(model(3, inputs=actor_inputs), model(1, inputs=critic_inputs), DISCRETE)
    agent.compile("sgd", jit_compile=False)
    owner = r"A2CAgent \(critic\)" if critic_inputs == (1, 4) else "A2CAgent"
    with pytest.raises(ValueError, match=f"{owner}.*4"):
        agent.fit(Weather(DISCRETE), nb_steps=2, verbose=0)
    assert agent.step == 0


def test_an_optimizer_that_is_none_is_refused():
    agent = A2CAgent(*networks(), DISCRETE)
    with pytest.raises(TypeError, match=r"optimizer.*Adam"):
        agent.compile(keras.optimizers.Adam)


def test_several_steps_per_execution_are_refused():
    with pytest.raises(ValueError, match="steps_per_execution must be 1: all gradient steps"):
        A2CAgent(*networks(), DISCRETE).compile(steps_per_execution=4)


def test_fit_before_compile_is_refused():
    with pytest.raises(RuntimeError, match="compile"):
        A2CAgent(*networks(), DISCRETE).fit(weather(), nb_steps=10, verbose=0)
