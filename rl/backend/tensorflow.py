"""TensorFlow behind the seam: compiled functions, one gradient step, a run-time counted loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from rl.backend.tensorflow_plan import Plan
from rl.common.misc_util import tree_map

_XLA_ERRORS = (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError, tf.errors.InternalError)


def set_threads(intra_op: int = 1, inter_op: int = 1) -> None:
    """Sets TensorFlow's thread pools; small networks run fastest with one thread each.

    Args:
        intra_op: Threads that may share one operation (a matrix product, a convolution).
        inter_op: Operations that may run at the same time.

    Raises:
        RuntimeError: TensorFlow has already been used in this process; call this first.
    """
    try:
        tf.config.threading.set_intra_op_parallelism_threads(intra_op)
        tf.config.threading.set_inter_op_parallelism_threads(inter_op)
    except RuntimeError as error:
        raise RuntimeError(
            "set_threads() was called after TensorFlow's first operation; call it before building a model, "
            f"or set TF_NUM_INTRAOP_THREADS={intra_op} in the environment"
        ) from error


def device_scope(variables: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Returns a scope for the device of the first variable; a null context where that is the default device."""
    device = next((_device_of(v) for v in variables), "")
    default = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    if not device or device.upper().endswith(f"DEVICE:{default}:0"):
        return contextlib.nullcontext()
    return tf.device(device)


def _device_of(variable: Any) -> str:
    return getattr(getattr(variable, "value", variable), "device", "") or ""


def on_cpu(variables: Iterable[Any]) -> bool:
    """Whether the first variable lives on a CPU."""
    return "CPU:" in next((_device_of(v) for v in variables), "CPU:").upper()


def to_numpy(tree: Any) -> Any:
    """Converts every tensor of a tree to a NumPy array."""
    return tree_map(lambda x: x.numpy() if hasattr(x, "numpy") else np.asarray(x), tree)


class CompiledFunction:
    """A function on NumPy trees, traced once per input signature; see `compile_function`."""

    def __init__(self, function: Callable, state: Iterable[Any], jit: list[bool], run_eagerly: bool):
        self._function = function
        self._state = list(state)
        self._jit = jit  # one element, which functions on the same state share
        self._run_eagerly = run_eagerly
        self._plans: dict[tuple, Plan] = {}
        default = isinstance(device_scope(self._state), contextlib.nullcontext)
        self._device = None if default else _device_of(self._state[0])

    @property
    def nb_traces(self) -> int:
        """Number of input signatures traced so far."""
        return len(self._plans)

    def __call__(self, *args: Any) -> Any:
        """Runs the function on trees of NumPy arrays and returns trees of them."""
        if not self._device:  # entering a scope costs microseconds
            return self._call(args)
        with tf.device(self._device):
            return self._call(args)

    def _call(self, args: tuple) -> Any:
        leaves = [x if isinstance(x, np.ndarray) else np.asarray(x) for x in tf.nest.flatten(args)]
        if self._run_eagerly:
            tensors = [tf.constant(x.astype(np.float32) if x.dtype == np.float64 else x) for x in leaves]
            return to_numpy(self._function(*tf.nest.pack_sequence_as(args, tensors)))
        signature = tuple([(x.shape, x.dtype.num) for x in leaves])
        plan = self._plans.get(signature)
        return self._first_call(signature, args, leaves) if plan is None else plan(leaves)

    def _first_call(self, signature: tuple, args: tuple, leaves: list[np.ndarray]) -> Any:
        plan = Plan(self._function, args, leaves, self._jit[0])
        try:
            result = plan(leaves)
        except _XLA_ERRORS as refusal:
            if not self._jit[0]:
                raise
            # XLA refuses a graph before it runs any of it, so nothing was updated and a plain graph may try again.
            plan = Plan(self._function, args, leaves, False)
            result = plan(leaves)
            self._jit[0] = False
            warnings.warn(
                "XLA cannot compile this network, so it runs as a plain TensorFlow graph, which is slower "
                f"(compile(jit_compile=False) says so from the start): {' '.join(str(refusal).split())[:500]}",
                RuntimeWarning,
                stacklevel=2,
            )
        self._plans[signature] = plan
        return result


def compile_function(
    function: Callable,
    state: Iterable[Any],
    jit_compile: bool = True,
    run_eagerly: bool = False,
    like: CompiledFunction | None = None,
) -> CompiledFunction:
    """Compiles a function of tensors into one of NumPy trees.

    Args:
        function: Takes trees of tensors, returns a tree of tensors; may assign to the variables in ``state``.
        state: The variables that the function reads or updates. The call runs on their device.
        jit_compile: Compile with XLA. Where XLA refuses the graph, one warning, then a plain graph.
        run_eagerly: Do not compile at all: for debugging.
        like: Another function of the same agent: where XLA refused one of the two, neither tries it again.

    Returns:
        A callable. Each new combination of input shapes and dtypes is traced once. float64 arrives as float32.
    """
    return CompiledFunction(function, state, [jit_compile] if like is None else like._jit, run_eagerly)


def minimize(
    loss_fn: Callable,
    variables: Sequence[Any],
    optimizer: Any,
    others: Sequence[Any] = (),
    max_norm: float | None = None,
) -> tuple[tf.Tensor, Any]:
    """Takes one gradient step, unless the loss or a gradient is not finite: then nothing is changed.

    Args:
        loss_fn: Returns ``(loss, aux)``: a float32 scalar, and any tree of tensors.
        variables: What to differentiate and update.
        optimizer: A built Keras optimizer. Under ``mixed_float16`` a `LossScaleOptimizer`, which skips steps with
            overflowing gradients itself, so that only the loss is checked here.
        others: Variables that the loss function itself may assign, such as moving statistics.
        max_norm: A gradient of a larger global norm is scaled down to it, before any clipping of the optimizer's own.

    Returns:
        ``(loss, aux)``. The loss is NaN where the step was left out.
    """
    before = [tf.identity(v.value) for v in others]
    with tf.GradientTape() as tape:
        loss, aux = loss_fn()
        scaled = optimizer.scale_loss(loss)
    gradients = tape.gradient(scaled, list(variables))
    rescales = hasattr(optimizer, "inner_optimizer")
    norm = tf.linalg.global_norm(gradients)
    finite = tf.math.is_finite(loss if rescales else loss + norm)
    if max_norm is not None:  # the gradients carry the loss's scale, so the bound does, too
        gradients, _ = tf.clip_by_global_norm(gradients, optimizer.scale_loss(tf.constant(max_norm)), use_norm=norm)

    def apply() -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        if context is None or rescales:  # a LossScaleOptimizer refuses a merge_call
            optimizer.apply(gradients, variables)
        else:
            # Otherwise Keras sums the gradients over one replica, by an operation whose own gradient TensorFlow
            # registers, and with it this graph, for ever: megabytes per agent.
            context.merge_call(lambda _: optimizer.apply(gradients, variables))
        return loss

    def leave() -> tf.Tensor:
        for variable, old in zip(others, before, strict=True):
            variable.assign(old)
        return tf.constant(np.nan, loss.dtype)

    return tf.cond(finite, apply, leave), aux


def repeat(
    n: Any,
    kmax: int,
    step: Callable[[Any, Any], Any],
    init: Any,
    go_on: Callable[[Any], Any] | None = None,
) -> Any:
    """Calls ``carry = step(i, carry)`` for i = 0 ... n-1 in one compiled loop.

    Args:
        n: Number of steps, an int32 scalar known only at run time.
        kmax: Upper bound of ``n``, known when compiled. Where it is 1, ``n`` is taken to be 1.
        step: Maps the index and the carry to the next carry of the same structure.
        init: The first carry, after which a step is always taken.
        go_on: Maps a carry to whether another step is taken, a bool tensor; None: all n are.

    Returns:
        The last carry.
    """
    if kmax == 1:  # without a loop, in which XLA on CPUs takes ten times as long for the gradients of convolutions
        return step(tf.constant(0), init)

    def more(i: tf.Tensor, carry: Any) -> tf.Tensor:
        return i < n if go_on is None else tf.logical_and(i < n, go_on(carry))

    init = (tf.constant(0), init)
    return tf.while_loop(more, lambda i, carry: (i + 1, step(i, carry)), init, maximum_iterations=kmax)[1]


def vectorize(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function of one row to all rows at once.

    Args:
        function: Maps a tree of tensors to a tensor; it assigns nothing.
        rows: The same tree with a leading axis.

    Returns:
        The results, stacked.
    """
    return tf.vectorized_map(function, rows)


def read_rows(variable: Any, places: Any) -> Any:
    """Returns the rows of a variable at integer places, `(*places, ...)`, without a copy of all the others."""
    return tf.gather(variable.value, places)  # of the resource; Keras' own function would read all of it first


def write_rows(variable: Any, places: Any, rows: Any) -> None:
    """Writes rows of a variable at integer places, `(M,)`; where a place occurs twice any of its rows may stay."""
    variable.value.scatter_update(tf.IndexedSlices(rows, places))


def make_deterministic() -> None:
    """Lets TensorFlow use only operations that give the same bits in every run, for the rest of the process."""
    tf.config.experimental.enable_op_determinism()
