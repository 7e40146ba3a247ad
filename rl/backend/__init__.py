"""The seam between the library and the tensor framework underneath Keras.

Everything that needs more than ``keras.ops`` goes through the names below; no other module imports a framework.
A second backend is one more module with the same names:

* ``compile_function(fn, state, ...)`` -- a compiled function from NumPy trees to NumPy trees that may update the
  variables in ``state``;
* ``minimize(loss_fn, variables, optimizer)`` -- one gradient step;
* ``repeat(n, kmax, step, init)`` -- ``n`` steps (known at run time) in one compiled loop, which may end early;
* ``vectorize(function, rows)`` -- a function of one row, applied to all rows at once;
* ``read_rows(variable, places)`` and ``write_rows(variable, places, rows)`` -- some rows of a large variable;
* ``make_deterministic()`` -- the same bits in every run;
* ``to_numpy(tree)``;
* ``device_scope(variables)`` -- the device those variables live on, as a context manager;
* ``on_cpu(variables)`` -- whether that is a CPU;
* ``set_threads(intra_op, inter_op)`` -- thread pools of the framework, before its first use.
"""

import keras

_NAME = keras.backend.backend()

if _NAME == "tensorflow":
    from rl.backend import tensorflow as _module
elif _NAME == "jax":
    from rl.backend import jax as _module  # type: ignore[no-redef]
else:
    raise ImportError(
        f"keras-rl3 runs on Keras' TensorFlow and JAX backends, but KERAS_BACKEND is {_NAME!r}. "
        "Set KERAS_BACKEND=tensorflow (or unset it) or KERAS_BACKEND=jax before keras is imported."
    )

compile_function = _module.compile_function
device_scope = _module.device_scope
minimize = _module.minimize
on_cpu = _module.on_cpu
repeat = _module.repeat
set_threads = _module.set_threads
to_numpy = _module.to_numpy
vectorize = _module.vectorize
read_rows = _module.read_rows
write_rows = _module.write_rows
make_deterministic = _module.make_deterministic

__all__ = [
    "compile_function",
    "device_scope",
    "make_deterministic",
    "minimize",
    "on_cpu",
    "read_rows",
    "repeat",
    "set_threads",
    "to_numpy",
    "vectorize",
    "write_rows",
]
