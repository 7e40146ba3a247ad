import json

import numpy as np
import pytest

from rl.util import RandomStream


class Stream(RandomStream):
    def __init__(self):
        pass  # as user subclasses do: no super().__init__()


def test_random_stream_is_decided_by_the_global_seed_at_first_use():
    np.random.seed(7)
    first, second = Stream(), Stream()
    a = [first.rng.random(3), second.rng.random(3)]
    first, second = Stream(), Stream()
    np.random.seed(7)  # after construction, before use
    b = [first.rng.random(3), second.rng.random(3)]
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a[0], a[1])
    np.random.seed(8)
    assert not np.array_equal(Stream().rng.random(3), a[0])


def test_random_stream_leaves_the_global_stream_alone_after_first_use():
    stream = Stream()
    stream.rng.random()
    np.random.seed(1)
    expected = np.random.random()
    np.random.seed(1)
    stream.rng.random(100)
    assert np.random.random() == expected


def test_random_state_round_trip_through_json():
    stream, other = Stream(), Stream()
    state = json.loads(json.dumps(stream.get_random_state()))
    drawn = stream.rng.random(4)
    for _ in range(2):
        stream.set_random_state(state)
        np.testing.assert_array_equal(stream.rng.random(4), drawn)
    other.set_random_state(state)
    stream.set_random_state(state)
    other.rng.random()
    np.testing.assert_array_equal(stream.rng.random(4), drawn)  # a snapshot is not shared


def test_rng_takes_a_seed_or_a_generator():
    stream, other = Stream(), Stream()
    stream.rng = 5
    generator = np.random.Generator(np.random.Philox(3))
    other.rng = generator
    assert stream.rng.random() == np.random.default_rng(5).random()
    assert other.rng is generator
    state = other.get_random_state()
    expected = other.rng.random()
    stream.set_random_state(state)  # also from another kind of bit generator
    assert stream.rng.random() == expected


@pytest.mark.parametrize("bad", [None, 3, {}, {"bit_generator": "Nope"}])
def test_set_random_state_refuses_what_is_not_a_snapshot(bad):
    with pytest.raises(ValueError, match="get_random_state"):
        Stream().set_random_state(bad)
