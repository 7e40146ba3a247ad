"""Pure tensor functions that the algorithms share. All take and return `keras.ops` tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops


def take(values: Any, index: Any) -> Any:
    """Picks one entry per row.

    Args:
        values: ``(B, A)``, for instance Q-values.
        index: ``(B,)`` integers in ``[0, A)``.

    Returns:
        ``(B,)``: ``values[b, index[b]]``.
    """
    index = ops.cast(index, "int32")
    return ops.squeeze(ops.take_along_axis(values, ops.expand_dims(index, -1), axis=-1), axis=-1)


def huber(error: Any, delta: float) -> Any:
    """Huber's loss with its unit curvature, elementwise (Huber 1964, doi:10.1214/aoms/1177703732).

    ``0.5 e^2`` where ``|e| <= delta``, else ``delta (|e| - 0.5 delta)``; its gradient is the error clipped to
    ``[-delta, delta]``, which is what the DQN paper calls clipping the error term. ``delta=inf`` gives ``0.5 e^2``.
    """
    if delta == float("inf"):
        return 0.5 * ops.square(error)
    size = ops.abs(error)
    inside = ops.minimum(size, delta)
    return 0.5 * ops.square(inside) + delta * (size - inside)


def polyak(target: Sequence[Any], source: Sequence[Any], tau: float) -> None:
    """Moves target variables towards their sources: ``target <- (1 - tau) target + tau source``.

    Non-float variables (counters, seeds) are copied. ``tau=1`` is a copy.
    """
    for t, s in zip(target, source, strict=True):
        if tau == 1 or not keras.backend.is_float_dtype(t.dtype):
            t.assign(s)
        else:
            t.assign(t + tau * (s - t))


def weights_of(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Flattens ``[(target, source), ...]`` models into two lists of weights in the same order."""
    target, source = [], []
    for t, s in pairs:
        target += t.weights
        source += s.weights
    return target, source
