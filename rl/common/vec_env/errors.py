"""What can go wrong in a vector environment, one exception class per remedy."""

from __future__ import annotations

from typing import NamedTuple

from gymnasium.error import ClosedEnvironmentError, ResetNeeded

__all__ = [
    "AlreadySteppingError",
    "ClosedEnvironmentError",
    "EnvFailure",
    "EnvFnError",
    "InfoSerializationError",
    "NotSteppingError",
    "ObservationError",
    "RemoteTraceback",
    "ResetNeeded",
    "VecEnvError",
    "WorkerDiedError",
    "WorkerError",
    "WorkerTimeoutError",
]


class EnvFailure(NamedTuple):
    """One environment's exception, as attached to the raised one in its attribute `env_failures`."""

    env_index: int
    worker_index: int | None
    type_name: str
    message: str
    traceback: str


class VecEnvError(Exception):
    """Base class of the vector environments' own errors."""


class AlreadySteppingError(VecEnvError):
    """A step was started, or a call made from another thread, while a step is pending."""

    def __init__(self, message: str = "A step is pending: call step_wait() before the next step_async().") -> None:
        """Explain what is pending."""
        super().__init__(message)


class NotSteppingError(VecEnvError):
    """`step_wait` or `recv` was called although no step was started."""

    def __init__(self, message: str = "No step is pending: call step_async(actions) first.") -> None:
        """Explain what is missing."""
        super().__init__(message)


class EnvFnError(VecEnvError, TypeError):
    """An entry of `env_fns` cannot be sent to a worker process."""


class ObservationError(VecEnvError, ValueError):
    """An environment returned an observation that does not fit its `observation_space`."""


class InfoSerializationError(VecEnvError, TypeError):
    """An `info` holds a value that cannot be copied out of its environment.

    The step itself is not lost: the next `step_wait()` returns it, with the value replaced by a description.
    """


class WorkerError(VecEnvError, RuntimeError):
    """An environment failed with an exception that cannot be rebuilt here; the message holds its type and text."""


class WorkerDiedError(WorkerError):
    """A worker process ended without being asked to (killed, crashed, `os._exit`)."""


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker did not answer in time. The call may be repeated: nothing is lost or shifted."""


class RemoteTraceback(Exception):
    """Carries the text of a worker's traceback as the `__cause__` of the exception raised here."""

    def __init__(self, text: str) -> None:
        """Keep the traceback's text."""
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        """Show the text below a line break, as Python prints it under the exception's name."""
        return f"\n{self.text}"
