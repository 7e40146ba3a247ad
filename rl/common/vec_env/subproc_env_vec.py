"""A vector env whose environments live in worker processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np
from gymnasium.vector import AutoresetMode

from rl.common.vec_env.arguments import check_env_fns, mode_of, pickle_env_fns
from rl.common.vec_env.cores import choose_workers, logger, probe_env, usable_cores
from rl.common.vec_env.lane_vec_env import LaneVecEnv
from rl.common.vec_env.launcher import METHODS, check_platform, worker_environ
from rl.common.vec_env.main_module import refuse_in_import
from rl.common.vec_env.process_engine import ProcessEngine

__all__ = ["SubprocVecEnv"]


class SubprocVecEnv(LaneVecEnv):
    """Steps N environments in worker processes, several per worker.

    Observations, actions, rewards and flags travel through shared memory; infos, attributes and errors through a
    socket per worker. No environment is made in this process. Workers do not import the main module (unless
    `import_main` asks for it), so a script needs no `if __name__ == "__main__"` guard, and functions and classes
    defined in it are sent by value.

    An environment's exception is raised here with its own type (`WorkerError` where that is not possible), the
    worker's traceback as cause and the attributes `env_index`, `worker_index` and `env_failures`; after `reset()` the
    vector env goes on. Ctrl-C never reaches the workers. They end with this process, however that ends.

    Args:
        env_fns: N functions without arguments, each of which makes one environment.
        autoreset_mode: What happens when an episode ends, see `VecEnv`.
        workers: Number of worker processes. Default: one per usable core, at most N. "auto": times some steps of
            `env_fns[0]()` first, and takes one per environment if they wait rather than compute; `worker_choice`
            and the log tell what was chosen and why.
        start_method: "forkserver", "spawn" or "fork". Fork is quick, but a worker that uses TensorFlow hangs if this
            process has.
        copy: Whether returned observations are the caller's own. With False they are views of the shared memory that
            stay intact until the second next step or reset.
        check_actions: Whether discrete actions must lie in their space.
        clip_actions: Whether `Box` actions are clipped to their bounds.
        on_bad_info: What to do about an info that cannot be pickled: "raise" `InfoSerializationError`, or "drop" the
            value for a description.
        on_worker_failure: "raise" `WorkerDiedError` when a worker process ends, or "restart" it: its environments
            are made and reset anew; their rows of that step have reward 0, `truncated` and
            `infos[i]["worker_restarted"]` True and the last delivered observation as final one. Such a row is no
            transition of the environment: learn nothing from it.
        max_restarts: How often each worker may be restarted.
        spaces: "same": all environments must have equal spaces. "compatible": their bounds may differ.
        step_timeout: Default seconds that a step, a reset or any other call waits for the workers, None: no limit.
        start_timeout: Seconds that all environments may take to be made.
        worker_env: Environment variables for the workers; None removes one. By default libraries get one thread and
            see no GPU.
        spin_us: Microseconds that both sides look for the other's answer before they sleep, 0: none. They do so
            politely, and not where it does not pay off (see `Spinner`).
        import_main: Whether workers import the main module, as multiprocessing's do, under the name `__mp_main__`: for
            what it registers or sets up when it is imported. It then needs a guard, and is imported by each worker
            with all that it imports. Functions and classes are sent by reference where pickle can.

    Raises:
        ValueError: If `env_fns` is empty, an option is wrong, the spaces differ, or `import_main` is True and the
            main module cannot be imported.
        EnvFnError: If an entry of `env_fns` is no function or cannot be sent (a TypeError).
        WorkerTimeoutError: If the environments are not made in time.
        RuntimeError: If this is not Linux 5.3 or later; use `DummyVecEnv` there.
    """

    def __init__(
        self,
        env_fns: Iterable[Callable[[], Any]],
        *,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        workers: int | Literal["auto"] | None = None,
        start_method: Literal["forkserver", "spawn", "fork"] = "forkserver",
        copy: bool = True,
        check_actions: bool = True,
        clip_actions: bool = False,
        on_bad_info: Literal["raise", "drop"] = "raise",
        on_worker_failure: Literal["raise", "restart"] = "raise",
        max_restarts: int = 3,
        spaces: Literal["same", "compatible"] = "same",
        step_timeout: float | None = None,
        start_timeout: float = 60.0,
        worker_env: Mapping[str, str | None] | None = None,
        spin_us: float = 150.0,
        import_main: bool = False,
    ) -> None:
        check_platform()
        refuse_in_import()
        mode = mode_of(autoreset_mode)
        functions = check_env_fns(env_fns)
        nb = len(functions)
        if start_method not in METHODS:
            raise ValueError(f"start_method must be one of {METHODS}, got {start_method!r}.")
        if on_worker_failure not in ("raise", "restart"):
            raise ValueError(f"on_worker_failure must be 'raise' or 'restart', got {on_worker_failure!r}.")
        if spaces not in ("same", "compatible"):
            raise ValueError(f"spaces must be 'same' or 'compatible', got {spaces!r}.")
        if on_bad_info not in ("raise", "drop"):
            raise ValueError(f"on_bad_info must be 'raise' or 'drop', got {on_bad_info!r}.")
        if not (workers is None or workers == "auto" or (isinstance(workers, (int, np.integer)) and workers >= 1)):
            raise ValueError(f"workers must be a positive number, 'auto' or None, got {workers!r}.")
        cores = usable_cores()
        if workers == "auto":
            pickle_env_fns(functions[:1], 0, import_main)
            probe = probe_env(
                functions[0],
                start_method=start_method,
                worker_env=worker_env,
                start_timeout=start_timeout,
                import_main=import_main,
            )
            nb_workers, self.worker_choice = choose_workers(nb, probe)
            logger.info("SubprocVecEnv: %s", self.worker_choice)
        elif workers is None:
            nb_workers = min(nb, cores)
            self.worker_choice = f"one worker per usable core, at most one per environment ({nb_workers})"
        else:
            nb_workers = min(nb, int(workers))
            self.worker_choice = f"as asked for, at most one per environment ({nb_workers})"
        # Worker floor(i * W / N) runs environment i.
        edges = [-(-w * nb // nb_workers) for w in range(nb_workers + 1)]
        bounds = list(zip(edges[:-1], edges[1:], strict=True))
        pickled = [pickle_env_fns(functions[low:high], low, import_main) for low, high in bounds]
        engine = ProcessEngine(
            bounds,
            pickled,
            mode,
            start_method,
            worker_environ(worker_env),
            on_worker_failure == "restart",
            max_restarts,
            start_timeout,
            spin_us * 1e-6,
            import_main,
        )
        try:
            made = engine.launch(engine.workers)
            engine.describe(
                [space for one in made for space in one["observation_spaces"]],
                [space for one in made for space in one["action_spaces"]],
                spaces,
                check_actions,
                clip_actions,
            )
            engine.share()
            super().__init__(
                engine,
                0,
                nb_workers,
                autoreset_mode=mode,
                copy=copy,
                on_bad_info=on_bad_info,
                timeout=step_timeout,
                metadata=made[0]["metadata"],
                render_mode=made[0]["render_mode"],
                spec=made[0]["spec"],
            )
        except BaseException:
            engine.close(1.0)
            raise
        self.start_method = start_method
        self.nb_workers = nb_workers
        # The exit hook below covers what is still open then; this covers what is forgotten before.
        weakref.finalize(self, engine.close, 1.0).atexit = False

    @property
    def worker_pids(self) -> list[int | None]:
        """The workers' process ids (None: ended)."""
        return [worker.process.pid if worker.process is not None else None for worker in self._engine.workers]  # type: ignore[attr-defined]
