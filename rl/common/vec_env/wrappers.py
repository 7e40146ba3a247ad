"""Wrappers around a whole vector environment: normalising, stacking, monitoring, filming, checking."""

from rl.common.vec_env.check_nan import VecCheckNan
from rl.common.vec_env.frame_stack import VecFrameStack
from rl.common.vec_env.normalize import VecNormalize, frozen_statistics
from rl.common.vec_env.recording import VecMonitor, VecVideoRecorder
from rl.common.vec_env.wrapper import VecEnvWrapper

__all__ = [
    "VecCheckNan",
    "VecEnvWrapper",
    "VecFrameStack",
    "VecMonitor",
    "VecNormalize",
    "VecVideoRecorder",
    "frozen_statistics",
]
