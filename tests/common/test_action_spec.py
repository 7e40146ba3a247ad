import numpy as np
import pytest
from gymnasium import spaces

from rl.common.action_spec import ActionSpec, python_ints


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_discrete_for_a_single_env(dtype):
    for start in (0, 5, -2):
        spec = ActionSpec(spaces.Discrete(3, start=start), 1, is_vector=False)
        for index in range(3):
            sent = spec.to_env(spec.in_space(np.array([index], dtype)))
            assert sent == [index + start] and type(sent[0]) is int


def test_discrete_for_lanes():
    actions = np.array([0, 2, 1])
    plain = ActionSpec(spaces.Discrete(3), 3, is_vector=True)
    assert plain.to_env(plain.in_space(actions)) is actions
    shifted = ActionSpec(spaces.Discrete(3, start=5), 3, is_vector=True)
    for _ in range(2):
        assert shifted.to_env(shifted.in_space(actions)).tolist() == [5, 7, 6]
    assert actions.tolist() == [0, 2, 1]
    members = [5, 6, 7]  # of start steps or a processor: not shifted again
    assert shifted.to_env(members) is members


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_box(dtype, nb_lanes):
    space = spaces.Box(np.array([-1, 0], dtype), np.array([1, 3], dtype), dtype=dtype)
    spec = ActionSpec(space, nb_lanes, is_vector=nb_lanes > 1)
    rng = np.random.default_rng(0)
    for _ in range(5):
        actions = rng.normal(size=(nb_lanes, 2), scale=3).astype(np.float32)
        kept = actions.copy()
        for given in (actions, list(actions)):
            sent = spec.to_env(spec.in_space(actions) if given is actions else given)
            assert sent.dtype == dtype and sent.shape == (nb_lanes, 2)
            np.testing.assert_allclose(sent, np.clip(kept, space.low, space.high).astype(dtype), rtol=1e-6)
            assert all(space.contains(one) for one in sent)
        np.testing.assert_array_equal(actions, kept)


@pytest.mark.parametrize("shape", [(2, 3), (3, 1, 2), ()])
def test_flat_actions_take_the_shape_of_the_box(shape):
    size = int(np.prod(shape))
    flat = np.linspace(-1, 1, 4 * size, dtype=np.float32).reshape(4, size)
    sent = ActionSpec(spaces.Box(-1, 1, shape), 4, is_vector=True).to_env(flat)
    np.testing.assert_array_equal(sent, flat.reshape(4, *shape))


def test_what_a_box_refuses():
    spec = ActionSpec(spaces.Box(-1, 1, (2,)), 3, is_vector=True, name="Reacher")
    for bad in (np.zeros((3, 3)), np.zeros((2, 2)), np.zeros(3)):
        with pytest.raises(ValueError, match=rf"Reacher takes actions of shape \(2,\) .*got \({bad.shape[0]},"):
            spec.to_env(bad)
    with pytest.raises(ValueError, match="NaN in the actions for Reacher"):
        spec.to_env(np.array([[0, 0], [0, np.nan], [0, 0]]))
    np.testing.assert_array_equal(spec.to_env(np.full((3, 2), -np.inf)), -np.ones((3, 2)))


@pytest.mark.parametrize(
    ("space", "highest"),
    [
        (spaces.MultiDiscrete([3, 4]), [2, 3]),
        (spaces.MultiDiscrete([3, 4], start=[5, -2]), [2, 3]),
        (spaces.MultiDiscrete([3], start=[1]), [2]),
        (
            spaces.MultiDiscrete([[2, 3, 4], [5, 6, 7]], dtype=np.int32, start=[[1, 2, 3], [-1, -2, -3]]),
            [1, 2, 3, 4, 5, 6],
        ),
        (spaces.MultiBinary(2), [1, 1]),
        (spaces.MultiBinary((2, 3)), [1] * 6),
    ],
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_several_components(space, highest, dtype, nb_lanes):
    spec = ActionSpec(space, nb_lanes, is_vector=nb_lanes > 1)
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(90):
        actions = rng.integers(highest, endpoint=True, size=(nb_lanes, len(highest))).astype(dtype)
        kept = actions.copy()
        sent = spec.to_env(spec.in_space(actions))
        assert sent.shape == (nb_lanes, *space.shape) and sent.dtype == space.dtype
        assert all(space.contains(one) for one in sent)
        start = getattr(space, "start", np.zeros(space.shape, int))
        np.testing.assert_array_equal(sent.reshape(nb_lanes, -1), kept + start.reshape(-1).astype(int))
        np.testing.assert_array_equal(actions, kept)
        seen.update(sent.reshape(nb_lanes, -1)[:, -1].tolist())
    assert len(seen) == highest[-1] + 1


@pytest.mark.parametrize("space", [spaces.MultiDiscrete([[3, 4]] * 3, start=[[5, 6]] * 3), spaces.MultiBinary((3, 2))])
def test_members_of_the_space_are_not_shifted_again(space):
    spec = ActionSpec(space, 4, is_vector=True)
    members = [space.sample() for _ in range(4)]
    for _ in range(2):
        np.testing.assert_array_equal(spec.to_env(members), members)
    mixed = [*spec.in_space(np.zeros((4, 6), int))[:2], *members[2:]]  # as with start steps in some lanes
    sent = spec.to_env(mixed)
    np.testing.assert_array_equal(sent[2:], members[2:])
    np.testing.assert_array_equal(sent[:2], [getattr(space, "start", np.zeros((3, 2)))] * 2)


@pytest.mark.parametrize(
    "space", [spaces.MultiDiscrete([3, 4], start=[1, 1]), spaces.MultiBinary(2), spaces.Box(-1, 1, (2,))]
)
def test_what_a_processor_is_to_make_fit_is_left_alone(space):
    spec = ActionSpec(space, 3, is_vector=True, name="Lights")
    for actions in (np.arange(3), np.zeros((3, 3), int)):
        assert spec.in_space(actions) is actions
        with pytest.raises(ValueError, match=rf"Lights takes actions of shape \(2,\) .*got \({actions.shape[0]},"):
            spec.to_env(actions)


@pytest.mark.parametrize("bad", [0.5, np.nan, np.inf, 300])
def test_what_is_no_integer_of_the_dtype_is_refused(bad):
    spec = ActionSpec(spaces.MultiBinary(2), 3, is_vector=True, name="Lights")
    with pytest.raises(ValueError, match="Lights takes actions of int8 integers, got .*" + str(bad)):
        spec.to_env([[0, 1], [1, bad], [0, 0]])
    assert spec.to_env([[0.0, 1.0], [True, False], [0, 0]]).tolist() == [[0, 1], [1, 0], [0, 0]]


@pytest.mark.parametrize("space", [None, spaces.Text(3)])
def test_any_other_space_takes_them_as_they_are(space):
    for nb_lanes in (1, 3):
        actions = np.ones((nb_lanes, 2), int)
        spec = ActionSpec(space, nb_lanes, is_vector=True)
        assert spec.to_env(spec.in_space(actions)) is actions
    single = ActionSpec(space, 1, is_vector=False)
    sent = single.to_env(single.in_space(actions[:1]))
    assert type(sent) is list and len(sent) == 1 and sent[0].tolist() == [1, 1]


def test_python_ints():
    values = python_ints(np.array([1, 2, 3], np.int8))
    assert values == [1, 2, 3] and all(type(value) is int for value in values)
    array = np.zeros(2)
    mixed = [np.uint8(3), "a", None, array, 0.5]
    assert python_ints(mixed)[0] == 3 and type(python_ints(mixed)[0]) is int
    assert all(new is old for new, old in zip(python_ints(mixed)[1:], mixed[1:], strict=True))
