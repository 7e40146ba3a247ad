"""Small helpers that need nothing but NumPy: trees of arrays and global seeds.

A *tree* is what a nested observation is made of: a ``dict`` or a ``tuple`` of trees, or a leaf (anything
else: an array, a number, a space). Lists are leaves, since Gymnasium's nested spaces sample to dicts and
tuples only.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["set_global_seeds", "tree_leaves", "tree_map", "tree_paths", "warn_user"]

MAX_SEED = 2**32 - 1


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to each leaf of a tree and return a tree of the results.

    Args:
        fn: Called as ``fn(leaf, *other_leaves)``.
        tree: A dict or tuple of trees, or a leaf. The result has its structure and its order of keys.
        *rest: Further trees of the same structure; their dicts may hold the keys in another order.

    Returns:
        The tree of results. A named tuple stays a named tuple; any dict becomes a plain ``dict``.

    Raises:
        ValueError: If a further tree has other keys, another length or another kind of node than the first.
    """
    if isinstance(tree, dict):
        for other in rest:
            if not isinstance(other, Mapping) or other.keys() != tree.keys():
                raise ValueError(f"Trees differ: expected a dict with keys {list(tree)}, got {_describe(other)}.")
        return {key: tree_map(fn, value, *[other[key] for other in rest]) for key, value in tree.items()}
    if isinstance(tree, tuple):
        for other in rest:
            if not isinstance(other, tuple) or len(other) != len(tree):
                raise ValueError(f"Trees differ: expected a tuple of length {len(tree)}, got {_describe(other)}.")
        children = [tree_map(fn, *values) for values in zip(tree, *rest, strict=True)]
        return type(tree)(*children) if hasattr(tree, "_fields") else tuple(children)
    return fn(tree, *rest)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree as a flat list, dicts in the order in which they hold their keys."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in tree_leaves(value)]
    if isinstance(tree, tuple):
        return [leaf for value in tree for leaf in tree_leaves(value)]
    return [tree]


def tree_paths(tree: Any) -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` for each leaf of a tree of values, or of a (nested) Gymnasium space.

    The path is written as Python would index the leaf, so that ``"observation" + path`` reads well in a
    message:
    ``""`` for a tree that is a leaf itself, ``"['camera'][0]"`` for the first element of a tuple under a key.

    Args:
        tree: A dict or tuple of trees, a ``gymnasium.spaces.Dict`` or ``Tuple``, or a leaf.

    Returns:
        The pairs, in the order of `tree_leaves`.
    """
    pairs: list[tuple[str, Any]] = []
    _collect_paths(tree, "", pairs)
    return pairs


def set_global_seeds(seed: int | None, deterministic: bool = False) -> None:
    """Seed Python's and NumPy's global generators, and Keras' where Keras has been imported already.

    Importing Keras only to seed it would cost seconds in a worker that never uses it, hence the condition.

    Args:
        seed: An integer from 0 to 2**32 - 1, or None for fresh entropy (Keras is then left as it is).
        deterministic: Also import Keras, and let the backend use only operations that give the same bits in every run
            on the same machine, for the rest of the process. False changes nothing about them.

    Raises:
        TypeError: If `seed` is not an integer.
        ValueError: If `seed` is out of range, or None where `deterministic` is asked for.
        RuntimeError: If the backend can no longer be made deterministic (JAX on a GPU); the message says how.
    """
    if deterministic and seed is None:
        raise ValueError("deterministic=True needs a seed, got seed=None: every run would begin with other weights.")
    if seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)):
            raise TypeError(f"seed must be an integer or None, got {seed!r} of type {type(seed).__name__}.")
        seed = int(seed)
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"seed must be from 0 to {MAX_SEED}, got {seed}.")
    if deterministic:  # first, since it may refuse
        from rl.backend import make_deterministic

        make_deterministic()
    random.seed(seed)
    np.random.seed(seed)
    keras = sys.modules.get("keras")
    if keras is not None and seed is not None:
        keras.utils.set_random_seed(seed)


def _collect_paths(tree: Any, path: str, pairs: list[tuple[str, Any]]) -> None:
    # A Dict space is a Mapping; a Tuple space is a Sequence that keeps its parts in a tuple `spaces` (a OneOf
    # space has the latter too, but is no Sequence: it is a leaf).
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            _collect_paths(value, f"{path}[{key!r}]", pairs)
    elif isinstance(tree, tuple) or (isinstance(tree, Sequence) and isinstance(getattr(tree, "spaces", None), tuple)):
        for index, value in enumerate(tree):
            _collect_paths(value, f"{path}[{index}]", pairs)
    else:
        pairs.append((path, tree))


def _describe(tree: Any) -> str:
    if isinstance(tree, Mapping):
        return f"a dict with keys {list(tree)}"
    if isinstance(tree, tuple):
        return f"a tuple of length {len(tree)}"
    return f"a {type(tree).__name__}"


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called into this package, not at the line in it that noticed.

    Args:
        message: What is wrong, and what mends it.
        category: The kind of warning. Default `UserWarning`.
    """
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] == "rl" and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
