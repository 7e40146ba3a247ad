"""The same bits in every run: the one setting that differs by backend and is made once per process."""

from __future__ import annotations

import os

import keras


def make_deterministic() -> None:
    """Lets the backend use only operations that give the same bits in every run, for the rest of the process.

    TensorFlow has a switch for it. XLA's CPU code, which is all that JAX runs there, needs none. XLA reads the flag
    for its GPU code from the environment when it starts, so with JAX that must have been set before.

    Raises:
        RuntimeError: JAX runs on a GPU, and `XLA_FLAGS` did not ask for deterministic operations.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
        return
    import jax

    flags = os.environ.get("XLA_FLAGS", "").lower().split()
    # The first is the second and more.
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    if jax.default_backend() != "cpu" and not any(n + x in flags for n in names for x in ("", "=true", "=1")):
        raise RuntimeError(
            f"deterministic=True with JAX on a GPU needs XLA_FLAGS={names[0]}=true in the environment before the first "
            "use of JAX; it cannot be set later. Fix: set it and start again, or KERAS_BACKEND=tensorflow"
        )
