"""`SACAgent`: whole updates against a NumPy twin, temperature, known values, what it does, files, refusals."""

import functools
import math

import keras
import numpy as np
import pytest
from gymnasium import spaces
from keras import layers, ops

import rl.agents
from rl.agents.sac import SACAgent
from rl.common.vec_env import DummyVecEnv, SubprocVecEnv
from rl.distributions import SquashedGaussian
from rl.memory import SequentialMemory
from rl.random import GaussianWhiteNoiseProcess
from tests.agents import test_ddpg as ddpg
from tests.toy_envs import Bandit, ConstantReward, Drift, LinearQuadratic

BOX = ddpg.BOX
NAMES = ("actor", "critic", "critic_2", "target_critic", "target_critic_2")


def networks(nb_actions=2, seed=0):
    """`(actor, [critic, critic], action input)` of three hidden units each."""
    actor = ddpg.networks(2 * nb_actions, seed)[0]
    return actor, [ddpg.networks(nb_actions, seed + x)[1] for x in (0, 10)], 1


def make_agent(nb_actions=2, optimizer="adam", metrics=None, nets=None, jit_compile=False, **options):
    options = {"nb_steps_warmup": 8, "batch_size": 8, "target_model_update": 0.1, "nb_steps_random": 0} | options
    options = {"memory": SequentialMemory(200)} | options
    agent = SACAgent(nb_actions, *(nets or networks(nb_actions)), **options)
    if optimizer is not None:
        agent.compile(optimizer, metrics=metrics, jit_compile=jit_compile)
    return agent


def weights(agent):
    found = {name: [np.float64(w) for w in getattr(agent, name).get_weights()] for name in NAMES}
    return found | {"temperature": [np.log(agent.temperature)]}


def assert_close(agent, expected, **tolerance):
    for name, values in weights(agent).items():
        for got, wanted in zip(values, expected[name], strict=True):
            np.testing.assert_allclose(got, wanted, err_msg=name, **tolerance)


class Drawn(SquashedGaussian):
    """A policy whose noise is known: the same in every draw."""

    def __init__(self, nb_actions, nb_rows):
        super().__init__(nb_actions)
        self.given = np.random.default_rng(7).normal(size=(nb_rows, nb_actions)).astype("f4")

    def sample_and_log_prob(self, outputs, noise):
        return super().sample_and_log_prob(outputs, ops.convert_to_tensor(self.given))


# ---- the naive twin: one row after the other, gradients by finite differences ----------------------------------------


def naive_draw(w, state, noise):
    """An action and its log-density."""
    mean, log_std = np.split(ddpg.naive_net(w, state), 2)
    action, log_prob = np.tanh(mean + np.exp(log_std) * noise), 0.0
    for a, m, s in zip(action, mean, np.exp(log_std), strict=True):
        z = (math.atanh(a) - m) / s
        log_prob += -0.5 * z * z - math.log(s * math.sqrt(2 * math.pi)) - math.log(1 - a * a)
    return action, log_prob


def naive_critic_loss(critic, w, batch, noise):
    total, alpha = 0.0, math.exp(w["temperature"][0])
    for i in range(len(batch.reward)):
        action1, log_prob1 = naive_draw(w["actor"], batch.state1[i], noise[i])
        values = [ddpg.naive_net(w[f"target_{x}"], batch.state1[i], action1)[0] for x in ("critic", "critic_2")]
        value1 = min(values) - alpha * log_prob1
        target = batch.reward[i] + (0.0 if batch.terminal1[i] else batch.discount[i] * value1)
        prediction = ddpg.naive_net(critic, batch.state0[i], batch.action[i])[0]
        total += batch.weight[i] * 0.5 * (target - prediction) ** 2
    return total / len(batch.reward)


def naive_actor_loss(actor, w, batch, noise):
    total, alpha = 0.0, math.exp(w["temperature"][0])
    for i in range(len(batch.reward)):
        action, log_prob = naive_draw(actor, batch.state0[i], noise[i])
        values = [ddpg.naive_net(w[x], batch.state0[i], action)[0] for x in ("critic", "critic_2")]
        total += batch.weight[i] * (alpha * log_prob - min(values))
    return total / len(batch.reward)


def naive_update(w, batch, noise, follow, target_entropy):
    names = ("critic", "critic_2")
    w |= {x: ddpg.descended(lambda c: naive_critic_loss(c, w, batch, noise), w[x], 0.3) for x in names}
    for x in names:
        w[f"target_{x}"] = [0.9 * t + 0.1 * s for t, s in zip(w[f"target_{x}"], w[x], strict=True)]
    if follow:
        log_prob = [naive_draw(w["actor"], s, n)[1] for s, n in zip(batch.state0, noise, strict=True)]
        w["actor"] = ddpg.descended(lambda a: naive_actor_loss(a, w, batch, noise), w["actor"], 0.2)
        if target_entropy is not None:
            excess = np.mean(batch.weight * (np.array(log_prob) + target_entropy))
            w["temperature"] = [w["temperature"][0] + 0.1 * excess]


@pytest.mark.parametrize(
    ("nb_actions", "delay", "target_entropy"), [(1, 1, "auto"), (2, 2, 0.5), (3, 1, None), (2, 3, "auto")]
)
def test_whole_updates_equal_a_naive_twin(nb_actions, delay, target_entropy):
    optimizers = [keras.optimizers.SGD(x) for x in (0.2, 0.3, 0.1)][: 2 if target_entropy is None else 3]
    options = {"policy_delay": delay, "target_entropy": target_entropy, "initial_temperature": 0.3}
    agent = make_agent(nb_actions, optimizers, **options)
    batches, w = ddpg.random_batches(nb_actions, k=4), weights(agent)
    batches = batches._replace(action=np.tanh(batches.action))
    agent.distribution = Drawn(nb_actions, 5)
    for i in range(4):
        resolved = -nb_actions if target_entropy == "auto" else target_entropy
        naive_update(w, ddpg.one(batches, i), agent.distribution.given, (i + 1) % delay == 0, resolved)
    ddpg.train_on(agent, batches)
    assert_close(agent, w, rtol=3e-4, atol=3e-5)


def test_logs_are_the_losses_and_what_the_policy_is():
    metrics = [["mae"], [], ["mse"]]
    agent = make_agent(optimizer=keras.optimizers.SGD(0.0), metrics=metrics, initial_temperature=0.4)
    names = ["loss", "actor_mae", "temperature_mse", *SACAgent.logged]
    assert agent.metrics_names == names
    agent.distribution = Drawn(2, 50)
    batches, w, noise = ddpg.random_batches(2, size=50), weights(agent), agent.distribution.given
    batch = ddpg.one(batches)
    logs = ddpg.train_on(agent, batches)
    losses = [naive_critic_loss(w[x], w, batch, noise) for x in ("critic", "critic_2")]
    drawn = [naive_draw(w["actor"], s, n) for s, n in zip(batch.state0, noise, strict=True)]
    log_prob = np.array([x for _, x in drawn])
    expected = {
        "loss": sum(losses),
        "actor_mae": np.abs([a for a, _ in drawn] - batch.action).mean(),
        "temperature_mse": np.mean((-log_prob + 2) ** 2),
        "mean_q": np.mean([ddpg.naive_net(w["critic"], *x)[0] for x in zip(batch.state0, batch.action, strict=True)]),
        "actor_loss": naive_actor_loss(w["actor"], w, batch, noise),
        "entropy": -log_prob.mean(),
        "temperature": 0.4,
        "temperature_loss": -math.log(0.4) * np.mean(batch.weight * (log_prob - 2)),
    }
    assert logs == pytest.approx(expected, rel=1e-4)
    values = [
        [ddpg.naive_net(w[x], s, a)[0] for x in ("critic", "critic_2")]
        for s, (a, _) in zip(batch.state0, drawn, strict=True)
    ]
    assert {int(np.argmin(v)) for v in values} == {0, 1}  # the least of each row is told from the least of the means


def test_targets_move_in_every_step_actor_and_temperature_in_their_turn():
    agent = make_agent(policy_delay=2)
    batches, before = ddpg.random_batches(2), weights(agent)
    for number in range(1, 7):
        logs = ddpg.train_on(agent, batches)
        moved, turn = ddpg.changed(before, weights(agent)), number % 2 == 0
        assert moved == (set(NAMES) | {"temperature"} if turn else set(NAMES) - {"actor"})
        assert [np.isnan(logs[x]) for x in ("actor_loss", "entropy", "temperature_loss")] == [not turn] * 3
        before = weights(agent)
    steps = {name: int(ops.convert_to_numpy(x.iterations)) for name, x in agent.optimizers.items()}
    assert steps == {"actor": 3, "critic": 6, "temperature": 3}


def test_each_optimizer_moves_its_own_part_alone():
    moves = {"actor": {"actor"}, "critic": set(NAMES) - {"actor"}, "temperature": {"temperature"}}
    for i, moved in enumerate(moves.values()):
        agent = make_agent(optimizer=[keras.optimizers.SGD(0.1 * (i == j)) for j in range(3)])
        before = weights(agent)
        ddpg.train_on(agent, ddpg.random_batches(2))
        assert ddpg.changed(before, weights(agent)) == moved
    one = make_agent(optimizer=keras.optimizers.Adam(0.123))
    assert [float(x.learning_rate) for x in one.optimizers.values()] == pytest.approx([0.123] * 3)


# ---- temperature -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("log_prob", "direction"), [(2.7, 1), (2.5, 0), (2.3, -1)])
def test_the_temperature_rises_where_the_entropy_is_below_its_target_and_stops_at_equality(log_prob, direction):
    class Constant(SquashedGaussian):
        def sample_and_log_prob(self, outputs, noise):
            return self.sample(outputs, noise), 0.0 * outputs[:, 0] + log_prob

    agent = make_agent(optimizer=keras.optimizers.SGD(0.1), target_entropy=-2.5)
    agent.distribution = Constant(2)
    ddpg.train_on(agent, ddpg.random_batches(2))
    assert np.sign(round(agent.temperature - 1, 6)) == direction


def test_a_fixed_temperature_has_no_optimizer_and_stays():
    agent = make_agent(target_entropy=None, initial_temperature=0.25)
    assert list(agent.optimizers) == ["actor", "critic"] and "temperature_loss" not in agent.metrics_names
    ddpg.fit(agent)
    assert agent.temperature == 0.25 and agent.run_state.nb_updates == 16


class CurvedBandit(Bandit):
    """One step, reward -12.5 a^2."""

    def __init__(self):
        super().__init__(-1, 1)

    def step(self, action):
        return np.ones(1, np.float32), -12.5 * float(action[0] ** 2), True, False, {}


def start(actor, critics, rate=0.02, nb_updates=2500, nb_actions=1, rates=(1, 1, 1), **options):
    """An agent whose learning rates fall to a hundredth, so that Adam comes to rest."""
    options = {"nb_steps_warmup": 200, "batch_size": 64} | options
    agent = SACAgent(nb_actions, actor, critics, 1, SequentialMemory(20_000), **options)
    decays = [keras.optimizers.schedules.PolynomialDecay(rate * x, nb_updates, rate * x / 100) for x in rates]
    adams = [keras.optimizers.Adam(x) for x in decays[: len(agent.learners())]]
    agent.compile(adams, jit_compile=False, steps_per_execution=50)
    return agent


def quadratic(size=1, bias=True):
    """An actor that is linear in the state, and critics that are quadratic in state and action."""
    observation, action = keras.Input((1, size)), keras.Input((size,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(2 * size, use_bias=False, kernel_initializer="zeros")(flat))
    joined = layers.Concatenate()([flat, action])
    features = ddpg.Products()(joined)
    if bias:
        features = layers.Concatenate()([features, joined])
    return actor, [keras.Model([observation, action], layers.Dense(1, use_bias=bias)(features)) for _ in range(2)]


ONE = np.ones((1, 1, 1), "f4")


def entropy(agent, nb_rows=20_000):
    """The mean of -log pi in the state 1."""
    return float(-ops.mean(agent.drawn(ops.ones((nb_rows, 1, 1)))[1]))


@pytest.mark.parametrize("target_entropy", [-1.0, -2.0])
def test_the_temperature_holds_the_entropy_at_its_target(target_entropy):
    actor, critics = quadratic()
    for critic in critics:  # the rewards as they are, so that nothing but actor and temperature moves
        critic.layers[-1].set_weights([np.float32([[0], [0], [-12.5], [0], [0]]), np.zeros(1)])
    # The temperature slower than the actor: it falls as long as the entropy is too high, and has to come back then.
    options = {"target_entropy": target_entropy, "initial_temperature": 0.1, "rates": (1, 0, 0.2), "nb_updates": 5000}
    agent = start(actor, critics, **options)
    agent.fit(CurvedBandit(), nb_steps=5200, verbose=0, seed=1)
    variance = math.exp(2 * target_entropy) / (2 * math.pi * math.e)  # of a normal distribution with that entropy
    assert entropy(agent) == pytest.approx(target_entropy, abs=0.05)
    assert agent.temperature == pytest.approx(25 * variance, rel=0.1)


def test_a_quadratic_bandit_has_the_maximum_entropy_solution():
    options = {"target_entropy": None, "initial_temperature": 0.01, "nb_updates": 3000, "nb_steps_random": 3200}
    agent = start(*quadratic(), **options)
    agent.fit(CurvedBandit(), nb_steps=3200, verbose=0, seed=1)
    mean, log_std = agent.evaluate(ONE)[0]
    assert mean == pytest.approx(0, abs=2e-3)
    assert math.exp(log_std) == pytest.approx(math.sqrt(0.01 / 25), rel=0.03)
    action, log_prob = agent.drawn(ops.ones((20_000, 1, 1)))  # by the env's reward: what the policy is worth
    worth = float(ops.mean(-12.5 * ops.square(action[:, 0]) - 0.01 * log_prob))
    assert worth == pytest.approx(0.5 * 0.01 * math.log(2 * math.pi * 0.01 / 25), abs=1e-3)


# ---- known values ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(-2, 2), (0, 1)])
def test_a_bandits_best_action_is_found_within_its_bounds(low, high):
    # Uniform actions throughout: of a policy's own, which soon differ little, a critic learns its curve badly.
    options = {"target_entropy": None, "initial_temperature": 1e-3, "nb_updates": 1500, "nb_steps_random": 1700}
    agent = start(*quadratic(), **options)
    agent.fit(Bandit(low, high), nb_steps=1700, verbose=0, seed=1)
    inner = math.tanh(agent.evaluate(ONE)[0, 0])
    assert low + (inner + 1) / 2 * (high - low) == pytest.approx(0.3, abs=0.02)


@keras.saving.register_keras_serializable(package="tests")
class Arctanh(layers.Layer):
    def call(self, x):
        return ops.arctanh(ops.clip(x, -0.99, 0.99))


def test_without_a_temperature_a_linear_quadratic_regulator_is_found():
    _, critics = quadratic(bias=False)
    observation = keras.Input((1, 1))
    linear = layers.Dense(1, use_bias=False, kernel_initializer="zeros")(layers.Flatten()(observation))
    spread = layers.Dense(1, kernel_initializer="zeros")(layers.Rescaling(0.0, -1.0)(layers.Flatten()(observation)))
    actor = keras.Model(observation, layers.Concatenate()([Arctanh()(linear), spread]))
    agent = start(
        actor,
        critics,
        random_process=GaussianWhiteNoiseProcess(sigma=0.3),
        gamma=LinearQuadratic.GAMMA,
        target_model_update=0.05,
        target_entropy=None,
        initial_temperature=0.0,
        rate=0.03,
        nb_updates=4000,
    )
    agent.fit(DummyVecEnv([lambda: LinearQuadratic(1)] * 4), nb_steps=4200, verbose=0, seed=1)
    s, gain, _ = LinearQuadratic(1).solution()
    states = np.random.default_rng(0).uniform(-1, 1, (50, 1, 1)).astype("f4")
    x, outputs = states[:, 0], agent.evaluate(states)
    inner = np.tanh(outputs[:, :1])
    assert np.exp(outputs[:, 1]).max() < 0.1
    np.testing.assert_allclose(3 * inner, -x @ gain.T, atol=0.06)
    for critic, _ in agent.critics:
        value = ops.convert_to_numpy(agent.q_value(critic, states, inner))
        np.testing.assert_allclose(value, -np.sum((x @ s) * x, axis=1), atol=0.06)


def test_a_time_limit_is_not_a_terminal_state():
    class Continuous(ConstantReward):
        action_space = spaces.Box(-1, 1, (1,), np.float32)

    observation, action = keras.Input((1, 1)), keras.Input((1,))
    flat = layers.Flatten()(observation)
    joined = layers.Concatenate()([flat, layers.Rescaling(0.0)(action)])
    critics = [keras.Model([observation, action], layers.Dense(1, use_bias=False)(joined)) for _ in range(2)]
    options = {"target_model_update": 0.9, "batch_size": 32, "target_entropy": None, "initial_temperature": 0.0}
    agent = SACAgent(1, keras.Model(observation, layers.Dense(2)(flat)), critics, 1, SequentialMemory(5000), **options)
    agent.compile(keras.optimizers.SGD(0.9), jit_compile=False, steps_per_execution=32)
    agent.fit(DummyVecEnv([lambda: Continuous(5)] * 3), nb_steps=3400, verbose=0, seed=0)
    value = agent.q_value(agent.critic, ONE, np.zeros((1, 1), "f4"))
    assert float(value[0]) == pytest.approx(100, abs=1)


# ---- what it does, and what is stored --------------------------------------------------------------------------------

LOPSIDED = spaces.Box(np.float32([-2, 0, 10]), np.float32([4, 1, 30]))


def test_actions_are_drawn_in_fit_within_lopsided_bounds_and_stored_in_the_policys_units():
    agent, env = make_agent(3, nb_steps_random=10, nb_steps_warmup=40), Drift(LOPSIDED)
    ddpg.fit(agent, env, 400)
    actions = np.array(env.actions)
    assert all(LOPSIDED.contains(a) for a in env.actions)
    batch = agent.memory.sample_batch(500)
    stored = np.unique(np.round(batch.action.reshape(-1, 3), 4), axis=0)
    inner = 2 * (actions - LOPSIDED.low) / (LOPSIDED.high - LOPSIDED.low) - 1
    assert np.abs(stored).max() <= 1
    assert all(np.abs(inner - row).sum(axis=1).min() < 1e-3 for row in stored)
    assert np.std(inner[100:], axis=0).min() > 0.05


def test_what_fit_does_is_distributed_as_the_policy_says():
    agent = make_agent(1)
    ddpg.fit(agent, nb_steps=3)
    agent.training = True
    outputs = np.tile(np.float32([[0.4, -1.0]]), (50_000, 1))
    u = np.arctanh(agent.choose(outputs))
    assert u.mean() == pytest.approx(0.4, abs=0.01) and u.std() == pytest.approx(math.exp(-1), rel=0.02)
    agent.training = False
    np.testing.assert_array_equal(agent.choose(outputs), np.full((50_000, 1), np.tanh(np.float32(0.4))))


def test_a_test_does_tanh_of_the_mean():
    agent, env = make_agent(3), Drift(LOPSIDED)
    ddpg.fit(agent, Drift(LOPSIDED))
    seen = []
    inner = agent.explore

    def noted(outputs):
        seen.append(outputs)
        return inner(outputs)

    object.__setattr__(agent, "explore", noted)
    agent.test(env, 3, visualize=False, verbose=0)
    mean = np.concatenate(seen)[:, :3]
    expected = LOPSIDED.low + (np.tanh(mean) + 1) / 2 * (LOPSIDED.high - LOPSIDED.low)
    np.testing.assert_allclose(env.actions, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vec_env", [DummyVecEnv, SubprocVecEnv])
def test_three_lanes_of_three_actions(vec_env):
    agent = make_agent(3)
    env = vec_env([functools.partial(Drift, BOX[3])] * 3)
    before = weights(agent)
    ddpg.fit(agent, env, 60)
    assert agent.step == 60 and agent.run_state.nb_updates == 52
    assert ddpg.changed(before, weights(agent)) == {*NAMES, "temperature"}
    assert len(agent.test(env, 4, visualize=False, verbose=0).history["episode_reward"]) == 4
    env.close()


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_several_observations(kind):
    picture, vector = keras.Input((1, 2, 2), name="picture", dtype="uint8"), keras.Input((1, 3), name="vector")
    action = keras.Input((2,), name="action")

    def joined(inputs):
        return layers.Concatenate()([layers.Flatten()(ops.cast(x, "float32")) for x in inputs])

    actor = keras.Model([picture, vector], layers.Dense(4)(joined([picture, vector])))
    critic = keras.Model([picture, action, vector], layers.Dense(1)(joined([picture, action, vector])))
    agent = make_agent(nets=(actor, critic, action))
    before = weights(agent)
    ddpg.fit(agent, ddpg.Parts(kind))
    assert ddpg.changed(before, weights(agent)) == {*NAMES, "temperature"}


def test_a_seed_decides_the_noise():
    def after_a_fit(seed):
        agent = make_agent()
        ddpg.fit(agent, seed=seed)
        return weights(agent)

    first, again, other = after_a_fit(1), after_a_fit(1), after_a_fit(2)
    assert not ddpg.changed(first, again) and ddpg.changed(first, other)


def test_with_xla_and_without_the_steps_are_the_same():
    batches, agents = ddpg.random_batches(2, k=3), []
    for jit_compile in (True, False):
        agents.append(make_agent(jit_compile=jit_compile, policy_delay=2))
        agents[-1].distribution = Drawn(2, 5)
        ddpg.train_on(agents[-1], batches)
    assert_close(agents[0], weights(agents[1]), rtol=1e-4, atol=1e-5)


def test_half_precision_stays_finite_for_5000_updates():
    keras.mixed_precision.set_global_policy("mixed_float16")
    agent = SACAgent(2, *networks(), memory=SequentialMemory(1000), batch_size=16, nb_steps_warmup=100)
    agent.compile("adam", steps_per_execution=100)
    assert all(isinstance(x, keras.optimizers.LossScaleOptimizer) for x in agent.optimizers.values())
    ddpg.fit(agent, nb_steps=5100)
    assert agent.run_state.nb_updates == 5000
    assert all(np.isfinite(w).all() for w in agent.get_weights())


@pytest.mark.parametrize("broken", ["actor", "critic"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(broken):
    agent = make_agent()
    batches, before = ddpg.random_batches(2), weights(agent)
    if broken == "critic":
        batches.reward[0, 0] = np.nan
    else:

        class Broken(SquashedGaussian):
            def sample_and_log_prob(self, outputs, noise):
                action, log_prob = super().sample_and_log_prob(outputs, noise)
                return action, log_prob / 0.0 * 0.0

        agent.distribution = Broken(2)
        batches.terminal1[:] = 1
    logs = ddpg.train_on(agent, batches)
    assert np.isnan(logs["loss"])
    after = {name: values for name, values in weights(agent).items() if name in before}
    if broken == "actor":
        assert not {"actor", "temperature"} & ddpg.changed(before, after)
    else:
        assert not {"critic", "critic_2"} & ddpg.changed(before, after)


# ---- defaults, files, refusals ---------------------------------------------------------------------------------------


def test_defaults_are_the_papers():
    agent = rl.agents.SACAgent(2, *networks(), SequentialMemory(100), nb_steps_warmup=700)
    assert (agent.target_entropy, agent.initial_temperature, agent.policy_delay) == ("auto", 1.0, 1)
    assert (agent.batch_size, agent.target_model_update, agent.gamma) == (256, 0.005, 0.99)
    assert (agent.scale_actions, agent.nb_steps_random) == (True, 700)


def test_one_critic_gets_a_twin_with_weights_of_its_own():
    observation, action = keras.Input((1, 3)), keras.Input((2,))
    flat = layers.Flatten()(observation)
    actor = keras.Model(observation, layers.Dense(4)(flat))
    critic = keras.Model([observation, action], layers.Dense(1)(layers.Concatenate()([flat, action])))
    agent = make_agent(nets=(actor, critic, action))
    assert not np.array_equal(critic.get_weights()[0], agent.critic_2.get_weights()[0])
    for target, source in agent.targets():
        for x, y in zip(target.get_weights(), source.get_weights(), strict=True):
            np.testing.assert_array_equal(x, y)
    actor, critics, action = networks()  # whose initializers have seeds
    with pytest.raises(ValueError, match=r"SACAgent: .*very same weights.*critic=\[critic, another_critic\]"):
        make_agent(nets=(actor, critics[0], action))


@pytest.mark.parametrize("target_entropy", ["auto", -0.7, None])
def test_a_saved_agent_goes_on_with_temperature_and_optimizers(tmp_path, target_entropy):
    agent = make_agent(policy_delay=2, target_entropy=target_entropy, initial_temperature=0.5)
    ddpg.fit(agent, nb_steps=23)
    agent.save(tmp_path / "agent.keras")
    loaded = keras.models.load_model(tmp_path / "agent.keras")
    assert_close(loaded, weights(agent), rtol=0)
    assert (loaded.target_entropy, loaded.policy_delay, loaded.initial_temperature) == (target_entropy, 2, 0.5)
    assert loaded.temperature == agent.temperature and loaded.metrics_names == agent.metrics_names
    for name, optimizer in agent.optimizers.items():
        for x, y in zip(optimizer.variables, loaded.optimizers[name].variables, strict=True):
            np.testing.assert_array_equal(ops.convert_to_numpy(x), ops.convert_to_numpy(y))
    for one in (agent, loaded):
        one.distribution = Drawn(2, 5)
        one._functions = None
        ddpg.train_on(one, ddpg.random_batches(2, k=3))
    assert_close(loaded, weights(agent), rtol=1e-5, atol=1e-6)


def test_weights_are_three_files_and_reach_the_targets(tmp_path):
    agent, other = make_agent(), make_agent(nets=networks(seed=50))
    agent.save_weights(str(tmp_path / "sac.weights.h5"))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *("sac_actor.weights.h5", "sac_critic.weights.h5", "sac_critic_2.weights.h5")
    ]
    other.load_weights(str(tmp_path / "sac.weights.h5"))
    assert_close(other, weights(agent))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_delay": 0}, "policy_delay must be a whole number of at least 1, got 0"),
        ({"target_entropy": "automatic"}, "target_entropy must be a finite number, 'auto' or None, got 'automatic'"),
        ({"target_entropy": np.inf}, "target_entropy must be a finite number"),
        ({"initial_temperature": 0.0}, "initial_temperature must be positive, got 0.0"),
        ({"initial_temperature": -1.0, "target_entropy": None}, "initial_temperature must be at least 0"),
    ],
)
def test_bad_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make_agent(**options)


def test_networks_and_spaces_that_do_not_fit_are_named():
    actor, critics, action = networks()
    with pytest.raises(ValueError, match=r"means and log standard deviations.*\(None, 3\), expected \(None, 4\)"):
        make_agent(nets=(ddpg.networks(3)[0], critics, action))
    with pytest.raises(ValueError, match="critic must be one critic, or a list of two"):
        make_agent(nets=(actor, [*critics, critics[0]], action))
    with pytest.raises(ValueError, match=r"critic's input 'action'.*\(None, 3\), expected \(None, 2\)"):
        make_agent(nets=(actor, [critics[0], ddpg.networks(3)[1]], action))
    with pytest.raises(ValueError, match="critic_action_input must be one of the inputs"):
        make_agent(nets=(actor, critics, "act"))
    with pytest.raises(ValueError, match="scale_actions=True needs an env whose actions are bounded"):
        ddpg.fit(make_agent(), Drift(spaces.Box(-np.inf, np.inf, (2,), np.float32)))
    with pytest.raises(ValueError, match="SACAgent chooses continuous actions"):
        ddpg.fit(make_agent(), Drift(spaces.Discrete(2)))
    with pytest.raises(ValueError, match="nb_actions=2, but the env's action has 3 components"):
        ddpg.fit(make_agent(), Drift(BOX[3]))
