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
    chosen = ops.expand_dims(ops.cast(index, "int32"), -1) == ops.arange(values.shape[-1], dtype="int32")
    # Not a gather, whose gradient is a scatter, one row after the other.
    return ops.sum(ops.where(chosen, values, ops.zeros_like(values)), axis=-1)


def entry(values: Any, index: Any) -> Any:
    """The entry of a tensor `(k, ...)` at an integer tensor from 0 to k - 1, `(...)`: a slice, no gather."""
    rest = values.shape[1:]
    return ops.reshape(ops.slice(values, [index, *[0] * len(rest)], [1, *rest]), rest)


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


def weighted_mean(values: Any, weight: Any) -> Any:
    """Mean of ``values``, ``(B,)``, by weights ``(B,)`` that are not all 0: ``sum w x / sum w``."""
    return ops.sum(weight * values) / ops.sum(weight)


def standardize(values: Any, weight: Any, epsilon: float = 1e-8) -> Any:
    """Shifts and scales values to mean 0 and standard deviation 1, over the rows of weight 1.

    Args:
        values: ``(B,)``.
        weight: ``(B,)``, 1 or 0: a row of weight 0 counts for nothing. At least one is 1.
        epsilon: Added to the standard deviation (that of the population), so that constant values become 0.

    Returns:
        ``(B,)``. A single row is returned as it is: there is nothing to compare it with.
    """
    # From the lowest one, so that equal values become exactly 0: their mean, in float32, may differ from them by more
    # than epsilon, and the difference would be scaled up to 1.
    counts = weight > 0
    shifted = ops.where(counts, values - ops.min(ops.where(counts, values, float("inf"))), 0.0)
    centred = shifted - weighted_mean(shifted, weight)
    std = ops.sqrt(weighted_mean(ops.square(centred), weight))
    return ops.where(ops.sum(weight) > 1, centred / (std + epsilon), values)


def gae(
    reward: Any, value0: Any, value1: Any, terminated: Any, ended: Any, valid: Any, gamma: float, lam: float
) -> Any:
    """Generalised advantage estimates (Schulman et al. 2016, arXiv:1506.02438, eq. 16), by a reverse scan over time.

    ``delta_t = r_t + gamma (1 - terminated_t) V(s'_t) - V(s_t)`` and
    ``A_t = delta_t + gamma lam (1 - ended_t) A_{t+1}``. The value of the true successor is there for every row, so
    that an episode cut short bootstraps from its own last observation, and so does the last row.

    Args:
        reward: ``(T, N)``: T steps of N lanes.
        value0: ``(T, N)``: V(s_t).
        value1: ``(T, N)``: V of the true successor of s_t, which is s_{t+1} unless an episode ended.
        terminated: ``(T, N)`` bool: the successor is terminal, its value counts as 0.
        ended: ``(T, N)`` bool: the episode ended here, terminated or cut short.
        valid: ``(T, N)`` bool: False for rows that are no transitions; theirs is 0, and nothing passes through them.
        gamma: Discount factor.
        lam: 0 for one-step advantages, 1 for discounted returns minus values.

    Returns:
        ``(T, N)`` float32.
    """
    bootstrap = ops.where(terminated, 0.0, value1)
    delta = ops.where(valid, reward + gamma * bootstrap - value0, 0.0)
    passes = gamma * lam * ops.cast(ops.logical_and(valid, ops.logical_not(ended)), "float32")

    def step(later: Any, row: Any) -> tuple[Any, Any]:
        advantage = row[0] + row[1] * later
        return advantage, advantage

    return ops.scan(step, ops.zeros_like(delta[0]), (delta, passes), reverse=True)[1]


def explained_variance(target: Any, prediction: Any, weight: Any) -> Any:
    """``1 - Var(target - prediction) / Var(target)`` over rows of weight 1; NaN where the target is constant.

    1 is a perfect prediction, 0 is no better than a constant, below 0 is worse than one.

    Args:
        target: ``(B,)``.
        prediction: ``(B,)``.
        weight: ``(B,)``, 1 or 0.
    """

    def variance(x: Any) -> Any:
        return weighted_mean(ops.square(x - weighted_mean(x, weight)), weight)

    spread = variance(target)
    rounding = 1e-12 * weighted_mean(ops.square(target), weight)  # the variance of float32 numbers that should be equal
    return ops.where(spread > rounding, 1.0 - variance(target - prediction) / ops.maximum(spread, 1e-30), float("nan"))
