"""JAX behind the seam: compiled functions, one gradient step, a run-time counted loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
from jax import lax
from jax import numpy as jnp

from rl.backend.jax_convolutions import with_fast_convolutions
from rl.backend.jax_function import CompiledFunction, Scope, State, TracedScope, device_of, device_scope, to_numpy

__all__ = ["compile_function", "device_scope", "minimize", "on_cpu", "repeat", "set_threads", "to_numpy"]


def set_threads(intra_op: int = 1, inter_op: int = 1) -> None:
    """Sets the threads of JAX on CPUs; small networks run fastest with one each.

    Args:
        intra_op: Threads that may share the operations of a compiled call.
        inter_op: 1: calls run in the thread that makes them. More: in another one.

    Raises:
        RuntimeError: JAX has already been used in this process; call this first.
    """
    nb_devices = jax.config.jax_num_cpu_devices
    try:  # JAX says whether it is too late for another number of devices, which stays what it was
        jax.config.update("jax_num_cpu_devices", nb_devices + 2)
        jax.config.update("jax_num_cpu_devices", nb_devices)
    except RuntimeError as error:
        raise RuntimeError(
            "set_threads() was called after JAX's first operation; call it before building a model, "
            f"or set PJRT_NPROC={intra_op} in the environment"
        ) from error
    os.environ["PJRT_NPROC"] = os.environ["NPROC"] = str(intra_op)  # the name depends on the release
    jax.config.update("jax_cpu_enable_async_dispatch", inter_op > 1)


def on_cpu(variables: Iterable[Any]) -> bool:
    """Whether the first variable lives on a CPU."""
    device = next((device_of(v) for v in variables), None)
    return device is None or device.platform == "cpu"


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
        jit_compile: Without effect: JAX has no other way to compile than XLA.
        run_eagerly: Do not compile at all: for debugging.
        like: Another function of the same agent: the two share their state.

    Returns:
        A callable. Each new combination of input shapes and dtypes is traced once. float64 arrives as float32, integers
        of 64 bits arrive as 32 bits.
    """
    shared = State(()) if like is None else like._state
    shared.add(state)
    return CompiledFunction(function, shared, run_eagerly)


def minimize(
    loss_fn: Callable,
    variables: Sequence[Any],
    optimizer: Any,
    others: Sequence[Any] = (),
    max_norm: float | None = None,
) -> tuple[jax.Array, Any]:
    """Takes one gradient step, unless the loss or a gradient is not finite: then nothing is changed.

    Args:
        loss_fn: Returns ``(loss, aux)``: a float32 scalar, and any tree of tensors.
        variables: What to differentiate and update. A `LossScaleOptimizer` wants all that it was built for, in order.
        optimizer: A built Keras optimizer. Under ``mixed_float16`` a `LossScaleOptimizer`, which skips steps with
            overflowing gradients itself, so that only the loss is checked here.
        others: Variables that the loss function itself may assign, such as moving statistics.
        max_norm: A gradient of a larger global norm is scaled down to it, before any clipping of the optimizer's own.

    Returns:
        ``(loss, aux)``. The loss is NaN where the step was left out.
    """
    variables, forward = list(variables), Scope()

    def scaled_loss(values: list[Any]) -> tuple[Any, tuple]:
        nonlocal forward
        with Scope(zip(variables, values, strict=True)) as forward:
            loss, aux = loss_fn()
            scaled = optimizer.scale_loss(loss)
        return scaled, (loss, aux, [forward.get_current_value(v) for v in forward.assigned.values()])

    values = [v.value for v in variables]
    gradients, (loss, aux, updates) = jax.grad(scaled_loss, has_aux=True)(values)
    rescales = hasattr(optimizer, "inner_optimizer")
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in gradients))
    finite = jnp.isfinite(loss if rescales else loss + norm)
    if max_norm is not None:  # the gradients carry the loss's scale, so the bound does, too
        factor = optimizer.scale_loss(jnp.float32(max_norm)) / jnp.maximum(norm, optimizer.scale_loss(max_norm))
        gradients = [g * factor for g in gradients]

    gated = {id(v) for v in others}
    for variable, value in zip(forward.assigned.values(), updates, strict=True):
        variable.assign(jnp.where(finite, value, variable.value) if id(variable) in gated else value)
    with Scope() as step:
        if rescales:  # its `apply` assigns within a conditional, which JAX does not let out
            slots = optimizer.variables
            new, new_slots = optimizer.stateless_apply(
                [v.value for v in slots], gradients, [v.value for v in variables]
            )
            for variable, value in zip([*variables, *slots], [*new, *new_slots], strict=True):
                variable.assign(value)
        else:
            optimizer.apply(gradients, variables)
    # To select costs less than a conditional, which XLA cannot fuse with the step.
    step.commit(lambda new, old: jnp.where(finite, new, old))
    return jnp.where(finite, loss, jnp.nan), aux


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
    if kmax == 1:
        return step(jnp.int32(0), init)
    with Scope() as outer:
        while outer.original_scope is not None and not isinstance(outer, TracedScope):
            outer = outer.original_scope
        variables = list(outer.state.variables) if isinstance(outer, TracedScope) else None
    if variables is None:  # not compiled
        for i in range(min(int(n), kmax)):
            if go_on is None or go_on(init):
                init = step(jnp.int32(i), init)
        return init
    inside = Scope()

    def more(carry: tuple) -> Any:
        i, _, result = carry
        goes = i < jnp.minimum(n, kmax)
        return goes if go_on is None else jnp.logical_and(goes, go_on(result))

    def body(carry: tuple) -> tuple:
        nonlocal inside
        i, values, result = carry
        with Scope(zip(variables, values, strict=True)) as inside:
            result = step(i, result)
        return i + 1, [inside.get_current_value(v) for v in variables], result

    if on_cpu(x for x in outer.state.values if x is not None):  # what is traced has no device, the values before have
        body = with_fast_convolutions(body)
    _, values, result = lax.while_loop(more, body, (jnp.int32(0), [v.value for v in variables], init))
    current = dict(zip(map(id, variables), values, strict=True))
    for variable in inside.assigned.values():
        variable.assign(current[id(variable)])
    return result


def vectorize(function: Callable[[Any], Any], rows: Any) -> Any:
    """Applies a function of one row to all rows at once.

    Args:
        function: Maps a tree of tensors to a tensor; it assigns nothing.
        rows: The same tree with a leading axis.

    Returns:
        The results, stacked.
    """
    return jax.vmap(function)(rows)


def read_rows(variable: Any, places: Any) -> Any:
    """Returns the rows of a variable at integer places, `(*places, ...)`, without a copy of all the others."""
    return keras.ops.take(variable, places, axis=0)


def write_rows(variable: Any, places: Any, rows: Any) -> None:
    """Writes rows of a variable at integer places, `(M,)`; where a place occurs twice any of its rows may stay."""
    # XLA does it in place, since the variable's old value is given away.
    variable.assign(keras.ops.scatter_update(variable, places[:, None], rows))


def make_deterministic() -> None:
    """Sees to it that only operations are used that give the same bits in every run.

    XLA's code for CPUs needs nothing. It reads the flag for its GPU code from the environment when it starts.

    Raises:
        RuntimeError: JAX runs on a GPU, and `XLA_FLAGS` did not ask for deterministic operations.
    """
    flags = os.environ.get("XLA_FLAGS", "").lower().split()
    # The first is the second and more.
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    if jax.default_backend() != "cpu" and not any(n + x in flags for n in names for x in ("", "=true", "=1")):
        raise RuntimeError(
            f"deterministic=True with JAX on a GPU needs XLA_FLAGS={names[0]}=true in the environment before the first "
            "use of JAX; it cannot be set later. Fix: set it and start again, or KERAS_BACKEND=tensorflow"
        )
