"""The seam between the library and the tensor framework underneath Keras.

Everything that needs more than ``keras.ops`` goes through the names below; no other module imports a framework.
A second backend is one more module with the same names:

* ``compile_function(fn, state, ...)`` -- a compiled function from NumPy trees to NumPy trees that may update the
  variables in ``state``;
* ``minimize(loss_fn, variables, optimizer)`` -- one gradient step;
* ``repeat(n, kmax, step, init)`` -- ``n`` steps (known at run time) in one compiled loop;
* ``to_numpy(tree)``;
* ``device_scope(variables)`` -- the device those variables live on, as a context manager;
* ``on_cpu(variables)`` -- whether that is a CPU;
* ``set_threads(intra_op, inter_op)`` -- thread pools of the framework, before its first use.
"""

import keras

_NAME = keras.backend.backend()

if _NAME != "tensorflow":
    raise ImportError(
        f"keras-rl3 runs on Keras' TensorFlow backend, but KERAS_BACKEND is {_NAME!r}. "
        "Set KERAS_BACKEND=tensorflow (or unset it) before keras is imported."
    )

from rl.backend.tensorflow import (  # noqa: E402
    compile_function,
    device_scope,
    minimize,
    on_cpu,
    repeat,
    set_threads,
    to_numpy,
)

__all__ = ["compile_function", "device_scope", "minimize", "on_cpu", "repeat", "set_threads", "to_numpy"]
