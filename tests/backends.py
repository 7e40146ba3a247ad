"""What tests need of a backend itself: gradients, calls back to Python, a second device. One `if` here, none there."""

import keras
import numpy as np
import pytest

NAME = keras.backend.backend()

# What is about TensorFlow itself: a tape, a refusal of XLA, its own Keras.
tensorflow_only = pytest.mark.skipif(NAME != "tensorflow", reason="about TensorFlow itself")
jax_only = pytest.mark.skipif(NAME != "jax", reason="about JAX itself")


def value_and_gradient(function, x):
    """`function(x)` and the derivative of its sum by x, float32, as NumPy arrays."""
    x = np.asarray(x, "float32")
    if NAME == "jax":
        import jax

        value, pull = jax.vjp(function, x)
        return np.array(value), np.array(pull(jax.numpy.ones_like(value))[0])
    import tensorflow as tf

    tensor = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        value = function(tensor)
    return value.numpy(), tf.convert_to_tensor(tape.gradient(value, tensor)).numpy()


def call_back(function, *tensors):
    """Has a loss or a compiled function call `function` with NumPy arrays, each time it runs."""
    if NAME == "jax":
        import jax

        jax.debug.callback(lambda *given: function(*[np.array(t) for t in given]), *tensors)
    else:
        import tensorflow as tf

        tf.py_function(lambda *given: function(*[t.numpy() for t in given]), list(tensors), [])


# The first lines of a script that runs on two CPU devices, and has place(variables): a set of "CPU:0" and "CPU:1".
TWO_CPUS = """
import keras

if keras.backend.backend() == "jax":
    import jax

    jax.config.update("jax_num_cpu_devices", 2)

    def place(variables):
        return {f"CPU:{device.id}" for v in variables for device in v.value.devices()}

else:
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)

    def place(variables):
        return {v.value.device[-5:] for v in variables}
"""
