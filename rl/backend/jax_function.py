"""A function of NumPy trees on JAX: its state goes in and comes out.

A Keras variable is a Python object around an immutable array. While a function is traced, a `keras.StatelessScope`
gives variables traced values and collects what is assigned to them. A compiled function is then a pure one of those
values, and hands the new ones back to the variables after each call. What it assigns is donated: the new value takes
the old one's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax import numpy as jnp

from rl.backend.jax_plan import CARRIERS, Plan, arriving, read_words, sharing
from rl.backend.packing import Packing


def device_scope(variables: Iterable[Any]) -> contextlib.AbstractContextManager:
    """Returns a scope for the device of the first variable; a null context where that is the default device."""
    device = next((device_of(v) for v in variables), None)
    if device is None or device == jax.local_devices()[0]:
        return contextlib.nullcontext()
    return jax.default_device(device)


def device_of(variable: Any) -> Any:
    """The device of a variable's array."""
    return next(iter(getattr(variable, "value", variable).devices()))


def to_numpy(tree: Any) -> Any:
    """Converts every tensor of a tree to a NumPy array."""
    return jax.tree.map(np.array, tree)


class Scope(keras.StatelessScope):
    """A scope that remembers which variables were assigned in it, and asks the scope around it for all others."""

    def __init__(self, values: Iterable[tuple[Any, Any]] = ()):
        super().__init__(collect_losses=True)
        self.state_mapping |= {id(v): x for v, x in values}
        self.assigned: dict[int, Any] = {}

    def get_current_value(self, variable: Any) -> Any:
        """The value here, or in the scope around; None: the variable's own."""
        value = super().get_current_value(variable)
        if value is None and self.original_scope is not None:
            value = self.original_scope.get_current_value(variable)
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Notes what was assigned."""
        self.assigned[id(update[0])] = update[0]
        super().add_update(update)

    def commit(self, keep: Callable[[Any, Any], Any] = lambda new, old: new) -> None:
        """Assigns `keep(new, old)` to what was assigned here, in the scope around this one or for good."""
        for variable in self.assigned.values():
            variable.assign(keep(self.get_current_value(variable), variable.value))


class TracedScope(Scope):
    """The outermost scope of a function that is traced: finds out which of the state's variables it touches."""

    def __init__(self, state: State, values: Sequence[Any]):
        super().__init__(zip(state.variables, values, strict=True))
        self.state = state
        self.touched: set[int] = set()

    def get_current_value(self, variable: Any) -> Any:
        """Notes what was read, or assigned."""
        self.touched.add(id(variable))
        self.state.add([variable])
        return super().get_current_value(variable)


class State:
    """The variables that compiled functions share, and their values as arrays that nothing else holds."""

    def __init__(self, variables: Iterable[Any]):
        self.variables: list[Any] = []
        self.values: list[Any] = []
        self.device = None
        self._known: set[int] = set()
        self.add(variables)

    def add(self, variables: Iterable[Any]) -> None:
        """Lists variables that are not there yet."""
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
                self.device = self.device or device_of(variable)
                self.values[i] = variable._value = jax.device_put(np.array(variable._value), self.device)
        return self.values


class CompiledFunction:
    """A function on NumPy trees, traced once per input signature; see `compile_function`."""

    def __init__(self, function: Callable, state: State, run_eagerly: bool):
        self._function = function
        self._state = state
        self._run_eagerly = run_eagerly
        self._plans: dict[Any, Plan] = {}

    @property
    def nb_traces(self) -> int:
        """Number of input signatures traced so far."""
        return len(self._plans)

    def __call__(self, *args: Any) -> Any:
        """Runs the function on trees of NumPy arrays and returns trees of them."""
        leaves, structure = jax.tree.flatten(args)
        leaves = [x if isinstance(x, np.ndarray) else np.asarray(x) for x in leaves]
        values = self._state.refresh()
        if self._run_eagerly:
            with device_scope(self._state.variables):
                given = [jnp.asarray(arriving(x)) for x in leaves]
                return to_numpy(self._function(*jax.tree.unflatten(structure, given)))
        signature = (structure, *[(x.shape, x.dtype.num) for x in leaves])
        plan = self._plans.get(signature)
        if plan is None:
            plan = self._plans[signature] = self._trace(structure, leaves)
            values = self._state.refresh()  # tracing may have found variables that nobody listed
        execute, assigned, read, packing, packed = plan
        if (too_large := packing.fill(leaves)) is not None:
            arriving(leaves[too_large])  # raises
        separate = [arriving(leaves[i]) for i in packing.separate]
        result, new = execute([values[i] for i in assigned], [values[i] for i in read], packed, separate)
        for i, value in zip(assigned, new, strict=True):
            self._state.variables[i]._value = values[i] = value
        if not jax.tree.leaves(result):  # otherwise the conversion waits: arguments may be reused after the call
            jax.block_until_ready(new)
        return to_numpy(result)

    def _trace(self, structure: Any, leaves: list[np.ndarray]) -> Plan:
        """Compiles the function for leaves like these."""
        state, packing = self._state, Packing(leaves, CARRIERS)
        scope: Any = None

        def pure(values: list[Any], packed: Any, separate: list[Any]) -> tuple[Any, list[Any]]:
            nonlocal scope
            given = packing.unpacked(packed, separate, read_words)
            with TracedScope(state, values) as scope:
                result = self._function(*jax.tree.unflatten(structure, given))
            # Where a variable was assigned an argument, or another's value, they must not share an array.
            return result, [jnp.copy(scope.get_current_value(v)) for v in scope.assigned.values()]

        while True:
            nb_variables, inner = len(state.variables), jax.jit(pure)
            try:
                inner.eval_shape(state.refresh(), packing.buffer, [arriving(leaves[i]) for i in packing.separate])
            except Exception:
                if nb_variables == len(state.variables):
                    raise
            if nb_variables == len(state.variables):
                break  # otherwise again, with the variables that were found
        number = {id(v): i for i, v in enumerate(state.variables)}
        assigned = [number[i] for i in scope.assigned]
        read = [number[i] for i in scope.touched if i not in scope.assigned]
        shapes = [(x.shape, x.dtype) for x in state.values]

        def execute(donated: list[Any], kept: list[Any], packed: Any, separate: list[Any]) -> tuple[Any, list[Any]]:
            given = dict(zip([*assigned, *read], [*donated, *kept], strict=True))
            values = [given[i] if i in given else jnp.zeros(*shape) for i, shape in enumerate(shapes)]
            return inner(values, packed, separate)  # as traced above

        shared = sharing(packing.buffer, state.device)
        return Plan(jax.jit(execute, donate_argnums=0), assigned, read, packing, shared)
