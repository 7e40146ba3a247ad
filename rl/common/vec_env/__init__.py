"""Vector environments: N copies of an environment behind one interface.

`SubprocVecEnv` steps them in worker processes, `DummyVecEnv` one after the other in this process; both give the
same results. `VecEnv` describes the contract.
"""

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

__all__ = [
    "AlreadySteppingError",
    "AutoresetMode",
    "ClosedEnvironmentError",
    "CloudpickleWrapper",
    "DummyVecEnv",
    "EnvFailure",
    "EnvFnError",
    "InfoSerializationError",
    "NotSteppingError",
    "ObservationError",
    "RemoteTraceback",
    "ResetNeeded",
    "SubprocVecEnv",
    "VecEnv",
    "VecEnvError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
    "successors",
]
