"""What a vector env is made from, checked: environment functions, their spaces, the autoreset mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import cloudpickle
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arena import SpaceTree
from rl.common.vec_env.errors import EnvFnError
from rl.common.vec_env.lanes import dumps

__all__ = ["check_env_fns", "common_space", "mode_of", "pickle_env_fns"]


def mode_of(mode: AutoresetMode | str) -> AutoresetMode:
    """An autoreset mode from itself, its value ("SameStep") or its name ("same_step").

    Raises:
        ValueError: If there is no such mode.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    for one in AutoresetMode:
        if str(mode).lower() in (one.value.lower(), one.name.lower()):
            return one
    raise ValueError(f"autoreset_mode must be one of {[one.name for one in AutoresetMode]}, got {mode!r}.")


def check_env_fns(env_fns: Iterable[Callable[[], Any]]) -> list[Callable[[], Any]]:
    """The environment functions as a list.

    Raises:
        ValueError: If there are none.
        TypeError: If one cannot be called, or is an environment.
    """
    if callable(env_fns) or isinstance(env_fns, (str, bytes)):
        raise EnvFnError(f"env_fns must be a sequence of functions, got {type(env_fns).__name__}.")
    functions = list(env_fns)
    if not functions:
        raise ValueError("A vector env needs at least one environment, got an empty sequence of env_fns.")
    for i, env_fn in enumerate(functions):
        if not isinstance(env_fn, type) and hasattr(env_fn, "reset") and hasattr(env_fn, "step"):
            raise EnvFnError(
                f"env_fns[{i}] is an environment ({type(env_fn).__name__}): pass a function that makes one, such as "
                "lambda: gymnasium.make('CartPole-v1')."
            )
        if not callable(env_fn):
            raise EnvFnError(f"env_fns[{i}] must be a function without arguments, got {type(env_fn).__name__}.")
    return functions


def pickle_env_fns(env_fns: Sequence[Callable[[], Any]], low: int, import_main: bool) -> bytes:
    """The functions of a worker, pickled.

    Args:
        env_fns: The functions.
        low: Number of the first one.
        import_main: Whether the worker knows the main module, so that pickle may refer to it.

    Raises:
        EnvFnError: If one cannot be sent; it names the function and what in it is to blame.
    """
    try:
        return dumps(list(env_fns)) if import_main else cloudpickle.dumps(list(env_fns))
    except Exception:
        for i, env_fn in enumerate(env_fns):
            try:
                cloudpickle.dumps(env_fn)
            except Exception as error:
                raise EnvFnError(
                    f"env_fns[{low + i}] cannot be sent to a worker process{_culprit(env_fn)}: {error}. Make the "
                    "environment, and what it needs, inside the function."
                ) from error
        raise


def _culprit(env_fn: Any) -> str:
    """Which variable of a function cannot be pickled."""
    variables: dict[str, Any] = {}
    code = getattr(env_fn, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, env_fn.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):
                variables[name] = cell.cell_contents
        variables |= {name: env_fn.__globals__[name] for name in code.co_names if name in env_fn.__globals__}
        variables |= {f"default {k}": value for k, value in enumerate(env_fn.__defaults__ or ())}
    elif hasattr(env_fn, "func"):
        variables = {f"argument {k}": value for k, value in enumerate(env_fn.args)} | dict(env_fn.keywords)
    for name, value in {**variables, **getattr(env_fn, "__dict__", {})}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f" because of its variable {name!r} ({type(value).__name__})"
    return ""


def common_space(
    kind: str, lane_spaces: Sequence[spaces.Space[Any]], rule: Literal["same", "compatible"]
) -> tuple[spaces.Space[Any], bool]:
    """The lanes' space, and whether all are equal.

    Raises:
        ValueError: If they differ (in shape or dtype, where the rule is "compatible"), or if one is no space.
    """
    first = lane_spaces[0]
    for i, space in enumerate(lane_spaces):
        if not isinstance(space, spaces.Space):
            raise ValueError(f"Environment {i}: {kind} must be a gymnasium space, got {type(space).__name__}.")
    differing = [i for i, space in enumerate(lane_spaces) if space != first]
    if not differing:
        return first, True
    if rule == "compatible":
        leaves = [[leaf[:3] for leaf in SpaceTree(space).leaves] for space in lane_spaces]
        differing = [i for i, one in enumerate(leaves) if one != leaves[0]]
        if not differing:
            return first, False
    i = differing[0]
    hint = "" if rule == "compatible" else " If only their bounds differ, pass spaces='compatible'."
    raise ValueError(
        f"All environments must have the same {kind}: environment 0 has {first}, environment {i} has "
        f"{lane_spaces[i]}.{hint}"
    )
