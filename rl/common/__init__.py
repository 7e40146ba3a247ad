"""Environments, seeds and images: the part of the library that needs neither Keras nor a backend."""

from typing import Any

__all__ = ["set_global_seeds"]


def __getattr__(name: str) -> Any:
    # Lazy, so that an environment worker that imports rl.common.vec_env pays for nothing else.
    if name == "set_global_seeds":
        from rl.common.misc_util import set_global_seeds

        return set_global_seeds
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
