import numpy as np
import pytest
from gymnasium import spaces

from rl.common.observation_spec import MisfitError, ObservationSpec

NESTED = spaces.Dict({"step": spaces.Tuple([spaces.Discrete(9), spaces.Box(0, 1, (2,))]), "id": spaces.Discrete(3)})


def nested(step, lane):
    return {"step": (step, np.full(2, step, np.float64)), "id": lane}


@pytest.mark.parametrize("space", [None, spaces.Box(-9, 9, (3,), np.float64)])
def test_stacks_copies(space):
    spec = ObservationSpec(space)
    one = np.zeros(3)
    for rows in ([one], [one, one + 1], [one + 2] * 5):
        batch = spec.stack(rows)
        assert batch.shape == (len(rows), 3) and batch.dtype == np.float64
        np.testing.assert_array_equal(batch, rows)
        rows[0][:] = 7
        assert (batch[0] != 7).all()
        rows[0][:] = 0


def test_trees_take_order_and_dtypes_of_the_space():
    spec = ObservationSpec(NESTED)
    for size in (1, 3):
        batch = spec.stack([nested(i + 1, i) for i in range(size)])
        assert list(batch) == ["id", "step"] and type(batch["step"]) is tuple
        assert batch["id"].dtype == batch["step"][0].dtype == np.int64 and batch["step"][1].dtype == np.float32
        np.testing.assert_array_equal(batch["step"][1], [[i + 1, i + 1] for i in range(size)])
        np.testing.assert_array_equal(batch["id"], range(size))
    free = ObservationSpec().stack([nested(1, 0)])
    assert list(free) == ["step", "id"] and free["step"][1].dtype == np.float64


def test_holds():
    spec = ObservationSpec(NESTED)
    batch = ObservationSpec(NESTED).stack([nested(1, 0), nested(2, 1)])
    assert not spec.holds(batch, 2)  # nothing is known yet
    spec.stack([nested(1, 0)])
    assert spec.holds(batch, 2) and not spec.holds(batch, 3) and not spec.holds([batch, batch], 2)
    assert not spec.holds({**batch, "id": batch["id"].astype(np.int8)}, 2)
    assert not spec.holds({**batch, "step": (batch["step"][0], batch["step"][1][:, :1])}, 2)


def test_lists_of_arrays_are_tuples():
    batch = ObservationSpec().stack([[np.zeros(3), np.ones((2, 2))]] * 2)
    assert type(batch) is tuple and batch[0].shape == (2, 3) and batch[1].shape == (2, 2, 2)
    assert ObservationSpec(spaces.Box(0, 1, (2, 3))).stack([[np.zeros(3), np.ones(3)]]).shape == (1, 2, 3)
    assert ObservationSpec().stack([[1.0, 2.0], [3.0, 4.0]]).shape == (2, 2)


@pytest.mark.parametrize(
    ("declared", "given", "expected"),
    [
        (np.float32, np.float64, np.float32),
        (np.float32, np.int64, np.float32),
        (np.uint8, np.int64, np.uint8),
        (np.uint8, np.float32, np.float32),  # values between 0 and 1, say: they would all become 0
        (np.float64, np.float32, np.float64),
    ],
)
def test_a_declared_dtype_wins_where_it_can(declared, given, expected):
    spec = ObservationSpec(spaces.Box(0, 9, (3,), declared))
    for rows in ([np.arange(3).astype(given)], [np.arange(3).astype(given)] * 2):
        batch = spec.stack(rows)
        assert batch.dtype == expected and batch[0].tolist() == [0, 1, 2]


def test_later_dtypes_follow_the_first():
    spec = ObservationSpec()
    assert spec.stack([np.zeros(2, np.float32)]).dtype == np.float32
    assert spec.stack([np.zeros(2), [1, 2]]).dtype == np.float32
    whole = ObservationSpec()
    whole.stack([[0, 0]])
    with pytest.raises(MisfitError, match="dtype float64.*dtype int64"):
        whole.stack([[0, 0], [0.5, 0.5]])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.zeros(2), r"shape \(2,\) and dtype float64, the first one had shape \(3,\)"),
        (np.zeros((1, 3)), r"shape \(1, 3\)"),
        (np.zeros(1), r"shape \(1,\)"),  # would broadcast
        (0.0, r"shape \(\)"),
        (np.array([None] * 3), "dtype object"),
        (["a", "b", "c"], "dtype <U1"),
        ([1.0, [2.0], 3.0], "inhomogeneous"),
        ((0.0, 0.0), r"shape \(2,\)"),
    ],
)
def test_misfits_name_their_row(bad, message):
    spec = ObservationSpec()
    good = np.zeros(3)
    spec.stack([good])
    for rows in ([bad], [good, bad], [good, good, bad]):
        with pytest.raises(MisfitError, match=message) as error:
            spec.stack(rows)
        assert error.value.row == len(rows) - 1


def test_misfits_name_their_leaf():
    spec = ObservationSpec(NESTED)
    spec.stack([nested(1, 0)])
    with pytest.raises(MisfitError, match=r"at \['step'\]\[1\] it has shape \(3,\)") as error:
        spec.stack([nested(1, 0), {"step": (1, np.zeros(3)), "id": 0}])
    assert error.value.row == 1
    with pytest.raises(MisfitError, match=r"keys \['id', 'step'\], got a dict with keys \['id'\]"):
        spec.stack([{"id": 0}])


@pytest.mark.parametrize("bad", ["abc", None, np.array([None, 1]), np.zeros(2, complex)])
def test_the_first_one_must_be_numbers(bad):
    spec = ObservationSpec()
    with pytest.raises(MisfitError, match="no array of numbers"):
        spec.stack([bad])
    assert spec.stack([np.zeros(2)]).shape == (1, 2)  # it may be mended
    with pytest.raises(MisfitError, match=r"at \['x'\]\[0\]"):
        ObservationSpec().stack([{"x": (bad, 1)}])
