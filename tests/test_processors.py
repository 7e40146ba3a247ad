import json

import keras
import numpy as np
import pytest

import rl.core
from rl.processors import MultiInputProcessor, Processor, WhiteningNormalizerProcessor


def test_the_base_class_can_be_imported_from_here():
    assert Processor is rl.core.Processor
    assert issubclass(MultiInputProcessor, Processor) and issubclass(WhiteningNormalizerProcessor, Processor)


# ---- MultiInputProcessor -------------------------------------------------------------------------


def observations(nb_states, window_length):
    rng = np.random.default_rng(0)
    return [
        [[rng.random((8, 8, 1)), rng.random(3), rng.random(())] for _ in range(window_length)] for _ in range(nb_states)
    ]


@pytest.mark.parametrize("window_length", [1, 3])
@pytest.mark.parametrize("nb_states", [1, 4])
@pytest.mark.parametrize("kind", [list, tuple])
def test_states_of_several_parts_become_one_batch_per_input(nb_states, window_length, kind):
    states = observations(nb_states, window_length)
    batch = [[kind(observation) for observation in state] for state in states]
    parts = MultiInputProcessor(3).process_state_batch(batch)
    assert [part.shape for part in parts] == [(nb_states, window_length, *shape) for shape in ((8, 8, 1), (3,), ())]
    for b in range(nb_states):
        for w in range(window_length):
            for part, value in zip(parts, states[b][w], strict=True):
                np.testing.assert_array_equal(part[b, w], value)


def test_dict_observations_become_a_dict_of_batches_by_name():
    states = observations(2, 3)
    batch = [[{"img": o[0], "vec": o[1]} for o in state] for state in states]
    batch[1][2] = {"vec": batch[1][2]["vec"], "img": batch[1][2]["img"]}  # the order of keys does not count
    parts = MultiInputProcessor(2).process_state_batch(batch)
    assert list(parts) == ["img", "vec"]
    assert parts["img"].shape == (2, 3, 8, 8, 1) and parts["vec"].shape == (2, 3, 3)
    np.testing.assert_array_equal(parts["vec"][1, 2], states[1][2][1])


def test_arrays_are_split_along_the_axis_of_parts():
    batch = np.random.default_rng(0).random((4, 2, 3, 5)).astype("float32")
    parts = MultiInputProcessor(3).process_state_batch(batch)
    assert len(parts) == 3
    for i, part in enumerate(parts):
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, batch[:, :, i])


def test_batches_that_are_sorted_already_pass_through():
    parts = np.zeros((4, 1, 3)), np.zeros((4, 1, 8, 8, 1))
    processor = MultiInputProcessor(2)
    assert processor.process_state_batch(parts) is parts
    named = {"b": parts[0], "a": parts[1]}
    assert list(processor.process_state_batch(named)) == ["b", "a"]


def test_the_parts_feed_a_network():
    inputs = [keras.Input((2, 3)), keras.Input((2, 4))]
    flat = [keras.layers.Flatten()(x) for x in inputs]
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Concatenate()(flat)))
    batch = [[[np.ones(3), np.ones(4)] for _ in range(2)] for _ in range(5)]
    assert model(MultiInputProcessor(2).process_state_batch(batch)).shape == (5, 2)


@pytest.mark.parametrize(
    "batch",
    [
        observations(2, 1),
        [[[1.0, 2.0]], [[1.0, 2.0, 3.0]]],  # only the second state is wrong
        np.zeros((2, 1, 3)),
        np.zeros((2, 1)),
        (np.zeros((2, 1)),),
        {"a": np.zeros((2, 1))},
    ],
)
def test_another_number_of_parts_is_refused(batch):
    with pytest.raises(ValueError, match=r"nb_inputs=2\) got observations of [13] part"):
        MultiInputProcessor(2).process_state_batch(batch)


# ---- WhiteningNormalizerProcessor ----------------------------------------------------------------


def batches(dtype="float32"):
    rng = np.random.default_rng(0)
    return [(5 + 3 * rng.normal(size=(n, 2, 4))).astype(dtype) for n in (1, 8, 32)]


def test_states_are_whitened_by_all_that_was_seen():
    processor = WhiteningNormalizerProcessor()
    assert processor.normalizer is None
    seen = np.zeros((0, 2, 4), "float32")
    for batch in batches():
        kept = batch.copy()
        white = processor.process_state_batch(batch)
        np.testing.assert_array_equal(batch, kept)
        seen = np.concatenate([seen, batch])
        scale = np.maximum(seen.std(axis=0), 1e-2)
        np.testing.assert_allclose(white, (batch - seen.mean(axis=0)) / scale, rtol=1e-4, atol=1e-4)
        assert white.dtype == np.float32
    np.testing.assert_allclose(processor.normalizer.mean, seen.mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(processor.normalizer.std, seen.std(axis=0), rtol=1e-5)


@pytest.mark.parametrize(("dtype", "expected"), [("uint8", "float32"), ("int64", "float32"), ("float64", "float64")])
def test_types_of_whitened_states(dtype, expected):
    assert WhiteningNormalizerProcessor().process_state_batch(batches(dtype)[1]).dtype == expected


def test_nested_observations_have_statistics_of_their_own():
    processor, twin = WhiteningNormalizerProcessor(), WhiteningNormalizerProcessor()
    for batch in batches():
        white = processor.process_state_batch({"a": batch, "b": (10 * batch[..., :1], batch[:, :, None])})
        np.testing.assert_array_equal(white["a"], twin.process_state_batch(batch))
    assert white["b"][0].shape == (32, 2, 1) and white["b"][1].shape == (32, 2, 1, 4)
    np.testing.assert_allclose(white["b"][0], white["a"][..., :1], rtol=1e-4, atol=1e-5)
    assert processor.normalizer["b"][1].shape == (2, 1, 4)


def test_outside_training_nothing_is_counted():
    processor = WhiteningNormalizerProcessor()
    first, second, third = batches()
    processor.process_state_batch(second)
    mean, std = processor.normalizer.mean, processor.normalizer.std
    processor.training = False
    for _ in range(2):
        white = processor.process_state_batch(third)
        np.testing.assert_allclose(white, (third - mean) / std, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(processor.normalizer.mean, mean)
    processor.training = True
    processor.process_state_batch(third)
    assert np.abs(processor.normalizer.mean - mean).min() > 0


def test_the_statistics_can_be_saved_and_restored_before_or_after_the_first_batch():
    first, second, third = batches()
    tree = {"a": first, "b": second[:1]}
    processor = WhiteningNormalizerProcessor()
    fresh = processor.get_state()
    processor.process_state_batch(tree)
    state = processor.get_state()
    expected = processor.process_state_batch({"a": third, "b": second})
    new, used = WhiteningNormalizerProcessor(), WhiteningNormalizerProcessor()
    used.process_state_batch({"a": third, "b": third})
    for restored in (new, used):
        restored.set_state(state)
        again = WhiteningNormalizerProcessor()
        again.set_state(restored.get_state())  # a snapshot of what waits for its first batch, too
        for one in (restored, again):
            white = one.process_state_batch({"a": third, "b": second})
            np.testing.assert_array_equal(white["a"], expected["a"])
            np.testing.assert_array_equal(white["b"], expected["b"])
    used.set_state(fresh)
    assert used.normalizer is None


def test_lists_of_states_as_in_keras_rl():
    batch = batches()[1]
    states = [[batch[b, w] for w in range(2)] for b in range(8)]
    np.testing.assert_array_equal(
        WhiteningNormalizerProcessor().process_state_batch(states),
        WhiteningNormalizerProcessor().process_state_batch(batch),
    )


def test_config_round_trip():
    for processor in (MultiInputProcessor(3), WhiteningNormalizerProcessor()):
        serialised = json.loads(json.dumps(keras.saving.serialize_keras_object(processor)))
        assert serialised["registered_name"] == f"rl>{type(processor).__name__}"
        copy = keras.saving.deserialize_keras_object(serialised)
        assert type(copy) is type(processor) and copy.get_config() == processor.get_config()
    assert keras.saving.deserialize_keras_object(serialised).normalizer is None
