"""Convolutions in compiled loops on CPUs, as fast as outside.

XLA's fast convolutions on CPUs want the axes in one order: batch, space, features. Its compiler brings all others,
which are most gradients, into that order by transposing their arguments, but only in the outermost computation, never
in the body of a loop: there they run as plain nested loops, 20 to 30 times slower. So they are transposed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core


def with_fast_convolutions(function: Callable) -> Callable:
    """Returns a function of equal results, all of whose convolutions have the axes in the order that is fast on CPUs.

    Args:
        function: Takes and returns trees of JAX arrays.
    """

    def equal(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = core.jaxpr_as_fun(_rewritten(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return equal


def _rewritten(what: Any) -> Any:
    """A parameter of an operation: where it is, or holds, a traced function, that with its convolutions rewritten."""
    if isinstance(what, core.ClosedJaxpr) and what.jaxpr is not what:  # JAX 0.12 made one class of the two
        return what.replace(jaxpr=_rewritten(what.jaxpr))
    if isinstance(what, core.Jaxpr):
        return what.replace(eqns=[_rewritten_equation(e) for e in what.eqns])
    if isinstance(what, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in what):  # the branches of a conditional
        return tuple(_rewritten(x) for x in what)
    return what


def _rewritten_equation(equation: Any) -> Any:
    params = dict(equation.params)
    if equation.primitive.name != "conv_general_dilated":
        return equation.replace(params={name: _rewritten(value) for name, value in params.items()})
    left, right, out = params.pop("dimension_numbers")  # of each, the places of batch (or outputs), features, space
    nb_axes = len(left)
    ordered = lax.ConvDimensionNumbers(
        (0, nb_axes - 1, *range(1, nb_axes - 1)),
        (nb_axes - 1, nb_axes - 2, *range(nb_axes - 2)),
        (0, nb_axes - 1, *range(1, nb_axes - 1)),
    )

    def convolve(x: Any, kernel: Any) -> Any:
        x = lax.transpose(x, (left[0], *left[2:], left[1]))
        kernel = lax.transpose(kernel, (*right[2:], right[1], right[0]))
        y = lax.conv_general_dilated(x, kernel, dimension_numbers=ordered, **params)
        return lax.transpose(y, np.argsort((out[0], *out[2:], out[1])).tolist())

    # Traced as the call of a compiled function it is one equation, too, and may take the place of the other.
    call = jax.make_jaxpr(jax.jit(convolve))(*[v.aval for v in equation.invars]).eqns[0]
    return call.replace(invars=equation.invars, outvars=equation.outvars)
