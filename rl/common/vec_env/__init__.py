"""Vector environments: N copies of an environment behind one interface.

`SubprocVecEnv` steps them in worker processes, `DummyVecEnv` one after the other in this process; both give the
same results. `VecEnv` describes the contract. Wrappers, adapters and checks are imported at their first use, so that
workers, which need none of them, start sooner.
"""

import importlib
from typing import TYPE_CHECKING, Any

from gymnasium.vector import AutoresetMode

from rl.common.vec_env.base import CloudpickleWrapper, VecEnv, successors
from rl.common.vec_env.dummy_vec_env import DummyVecEnv
from rl.common.vec_env.errors import (
    AlreadySteppingError,
    ClosedEnvironmentError,
    EnvFailure,
    EnvFnError,
    InfoSerializationError,
    NotSteppingError,
    ObservationError,
    RemoteTraceback,
    ResetNeeded,
    VecEnvError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from rl.common.vec_env.subproc_env_vec import SubprocVecEnv

if TYPE_CHECKING:
    from rl.common.vec_env.adapters import (
        GymnasiumVecEnv,
        LegacyVecEnv,
        VecEnvToGymnasium,
        from_gymnasium,
        to_gymnasium,
    )
    from rl.common.vec_env.checks import available_memory, check_envs_equal, check_memory
    from rl.common.vec_env.wrappers import (
        VecCheckNan,
        VecEnvWrapper,
        VecFrameStack,
        VecMonitor,
        VecNormalize,
        VecVideoRecorder,
        frozen_statistics,
    )

__all__ = [
    "AlreadySteppingError",
    "AutoresetMode",
    "ClosedEnvironmentError",
    "CloudpickleWrapper",
    "DummyVecEnv",
    "EnvFailure",
    "EnvFnError",
    "GymnasiumVecEnv",
    "InfoSerializationError",
    "LegacyVecEnv",
    "NotSteppingError",
    "ObservationError",
    "RemoteTraceback",
    "ResetNeeded",
    "SubprocVecEnv",
    "VecCheckNan",
    "VecEnv",
    "VecEnvError",
    "VecEnvToGymnasium",
    "VecEnvWrapper",
    "VecFrameStack",
    "VecMonitor",
    "VecNormalize",
    "VecVideoRecorder",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
    "available_memory",
    "check_envs_equal",
    "check_memory",
    "from_gymnasium",
    "frozen_statistics",
    "successors",
    "to_gymnasium",
]

_LAZY = {
    "GymnasiumVecEnv": "adapters",
    "LegacyVecEnv": "adapters",
    "VecEnvToGymnasium": "adapters",
    "from_gymnasium": "adapters",
    "to_gymnasium": "adapters",
    "available_memory": "checks",
    "check_envs_equal": "checks",
    "check_memory": "checks",
    "VecCheckNan": "wrappers",
    "VecEnvWrapper": "wrappers",
    "VecFrameStack": "wrappers",
    "VecMonitor": "wrappers",
    "VecNormalize": "wrappers",
    "VecVideoRecorder": "wrappers",
    "frozen_statistics": "wrappers",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
