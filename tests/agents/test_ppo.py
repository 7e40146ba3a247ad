"""PPO's equations against a naive twin; batches, clipping, early stops, schedules. What it shares: see test_a2c.py."""

import warnings

import gymnasium as gym
import keras
import numpy as np
import pytest
from keras import ops

from rl.agents.a2c import A2CAgent
from rl.agents.ppo import PPOAgent
from rl.rollout import RolloutBatch
from rl.util import LinearSchedule
from tests.backends import NAME, call_back, value_and_gradient
from tests.policy_gradient_twin import (
    KINDS,
    Twin,
    Watched,
    assert_agrees,
    flat_weights,
    make_agent,
    networks,
    weather,
)

# Three lanes of five steps: 15 rows, fewer where some are no transitions.
SMALL = {"nb_rollout_steps": 5, "nb_epochs": 2, "batch_size": 5}
SAME_STEP = gym.vector.AutoresetMode.SAME_STEP  # every row is a transition


def small(kind="discrete", cls=PPOAgent, **options):
    return make_agent(cls, kind, **(SMALL | options))


def train(agent, kind="discrete", nb_steps=45, mode=SAME_STEP, lanes=3):
    agent.fit(weather(kind, lanes, mode), nb_steps=nb_steps, verbose=0, seed=1)
    return agent


# ---- whole updates --------------------------------------------------------------------------------------------------


def compare(kind="discrete", rate=0.3, clip_range=0.05, clip_value_range=None, compile_options=None, **options):
    options = {"gamma": 0.9, "lam": 0.8, "entropy_weight": 0.05, "max_grad_norm": 2.0} | options
    options |= {"clip_range": clip_range, "clip_value_range": clip_value_range}
    agent = small(kind, optimizer=keras.optimizers.SGD(rate), compile_options=compile_options, **options)
    twin, watched = Twin(agent, kind, ppo=True, rate=rate), Watched(agent)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A rollout of", UserWarning)
        train(agent, kind, mode=gym.vector.AutoresetMode.NEXT_STEP, nb_steps=50)
    valid = np.array([s.valid for r in watched.rollouts for s in r["steps"]])
    assert not valid.all()
    assert agent.run_state.nb_updates == sum(len(r["batches"]) for r in watched.rollouts)
    assert agent.run_state.nb_updates == int(agent.optimizer.iterations)
    assert_agrees(agent, watched, twin, 3, clip_range=clip_range, clip_value_range=clip_value_range)
    return watched


@pytest.mark.parametrize("kind", KINDS)
def test_updates_equal_the_twins(kind):
    # Networks start from other numbers on each backend. A row at the kink of a clip would fail: here none is.
    watched = compare(kind, rate=0.25 if NAME == "jax" else 0.3)
    fractions = [r["metrics"]["clip_fraction"] for r in watched.rollouts]
    assert 0.1 < np.mean(fractions) < 0.9  # both sides of the clip were compared
    assert all(r["metrics"]["approx_kl"] > 1e-4 for r in watched.rollouts)


@pytest.mark.parametrize(
    "options",
    [
        {"compile_options": {"jit_compile": True}},
        {"shared": True, "kind": "box"},
        {"normalize_advantage": False, "max_grad_norm": 0.5},
        {"clip_value_range": 0.1, "value_loss_weight": 1.0},
        {"batch_size": 1, "nb_epochs": 1, "rate": 0.1},
        {"batch_size": 7, "nb_epochs": 3},
        {"batch_size": 15, "nb_epochs": 3},
        {"batch_size": 256, "nb_epochs": 1, "max_grad_norm": None},
        {"lam": 1.0, "gamma": 1.0},
        {"normalize_observation": True, "normalize_reward": True},
    ],
    ids=str,
)
def test_updates_with_other_arguments_equal_the_twins(options):
    compare(**options)


@pytest.mark.parametrize(("kind", "lam"), [("discrete", 1.0), ("box", 0.8)])
def test_one_epoch_of_one_batch_without_clipping_is_a2c(kind, lam):
    options = {"nb_rollout_steps": 5, "lam": lam, "entropy_weight": 0.02, "normalize_advantage": False}
    a2c = make_agent(A2CAgent, kind, **options)
    ppo = make_agent(PPOAgent, kind, **options, nb_epochs=1, batch_size=15, clip_range=1e6)
    start = flat_weights(a2c)
    for agent in (a2c, ppo):
        train(agent, kind)
    assert a2c.run_state.nb_updates == ppo.run_state.nb_updates == 3
    np.testing.assert_allclose(flat_weights(ppo), flat_weights(a2c), atol=1e-6)
    assert np.abs(flat_weights(ppo) - start).max() > 0.01


# ---- the ratio ------------------------------------------------------------------------------------------------------


class Ratios(PPOAgent):
    """Notes the ratio of each row of each gradient step; run eagerly."""

    def policy_loss(self, log_prob, advantage, batch):
        loss, logs = super().policy_loss(log_prob, advantage, batch)
        ratio = ops.exp(log_prob - batch.log_prob0)
        call_back(lambda *seen: self.note(seen), ratio, logs["approx_kl"], logs["clip_fraction"])
        return loss, logs


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "box"},
        {"kind": "box with log std", "shared": True},
        {"kind": "multi-discrete", "normalize_observation": True, "normalize_reward": True},
    ],
    ids=str,
)
def test_the_ratio_is_1_in_the_first_batch_of_each_rollout_and_nowhere_else(options):
    kind = options.get("kind", "discrete")
    agent = small(cls=Ratios, compile_options={"run_eagerly": True}, **options)
    noted = []
    agent.note = noted.append
    train(agent, kind, nb_steps=45)
    assert len(noted) == 3 * 6
    for i, (ratio, approx_kl, clip_fraction) in enumerate(noted):
        if i % 6 == 0:
            assert np.abs(ratio - 1).max() < 1e-5
            assert abs(approx_kl) < 1e-6 and clip_fraction == 0
        else:
            assert np.abs(ratio - 1).max() > 1e-5


@pytest.mark.parametrize(("jit_compile", "normalize_observation"), [(False, False), (False, True), (True, True)])
def test_one_compiled_step_has_no_divergence(jit_compile, normalize_observation):
    options = {"nb_epochs": 1, "batch_size": 15, "normalize_observation": normalize_observation}
    agent = small(compile_options={"jit_compile": jit_compile}, clip_range=1e-4, **options)
    watched = Watched(agent)
    train(agent)
    assert len(watched.rollouts) == 3
    for rollout in watched.rollouts:
        assert abs(rollout["metrics"]["approx_kl"]) < 1e-6
        assert rollout["metrics"]["clip_fraction"] == 0


def batch_of(rows, clip_range=0.2, clip_value_range=0.5, **fields):
    """A `RolloutBatch` of so many rows; what is not given is 0, weights are 1."""
    blank = {name: np.zeros(rows, "float32") for name in RolloutBatch._fields} | {"weight": np.ones(rows, "float32")}
    blank["scheduled"] = {"clip_range": np.float32(clip_range), "clip_value_range": np.float32(clip_value_range)}
    return RolloutBatch(**(blank | {k: np.array(v, "float32") for k, v in fields.items()}))


# rho, A, objective, its derivative by log rho: rho A where the unclipped one is the smaller one.
QUADRANTS = [
    (0.7, 1.0, 0.7, 0.7),
    (1.0, 1.0, 1.0, 1.0),
    (1.3, 1.0, 1.2, 0.0),
    (0.7, -1.0, -0.8, 0.0),
    (1.0, -1.0, -1.0, -1.0),
    (1.3, -1.0, -1.3, -1.3),
    (1.1, 2.5, 2.75, 2.75),
    (0.9, -2.5, -2.25, -2.25),
    (5.0, 3.0, 3.6, 0.0),
    (0.1, -3.0, -2.4, 0.0),
    (5.0, -3.0, -15.0, -15.0),
    (0.1, 3.0, 0.3, 0.3),
    (1.3, 0.0, 0.0, 0.0),
]


@pytest.mark.parametrize("row", [*range(len(QUADRANTS)), None])
def test_the_objective_and_its_gradient_by_hand(row):
    table = np.array(QUADRANTS if row is None else [QUADRANTS[row]])
    rho, advantage, objective, slope = table.T
    log_prob0 = np.full(len(table), -1.5)
    log_prob = (np.log(rho) + log_prob0).astype("float32")
    agent, batch = small(), batch_of(len(table), log_prob0=log_prob0)

    def policy_loss(x):
        return agent.policy_loss(x, advantage.astype("float32"), batch)

    loss, gradient = value_and_gradient(lambda x: policy_loss(x)[0], log_prob)
    logs = policy_loss(log_prob)[1]
    assert float(loss) == pytest.approx(-objective.mean(), abs=1e-5)
    np.testing.assert_allclose(gradient, -slope / len(table), atol=1e-5)
    assert float(logs["clip_fraction"]) == pytest.approx(np.mean(np.abs(rho - 1) > 0.2))
    assert float(logs["approx_kl"]) == pytest.approx(np.mean(rho - 1 - np.log(rho)), abs=1e-5)


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [  # the old value is 0, c is 0.5; derivatives by the value
        (0.3, 1.0, 0.49, -1.4),  # inside
        (0.8, 1.0, 0.25, 0.0),  # beyond c, on the way to the target: no further
        (0.8, 0.0, 0.64, 1.6),  # beyond c, away from the target: the larger loss pulls it back
        (-0.8, 1.0, 3.24, -3.6),
        (-0.8, -1.0, 0.25, 0.0),
        (2.0, 1.0, 1.0, 2.0),
    ],
)
def test_the_clipped_value_loss_by_hand(value, target, loss, slope):
    agent, x = small(clip_value_range=0.5), np.array([value], "float32")
    got, gradient = value_and_gradient(lambda x: agent.value_loss(x, batch_of(1, target=[target])), x)
    assert got.shape == (1,)
    assert float(got[0]) == pytest.approx(loss, abs=1e-5)
    assert float(gradient[0]) == pytest.approx(slope, abs=1e-5)
    plain = small().value_loss(x, batch_of(1, target=[target]))
    assert float(plain[0]) == pytest.approx((target - value) ** 2, abs=1e-5)


def test_rows_that_fill_up_a_batch_count_for_nothing():
    agent, rng = small(clip_value_range=0.5, entropy_weight=0.3), np.random.default_rng(0)
    names = ("action", "log_prob0", "value0", "advantage", "target")

    def batch(rows, weight):
        return batch_of(len(rows), **{n: fields[n][rows] for n in fields}, weight=weight)

    fields = {n: rng.normal(size=5) for n in names} | {"state0": rng.normal(size=(5, 1, 3)), "action": [0, 1, 2, 0, 1]}
    fields = {n: np.array(x) for n, x in fields.items()}
    alone = agent.loss_fn(batch(np.arange(3), np.ones(3)))
    filled = agent.loss_fn(batch(np.arange(5), np.array([1, 1, 1, 0, 0])))
    assert float(alone[0]) == pytest.approx(float(filled[0]), abs=1e-6)
    assert set(alone[3]) == set(agent.logged)
    for name in alone[3]:
        assert float(alone[3][name]) == pytest.approx(float(filled[3][name]), abs=1e-6)
    assert alone[0].shape == () and alone[1].shape == alone[2].shape == (3,)


@pytest.mark.parametrize("normalize", [False, True])
def test_what_stands_in_rows_that_are_none_changes_nothing(normalize):
    def trained(rubbish):
        agent = small(normalize_observation=normalize, normalize_reward=normalize)
        observe = agent.observe

        def poisoned(transition):
            x = {k: np.array(getattr(transition, k)) for k in ("observation", "next_observation", "reward")}
            for field in x.values():
                field[~transition.valid] = rubbish
            action = np.where(transition.valid, transition.action, 2)
            return observe(transition._replace(**x, action=action))

        agent.observe = poisoned
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "A rollout of", UserWarning)
            train(agent, mode=gym.vector.AutoresetMode.NEXT_STEP, nb_steps=60)
        return np.concatenate([np.ravel(w) for w in agent.get_weights()])

    clean = trained(0.0)
    assert np.isfinite(clean).all()
    np.testing.assert_array_equal(trained(np.float32(np.nan)), clean)


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_invalid", [0, 1, 7, 14, 29])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 15, 29, 30, 31, 1000])
def test_every_transition_is_in_one_batch_per_epoch(batch_size, nb_invalid):
    nb_rows, nb_epochs = 30, 3
    agent = small(batch_size=batch_size, nb_epochs=nb_epochs, nb_rollout_steps=10)
    agent.dice.rng = 0
    valid = np.sort(np.random.default_rng(1).permutation(nb_rows)[nb_invalid:])
    rows, sizes, n = agent._batches(valid, nb_rows)
    width = min(batch_size, nb_rows)
    assert rows.shape == (nb_epochs * int(np.ceil(nb_rows / width)), width)  # whatever is valid
    assert sizes.shape == rows.shape[:1] and (sizes > 0).all()
    per_epoch = int(np.ceil(len(valid) / width))
    assert n == nb_epochs * per_epoch
    orders = []
    for epoch in range(nb_epochs):
        batches = [rows[i, : sizes[i]] for i in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
        assert all(len(b) == width for b in batches[:-1])
        orders.append(np.concatenate(batches).tolist())
        assert sorted(orders[-1]) == valid.tolist()
    assert np.isin(rows, valid).all()
    if per_epoch > 1 and len(valid) > 5:
        assert orders[0] != orders[1] != orders[2] and valid.tolist() not in orders


def test_shuffles_are_uniform():
    agent = small(batch_size=2, nb_epochs=4000, nb_rollout_steps=5)
    agent.dice.rng = 0
    rows = agent._batches(np.arange(5), 5)[0].reshape(4000, 6)[:, :5]
    counts = np.array([[np.sum(rows[:, place] == row) for row in range(5)] for place in range(5)])
    chi_square = ((counts - 800) ** 2 / 800).sum()
    assert chi_square < 39.3  # 16 degrees of freedom, p = 0.001


def test_nothing_is_traced_anew_whatever_the_number_of_rows_that_are_none():
    agent = small(batch_size=4, target_kl=0.05, clip_range=LinearSchedule(0.2), nb_total_steps=500)
    env = weather()
    with pytest.warns(UserWarning, match="batch_size=4"):
        agent.fit(env, nb_steps=60, verbose=0)
    before = [f.nb_traces for f in agent._functions]
    agent.fit(env, nb_steps=150, verbose=0)
    assert [f.nb_traces for f in agent._functions] == before
    assert before[0] == before[2] == 1


@pytest.mark.parametrize(
    ("batch_size", "lanes", "text"),
    [
        (4, 3, "A rollout of 5 x 3 steps, batch_size=4: the last batch of each epoch has 3"),
        (256, 3, "A rollout of 5 x 3 steps, batch_size=256: so an epoch is one batch"),
        (2, 1, "A rollout of 5 x 1 steps, batch_size=2: the last batch of each epoch has 1"),
        (5, 3, None),
        (15, 3, None),
        (1, 1, None),
    ],
)
def test_sizes_that_do_not_divide_are_told_once(batch_size, lanes, text):
    agent, env = small(batch_size=batch_size), weather(lanes=lanes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        agent.test(env, nb_episodes=1, verbose=0, visualize=False)
        assert not [w for w in caught if "batch_size" in str(w.message)]  # a test learns nothing
        for again in (env, weather(lanes=lanes), env):
            agent.fit(again, nb_steps=3, verbose=0)
    told = [w for w in caught if "batch_size" in str(w.message)]
    assert [str(w.message) for w in told] == ([] if text is None else [text])
    assert all(w.filename == __file__ for w in told)


# ---- target_kl ------------------------------------------------------------------------------------------------------


def test_target_kl_stops_after_the_first_batch_beyond_one_and_a_half_times_it():
    def agent_with(target_kl, **options):
        options = {"rate": 0.3} | options
        agent = small(target_kl=target_kl, nb_epochs=4, optimizer=keras.optimizers.SGD(options["rate"]))
        watched = Watched(agent)
        return train(agent, nb_steps=15), watched

    free, watched = agent_with(None)
    assert free.run_state.nb_updates == 12
    twin = Twin(small(), "discrete", ppo=True, rate=0.3)
    twin.update(watched.rollouts[0], clip_range=0.2)
    series = [logs["approx_kl"] for logs in twin.step_logs]
    assert series[0] == 0
    for k in (1, next(k for k in range(2, 11) if series[k] > 1.05 * max(series[:k]))):
        # The first batch beyond the bound is the k-th one: it is learnt from, and is the last one.
        agent, stopped = agent_with(0.98 * series[k] / 1.5)
        assert agent.run_state.nb_updates == k + 1 == int(agent.optimizer.iterations)
        cut = dict(watched.rollouts[0], batches=watched.rollouts[0]["batches"][: k + 1])
        twin = Twin(small(), "discrete", ppo=True, rate=0.3)
        expected = twin.update(cut, clip_range=0.2)
        np.testing.assert_allclose(flat_weights(agent), twin.weights, atol=2e-5)
        for name, value in expected.items():  # means over the steps that were taken
            assert stopped.rollouts[0]["metrics"][name] == pytest.approx(value, abs=1e-4)
        later, _ = agent_with(1.02 * series[k] / 1.5)
        assert later.run_state.nb_updates > k + 1


def test_the_next_rollout_is_learnt_from_after_an_early_stop():
    agent = train(small(target_kl=1e-6), nb_steps=45)
    assert agent.run_state.nb_updates == 3 * 2  # the first batch has no divergence but by rounding, the second one some


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_target_kl_that_is_never_reached_changes_nothing(jit_compile):
    agents = [train(small(target_kl=limit, compile_options={"jit_compile": jit_compile})) for limit in (None, 1e9)]
    assert agents[0].run_state.nb_updates == agents[1].run_state.nb_updates == 18
    np.testing.assert_allclose(flat_weights(agents[0]), flat_weights(agents[1]), atol=1e-6 if jit_compile else 0)


# ---- schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [SAME_STEP, gym.vector.AutoresetMode.NEXT_STEP])
def test_clip_ranges_follow_the_progress_when_the_rollout_began(mode):
    seen, total = [], 60

    def value_range(progress):
        seen.append(progress)
        return 0.5 * (1.1 - progress)

    options = {"clip_range": LinearSchedule(0.2, 0.01), "clip_value_range": value_range, "nb_total_steps": total}
    agent = small(**options, batch_size=15, nb_epochs=3, optimizer=keras.optimizers.SGD(0.3), gamma=0.9, lam=0.8)
    twin, watched = Twin(agent, "discrete", ppo=True, rate=0.3), Watched(agent)
    env = weather(mode=mode)
    for _ in range(10):  # rollouts begin in one fit and are completed in the next one
        agent.fit(env, nb_steps=10, verbose=0)
    begun = 0
    for rollout in watched.rollouts:
        progress = min(1.0, begun / total)
        assert progress in seen
        expected = twin.update(rollout, clip_range=0.2 - 0.19 * progress, clip_value_range=0.5 * (1.1 - progress))
        np.testing.assert_allclose(rollout["weights"], twin.weights, atol=2e-5)
        assert rollout["metrics"]["clip_fraction"] == pytest.approx(expected["clip_fraction"], abs=1e-4)
        begun += int(sum(s.valid.sum() for s in rollout["steps"]))
    assert seen[0] == 0 and seen[-1] == 1 and begun > total
    assert sorted(seen) == seen


def test_a_learning_rate_schedule_counts_gradient_steps():
    schedule = keras.optimizers.schedules.PolynomialDecay(0.1, decay_steps=12, end_learning_rate=0.0)
    agent = small(optimizer=keras.optimizers.SGD(schedule))
    twin, watched = Twin(agent, "discrete", ppo=True, rate=None), Watched(agent)
    train(agent, nb_steps=45)
    logged = [r["metrics"]["learning_rate"] for r in watched.rollouts]  # at the rollout's first step
    np.testing.assert_allclose(logged, [0.1, 0.05, 0], atol=1e-7)
    np.testing.assert_array_equal(watched.rollouts[1]["weights"], watched.rollouts[2]["weights"])
    # Within a rollout as well: the twin takes the six steps one by one, each with its own rate.
    rollout, old = watched.rollouts[0], twin.weights

    class Rates:
        step = 0

        def __mul__(self, gradient):
            self.step += 1
            return 0.1 * (1 - (self.step - 1) / 12) * gradient

    twin.rate = Rates()
    twin.update(rollout, clip_range=0.2)
    np.testing.assert_allclose(rollout["weights"], twin.weights, atol=1e-5)
    assert np.abs(twin.weights - old).max() > 0.01


# ---- step size ------------------------------------------------------------------------------------------------------


def test_no_step_is_longer_than_max_grad_norm():
    def step(**options):
        agent = small(nb_epochs=1, batch_size=15, optimizer=keras.optimizers.SGD(1.0), **options)
        before = flat_weights(agent)
        return flat_weights(train(agent, nb_steps=15)) - before

    free = step(max_grad_norm=None)
    bound = 0.2
    assert np.linalg.norm(free) > 2 * bound
    np.testing.assert_allclose(step(max_grad_norm=bound), free * bound / np.linalg.norm(free), atol=1e-6)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"nb_epochs": 0}, "nb_epochs must be a whole number of at least 1, got 0"),
        ({"nb_epochs": 1.5}, "nb_epochs must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"batch_size": 2.5}, "batch_size must be"),
        ({"clip_range": 0}, "clip_range must be positive, or a function of the progress, got 0"),
        ({"clip_range": -0.2}, "clip_range must be positive"),
        ({"clip_range": None}, "clip_range must be positive"),
        ({"clip_range": float("nan")}, "clip_range must be positive"),
        ({"clip_value_range": 0}, "clip_value_range must be positive"),
        ({"target_kl": 0}, "target_kl must be positive, or None"),
        ({"nb_total_steps": 0}, "nb_total_steps must be"),
        ({"clip_range": LinearSchedule(0.2)}, "nb_total_steps must be given for the schedule clip_range"),
        ({"clip_value_range": lambda p: 0.1}, "nb_total_steps must be given for the schedule clip_value_range"),
    ],
    ids=str,
)
def test_arguments_are_checked_at_construction(options, text):
    with pytest.raises(ValueError, match=text):
        PPOAgent(*networks(), KINDS["discrete"][0], **options)


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_a_schedule_that_goes_astray_is_named_with_its_progress(bad):
    agent = small(clip_range=lambda progress: 0.2 if progress < 0.5 else bad, nb_total_steps=60)
    with pytest.raises(ValueError, match=r"clip_range\(progress=0\.5\) must be a number of at least 0"):
        train(agent, nb_steps=60)
    assert agent.run_state.nb_updates == 2 * 6
    assert np.isfinite(flat_weights(agent)).all()
