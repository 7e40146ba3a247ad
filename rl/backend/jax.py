"""JAX behind the seam: functions whose state goes in and comes out, one gradient step, a run-time counted loop.

A Keras variable is a Python object around an immutable array. While a function is traced, a `keras.StatelessScope`
gives variables traced values and collects what is assigned to them. A compiled function is then a pure one of those
values, and hands the new ones back to the variables after each call. What it assigns is donated: the new value takes
the old one's memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax import numpy as jnp


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


def device_scope(variables: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Returns a scope for the device of the first variable; a null context where that is the default device."""
    device = next((_device_of(v) for v in variables), None)
    if device is None or device == jax.local_devices()[0]:
        return contextlib.nullcontext()
    return jax.default_device(device)


def _device_of(variable: Any) -> Any:
    return next(iter(getattr(variable, "value", variable).devices()))


def on_cpu(variables: Iterable[Any]) -> bool:
    """Whether the first variable lives on a CPU."""
    device = next((_device_of(v) for v in variables), None)
    return device is None or device.platform == "cpu"


def to_numpy(tree: Any) -> Any:
    """Converts every tensor of a tree to a NumPy array."""
    return jax.tree.map(np.array, tree)


class _Scope(keras.StatelessScope):
    """A scope that remembers which variables were assigned in it, and asks the scope around it for all others."""

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()):
        super().__init__(collect_losses=True)
        self.state_mapping |= {id(v): x for v, x in values}
        self.assigned: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def commit(self, keep: Callable[[Any, Any], Any] = lambda new, old: new) -> None:
        """Assigns `keep(new, old)` to what was assigned here, in the scope around this one or for good."""
        for variable in self.assigned.values():
            variable.assign(keep(self.get_current_value(variable), variable.value))


class _TracedScope(_Scope):
    """The outermost scope of a function that is traced: finds out which of the state's variables it touches."""

    def __init__(self, state: _State, values: Sequence[Any]):
        super().__init__(zip(state.variables, values, strict=True))
        self.state = state
        self.touched: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        self.touched.add(id(variable))
        self.state.add([variable])
        return super().get_current_value(variable)


class _State:
    """The variables that compiled functions share, and their values as arrays that nothing else holds."""

    def __init__(self, variables: Iterable[Any]):
        self.variables: list[Any] = []
        self.values: list[Any] = []
        self.device = None
        self._known: set[int] = set()
        self.add(variables)

    def add(self, variables: Iterable[Any]) -> None:
        for variable in variables:
            if id(variable) not in self._known:
                self._known.add(id(variable))
                self.variables.append(variable)
                self.values.append(None)

    def refresh(self) -> list[Any]:
        """Takes in what was assigned outside: as a copy, since donating the original might pull it from under others.

        The copy stays on the state's device, also where the variable was assigned an array of another one.
        """
        for i, (variable, value) in enumerate(zip(self.variables, self.values, strict=True)):
            # To assign by `assign`, which converts and checks, would cost more than the call, once per variable.
            if variable._value is not value:
                self.device = self.device or _device_of(variable)
                self.values[i] = variable._value = jax.device_put(np.array(variable._value), self.device)
        return self.values


class CompiledFunction:
    """A function on NumPy trees, traced once per input signature; see `compile_function`."""

    def __init__(self, function: Callable, state: _State, run_eagerly: bool):
        self._function = function
        self._state = state
        self._run_eagerly = run_eagerly
        self._plans: dict[Any, tuple[Callable, list[int], list[int]]] = {}

    @property
    def nb_traces(self) -> int:
        """Number of input signatures traced so far."""
        return len(self._plans)

    def __call__(self, *args: Any) -> Any:
        """Runs the function on trees of NumPy arrays and returns trees of them."""
        leaves, structure = jax.tree.flatten(args)
        leaves = [_arriving(x) for x in leaves]
        values = self._state.refresh()
        if self._run_eagerly:
            with device_scope(self._state.variables):
                return to_numpy(self._function(*jax.tree.unflatten(structure, [jnp.asarray(x) for x in leaves])))
        signature = (structure, *[(x.shape, x.dtype.num) for x in leaves])
        plan = self._plans.get(signature)
        if plan is None:
            plan = self._plans[signature] = self._trace(structure, leaves)
            values = self._state.refresh()  # tracing may have found variables that nobody listed
        execute, assigned, read = plan
        result, new = execute([values[i] for i in assigned], [values[i] for i in read], leaves)
        for i, value in zip(assigned, new, strict=True):
            self._state.variables[i]._value = values[i] = value
        if not jax.tree.leaves(result):  # otherwise the conversion waits: arguments may be reused after the call
            jax.block_until_ready(new)
        return to_numpy(result)

    def _trace(self, structure: Any, leaves: list[np.ndarray]) -> tuple[Callable, list[int], list[int]]:
        """Returns the compiled function, and which variables of the state it assigns, and which it only reads."""
        state = self._state
        scope: Any = None

        def pure(values: list[Any], leaves: list[Any]) -> tuple[Any, list[Any]]:
            nonlocal scope
            with _TracedScope(state, values) as scope:
                result = self._function(*jax.tree.unflatten(structure, leaves))
            # Where a variable was assigned an argument, or another's value, they must not share an array.
            return result, [jnp.copy(scope.get_current_value(v)) for v in scope.assigned.values()]

        while True:
            nb_variables, inner = len(state.variables), jax.jit(pure)
            try:
                inner.eval_shape(state.refresh(), leaves)
            except Exception:
                if nb_variables == len(state.variables):
                    raise
            if nb_variables == len(state.variables):
                break  # otherwise again, with the variables that were found
        number = {id(v): i for i, v in enumerate(state.variables)}
        assigned = [number[i] for i in scope.assigned]
        read = [number[i] for i in scope.touched if i not in scope.assigned]
        shapes = [(x.shape, x.dtype) for x in state.values]

        def execute(donated: list[Any], kept: list[Any], leaves: list[Any]) -> tuple[Any, list[Any]]:
            given = dict(zip([*assigned, *read], [*donated, *kept], strict=True))
            values = [given[i] if i in given else jnp.zeros(*shape) for i, shape in enumerate(shapes)]
            return inner(values, leaves)  # as traced above

        return jax.jit(execute, donate_argnums=0), assigned, read


def _arriving(x: Any) -> np.ndarray:
    """What JAX can take: native byte order, floats and integers of at most 32 bits."""
    x = x if isinstance(x, np.ndarray) else np.asarray(x)
    if x.dtype.itemsize < 8 and x.dtype.isnative:
        return x
    dtype = {"f": np.float32, "i": np.int32, "u": np.uint32}.get(x.dtype.kind)
    narrow = x.astype(dtype if x.dtype.itemsize >= 8 and dtype else x.dtype.newbyteorder("="))
    if narrow.dtype.kind in "iu" and not np.array_equal(narrow, x):
        raise ValueError(
            f"JAX computes with integers of 32 bits, and an array of {x.dtype} holds {x.flat[np.argmax(np.abs(x))]}. "
            "Fix: smaller numbers, floats, or KERAS_BACKEND=tensorflow"
        )
    return narrow


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
    shared = _State(()) if like is None else like._state
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
    variables, forward = list(variables), _Scope()

    def scaled_loss(values: list[Any]) -> tuple[Any, tuple]:
        nonlocal forward
        with _Scope(zip(variables, values, strict=True)) as forward:
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
    with _Scope() as step:
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
    if kmax == 1:  # without a loop, in which XLA on CPUs takes ten times as long for the gradients of convolutions
        return step(jnp.int32(0), init)
    with _Scope() as outer:
        while outer.original_scope is not None and not isinstance(outer, _TracedScope):
            outer = outer.original_scope
        variables = list(outer.state.variables) if isinstance(outer, _TracedScope) else None
    if variables is None:  # not compiled
        for i in range(min(int(n), kmax)):
            if go_on is None or go_on(init):
                init = step(jnp.int32(i), init)
        return init
    inside = _Scope()

    def more(carry: tuple) -> Any:
        i, _, result = carry
        goes = i < jnp.minimum(n, kmax)
        return goes if go_on is None else jnp.logical_and(goes, go_on(result))

    def body(carry: tuple) -> tuple:
        nonlocal inside
        i, values, result = carry
        with _Scope(zip(variables, values, strict=True)) as inside:
            result = step(i, result)
        return i + 1, [inside.get_current_value(v) for v in variables], result

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
