import json

import keras
import numpy as np
import pytest

from rl.random import (
    AnnealedGaussianProcess,
    GaussianWhiteNoiseProcess,
    OrnsteinUhlenbeckProcess,
    RandomProcess,
)

PROCESSES = [
    lambda size: GaussianWhiteNoiseProcess(size=size),
    lambda size: OrnsteinUhlenbeckProcess(theta=0.15, size=size),
    lambda size: OrnsteinUhlenbeckProcess(0.15, 0.1, 0.2, 1.0, size, 0.05, 100),
]


@pytest.mark.parametrize("make", PROCESSES)
@pytest.mark.parametrize("size", [1, 3, (3,), (2, 3)])
def test_shapes_of_one_lane_and_many(make, size):
    process = make(size)
    shape = (size,) if isinstance(size, int) else size
    for _ in range(2):
        process.reset_states()
        assert process.sample().shape == shape
        for nb_lanes in (1, 3, 8):
            noise = process.sample(nb_lanes)
            assert noise.shape == (nb_lanes, *shape) and noise.dtype == np.float64
            assert len(np.unique(noise)) == noise.size  # nothing is shared between lanes or actions


@pytest.mark.parametrize("make", PROCESSES)
def test_samples_are_the_callers_own(make):
    process, twin = make(2), make(2)
    process.rng, twin.rng = 1, 1
    for nb_lanes in (None, None, 3, 3):
        noise = process.sample(nb_lanes)
        np.testing.assert_array_equal(noise, twin.sample(nb_lanes))
        noise[...] = 100.0  # clipping in place must not reach the process


def test_white_noise_has_its_mean_and_scale_per_action():
    process = GaussianWhiteNoiseProcess(mu=[0.0, 1.0, -2.0], sigma=[0.5, 1.0, 2.0], size=3)
    process.rng = 0
    noise = process.sample(20000)
    np.testing.assert_allclose(noise.mean(axis=0), [0.0, 1.0, -2.0], atol=0.05)
    np.testing.assert_allclose(noise.std(axis=0), [0.5, 1.0, 2.0], rtol=0.03)
    assert np.abs(np.corrcoef(noise.T)[np.triu_indices(3, 1)]).max() < 0.03


@pytest.mark.parametrize(("theta", "dt", "sigma"), [(0.15, 1.0, 0.2), (2.0, 0.1, 1.0), (0.5, 0.5, 0.3)])
def test_ornstein_uhlenbeck_statistics(theta, dt, sigma):
    process = OrnsteinUhlenbeckProcess(theta=theta, mu=0.7, sigma=sigma, dt=dt)
    process.rng = 0
    keep = 1 - theta * dt
    path = np.array([process.sample(400)[:, 0] for _ in range(300)])[60:]  # the start has died out
    expected = sigma * np.sqrt(dt) / np.sqrt(1 - keep**2)
    if (theta, dt, sigma) == (0.15, 1.0, 0.2):
        assert expected == pytest.approx(0.3797, abs=1e-4)
    assert path.std() == pytest.approx(expected, rel=0.02)
    assert path.mean() == pytest.approx(0.7, abs=0.03)
    deviation = path - 0.7
    lag_one = (deviation[1:] * deviation[:-1]).mean() / (deviation**2).mean()
    assert lag_one == pytest.approx(keep, abs=0.02)
    assert abs(np.corrcoef(path[:, 0], path[:, 1])[0, 1]) < 0.5  # lanes go their own ways


def test_ornstein_uhlenbeck_without_noise_returns_to_its_mean():
    process = OrnsteinUhlenbeckProcess(theta=1.0, mu=2.0, sigma=0.0, dt=0.25, size=2)
    process.sample(1)
    process.x_prev = np.array([[0.0, 6.0]])
    np.testing.assert_allclose(process.sample(), [0.5, 5.0])
    np.testing.assert_allclose(process.sample(), [0.875, 4.25])


@pytest.mark.parametrize(
    ("lanes", "touched"),
    [
        ([1], [1]),
        ([0, 3], [0, 3]),
        (np.array([False, True, True, False]), [1, 2]),
        (2, [2]),
        ([], []),
        (np.zeros(4, bool), []),
        (None, [0, 1, 2, 3]),
    ],
)
def test_reset_states_touches_the_named_lanes_only(lanes, touched):
    # A step so short that noise without a reset hardly moves, and a start that is far away from it.
    process = OrnsteinUhlenbeckProcess(theta=0.1, mu=0.0, sigma=1.0, dt=1e-12, size=2)
    process.rng = 0
    process.reset_states([0])  # before the first sample there is nothing to reset
    before = process.sample(4)
    for _ in range(2):
        process.reset_states(lanes)
        after = process.sample(4)
        moved = np.abs(after - before).max(axis=1) > 1e-3
        assert np.flatnonzero(moved).tolist() == touched
        before = after


def test_an_episode_begins_around_the_mean():
    process = OrnsteinUhlenbeckProcess(theta=0.1, mu=3.0, sigma=0.5, dt=1e-12, size=1)
    process.rng = 0
    starts = process.sample(20000)
    assert starts.mean() == pytest.approx(3.0, abs=0.02) and starts.std() == pytest.approx(0.5, rel=0.03)


# ---- annealing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_lanes", [None, 1, 4])
@pytest.mark.parametrize("kind", [GaussianWhiteNoiseProcess, lambda **kw: OrnsteinUhlenbeckProcess(0.15, **kw)])
def test_sigma_follows_the_schedule_in_env_steps_over_lanes(kind, nb_lanes):
    process = kind(sigma=1.0, sigma_min=0.2, n_steps_annealing=40)
    for call in range(60):
        step = call * (nb_lanes or 1)
        assert process.current_sigma == pytest.approx(1.0 - 0.8 * min(step / 40, 1.0))
        process.sample(nb_lanes)
        if call % 7 == 0:
            process.reset_states()  # a new episode does not start the schedule anew
    assert process.current_sigma == 0.2


def test_sigma_is_constant_without_sigma_min_and_may_differ_per_action():
    process = GaussianWhiteNoiseProcess(sigma=0.3)
    for _ in range(3):
        process.sample(1000)
        assert process.current_sigma == 0.3
    process = GaussianWhiteNoiseProcess(sigma=[1.0, 2.0], sigma_min=[0.0, 1.0], n_steps_annealing=10, size=2)
    process.sample(5)
    np.testing.assert_allclose(process.current_sigma, [0.5, 1.5])
    process.sample(5)
    assert (process.sample(6)[:, 0] == 0).all()


@pytest.mark.parametrize("make", PROCESSES)
def test_a_resumed_process_goes_on_where_it_was(make):
    process, resumed = make(2), make(2)
    fresh = process.get_state()
    for _ in range(5):
        process.sample(3)
    resumed.set_state(json.loads(json.dumps(process.get_state())))
    assert resumed.current_sigma == process.current_sigma and resumed.n_steps == 15
    for _ in range(3):
        np.testing.assert_array_equal(process.sample(3), resumed.sample(3))
        process.reset_states([1])
        resumed.reset_states([1])
    resumed.set_state(fresh)
    process = make(2)
    process.set_state(fresh)
    np.testing.assert_array_equal(process.sample(), resumed.sample())


# ---- configs, seeds, refusals --------------------------------------------------------------------


@pytest.mark.parametrize(
    "process",
    [
        GaussianWhiteNoiseProcess(0.1, 0.5, 0.1, 200, 2),
        GaussianWhiteNoiseProcess(mu=np.array([0.1, 0.2]), sigma=(1.0, 2.0), size=(2,)),
        OrnsteinUhlenbeckProcess(0.15, 0.1, 0.2, 1.0, 3, 0.05, 100),
    ],
)
def test_config_round_trip(process):
    serialised = json.loads(json.dumps(keras.saving.serialize_keras_object(process)))
    assert serialised["registered_name"] == f"rl>{type(process).__name__}"
    for copy in (
        keras.saving.deserialize_keras_object(serialised),
        type(process).from_config(process.get_config()),
    ):
        assert type(copy) is type(process) and copy.get_config() == process.get_config()
        copy.rng, process.rng = 2, 2
        np.testing.assert_array_equal(copy.sample(4), process.sample(4))
        process.n_steps = 0
        process.reset_states()


@pytest.mark.parametrize("make", PROCESSES)
def test_draws_follow_numpys_seed(make):
    runs = []
    for seed in (5, 5, 6):
        np.random.seed(seed)
        process = make(2)
        runs.append([process.sample(3).tolist() for _ in range(3)])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: GaussianWhiteNoiseProcess(sigma=-1.0), "at least 0"),
        (lambda: GaussianWhiteNoiseProcess(sigma=[1.0, -1.0], size=2), "at least 0"),
        (lambda: GaussianWhiteNoiseProcess(sigma=0.1, sigma_min=0.5), "must not be above sigma"),
        (lambda: GaussianWhiteNoiseProcess(sigma_min=0.1, n_steps_annealing=0), "n_steps_annealing"),
        (lambda: OrnsteinUhlenbeckProcess(theta=-0.1), "theta"),
        (lambda: OrnsteinUhlenbeckProcess(theta=0.1, dt=0.0), "dt"),
        (lambda: OrnsteinUhlenbeckProcess(theta=3.0, dt=1.0), "for ever"),
    ],
)
def test_bad_arguments_are_refused_at_construction(make, match):
    with pytest.raises(ValueError, match=match):
        make()


def test_a_process_of_the_users_own():
    class Pulse(RandomProcess):
        """Only what it must have: no constructor, nothing to reset."""

        def sample(self, nb_lanes=None):
            return self.rng.integers(2, size=(nb_lanes or 1, 1)).astype(float)

    process = Pulse()
    process.reset_states([0])
    assert process.sample(3).shape == (3, 1) and process.get_config() == {}
    for base in (RandomProcess(), AnnealedGaussianProcess(0.0, 1.0)):
        with pytest.raises(NotImplementedError, match="sample"):
            base.sample(2)
