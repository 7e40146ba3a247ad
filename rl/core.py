"""The agent, and what stands between it and an env: `Agent`, `Processor`, `Env`, `Space`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np

from rl.legacy import ForwardBackward, check_lanes, run_agent
from rl.loop import Lanes, RunState
from rl.saving import SavedAgent


@keras.saving.register_keras_serializable(package="rl")
class Processor:
    """Stands between agent and env and changes what passes: observations, rewards, infos, actions, batches.

    Override what you need; everything is the identity. On several lanes the methods are called lane by lane on the
    one processor, so what it learns (statistics) is shared, and what it remembers must not depend on the lane.

    Attributes:
        training: False while `test` runs: a processor that gathers statistics must leave them alone then.
    """

    training = True

    def process_step(self, observation: Any, reward: float, done: bool, info: dict) -> tuple[Any, float, bool, dict]:
        """Processes what one env step returned, by default through the three methods below."""
        return (
            self.process_observation(observation),
            self.process_reward(reward),
            done,
            self.process_info(info),
        )

    def process_observation(self, observation: Any) -> Any:
        """Processes one observation before the agent sees and stores it."""
        return observation

    def process_reward(self, reward: float) -> float:
        """Processes one reward before the agent sees and stores it."""
        return reward

    def process_info(self, info: dict) -> dict:
        """Processes the info of one step before callbacks see it."""
        return info

    def process_action(self, action: Any) -> Any:
        """Processes one action of the agent before the env sees it."""
        return action

    def process_state_batch(self, batch: Any) -> Any:
        """Processes a batch of states, `(B, W, *obs)`, before the network sees it, in acting and in training.

        Axes after the first one may be rearranged; a list holds one batch per input of the network.
        """
        return batch

    @property
    def metrics(self) -> list[float]:
        """Values that are logged beside the agent's metrics."""
        return []

    @property
    def metrics_names(self) -> list[str]:
        """Their names, in the same order."""
        return []

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Processor:
        """The processor that `get_config` described."""
        return cls(**config)


# Who stepped an env last, by the env's id: only that driver knows of the open episodes. A driver keeps its env alive.
_drivers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class Agent(ForwardBackward, SavedAgent, keras.Model):
    """An agent: a Keras model whose output is its policy network's, with `fit` on an env instead of on data.

    A subclass implements `act` and `observe` for N lanes; `fit` and `test` do the rest. Counters are lifetime
    counters: a second `fit` goes on where the first one stopped, in the open episode if the env is the same.

    Args:
        processor: A `Processor`, or None.
        **kwargs: Passed to `keras.Model` (`name`, `dtype`).

    Raises:
        ValueError: The processor is none, for instance a class.
    """

    can_overlap = False  # whether `learn` is implemented
    # There before `compile`, for callbacks and for subclasses that never call ours.
    optimizer: Any = None
    stop_training = False

    def __init__(self, processor: Processor | None = None, **kwargs: Any):
        if processor is not None and not isinstance(processor, Processor):
            raise ValueError(f"processor must be an instance of rl.core.Processor, got {processor!r}")
        super().__init__(**kwargs)
        self.processor = processor
        self.run_state = RunState()
        self._lanes: Any = None
        self._running: Any = None
        self._driver_options: Any = None
        self.built = True  # its networks are; otherwise Keras refuses to save weights

    # ---- what an algorithm implements -------------------------------------------------------------------------

    def act(self, observation: Any) -> np.ndarray:
        """Chooses actions.

        Args:
            observation: `(N, *obs)`, or a tree of those.

        Returns:
            `(N,)` indices of discrete actions, or `(N, A)` float32.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement act(observation) for N lanes")

    def observe(self, transition: Any) -> np.ndarray | None:
        """Takes in the rows of one vector step, and learns.

        Args:
            transition: A `rl.driver.Transition`. `self.step` counts its valid rows already.

        Returns:
            One value per `metrics_names`: means over the updates of this call, or None without an update.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement observe(transition) for N lanes")

    def learn(self) -> np.ndarray | None:
        """Learns from what `observe` has stored; called while the env steps, in `fit(overlap=True)`.

        Returns:
            As `observe`, which only stores then.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement learn(), since can_overlap is True")

    def prepare(self, driver: Any, observation: Any) -> None:
        """Called by `fit` and `test` before the first action; raises where agent and env do not fit together.

        Args:
            driver: The `EnvDriver`: `nb_lanes`, `observation_space`, `action_space`.
            observation: The first observations, `(N, *obs)`.
        """

    def open_lanes(self, nb_lanes: int) -> None:
        """Called when all lanes start new episodes: what was remembered of open ones is to be closed."""

    def random_streams(self) -> list[Any]:
        """The objects with a `rng` (a `RandomStream`) that draw for this agent."""
        return []

    @property
    def metrics_names(self) -> list[str]:
        """Names of the values that `observe` returns."""
        return []

    @property
    def metrics(self) -> list[Any]:
        """No Keras metric is exposed: logs carry values by `metrics_names`."""
        return []

    @metrics.setter
    def metrics(self, value: Any) -> None:
        if value:
            raise AttributeError(f"metrics are set by compile(metrics=[...]), got {value!r} assigned")

    # ---- counters -----------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Env steps taken in `fit` so far, summed over lanes and over the agent's life."""
        return self.run_state.step

    @step.setter
    def step(self, value: int) -> None:
        self.run_state.requested += int(value) - self.run_state.step
        self.run_state.step = int(value)

    @property
    def training(self) -> bool:
        """True in `fit`, False in `test`."""
        return self.run_state.training

    @training.setter
    def training(self, value: bool) -> None:
        self.run_state.training = bool(value)

    def seed(self, seed: int) -> None:
        """Seeds every random stream of the agent: policies, memory, and the layers' (dropout, noise)."""
        streams = self.random_streams()
        layer_seeds = [v for v in self.variables if v.name == "seed_generator_state"]
        children = np.random.SeedSequence(int(seed)).spawn(len(streams) + len(layer_seeds))
        for stream, child in zip(streams, children, strict=False):
            stream.rng = np.random.default_rng(child)
        for variable, child in zip(layer_seeds, children[len(streams) :], strict=True):
            variable.assign(child.generate_state(2))

    # ---- fit and test -------------------------------------------------------------------------------------------

    def fit(
        self,
        env: Any,
        nb_steps: float | None = None,
        action_repetition: int = 1,
        callbacks: Sequence[Any] | None = None,
        verbose: int = 1,
        visualize: bool = False,
        nb_max_start_steps: int = 0,
        start_step_policy: Callable[[Any], Any] | None = None,
        log_interval: int = 10000,
        nb_max_episode_steps: int | None = None,
        *,
        nb_episodes: int | None = None,
        seed: int | None = None,
        overlap: bool = False,
    ) -> keras.callbacks.History:
        """Trains the agent on an env.

        Args:
            env: A Gymnasium env, a `VecEnv`, a `gymnasium.vector.VectorEnv`, or an env of the old four-value API.
            nb_steps: Env steps to take, summed over lanes. The last vector step may overshoot by less than the number
                of lanes; a further `fit` on the same env takes that many fewer.
            action_repetition: How many env steps one action is repeated for (a single env only).
            callbacks: `rl.callbacks.Callback`s and Keras callbacks.
            verbose: 0 silent, 1 a progress bar per `log_interval`, 2 a line per episode.
            visualize: Render the env after each action.
            nb_max_start_steps: Each episode starts with a random number of steps below this, which are not recorded.
            start_step_policy: Chooses the actions of those steps: `observation -> action`. Default: uniformly random.
            log_interval: Env steps per progress bar.
            nb_max_episode_steps: Truncate episodes at this length.
            nb_episodes: Stop after this many finished episodes (several lanes may finish in the same step). With
                `nb_steps`, the first limit reached decides.
            seed: Seeds the env and every random stream of the agent, and starts new episodes. Without it a further
                `fit` goes on with the open episodes, where no other `fit` or `test` has used this env meanwhile.
            overlap: Take the gradient steps that are due while the workers of a vector env step, instead of between two
                steps. An action is chosen before the gradient steps for the step before it, otherwise after; the
                numbers of both stay the same.

        Returns:
            The Keras `History`: one entry per finished episode, `episode_reward` among them.

        Raises:
            RuntimeError: The agent is not compiled, or a `fit` or `test` of it is running.
            ValueError: An argument, the env's spaces or the network do not fit.
            FloatingPointError: The loss became NaN or infinite. The weights are the last good ones.
        """
        nb_steps = _count("nb_steps", nb_steps)
        nb_episodes = _count("nb_episodes", nb_episodes)
        if nb_steps is None and nb_episodes is None:
            raise ValueError("fit() needs a limit: give nb_steps (env steps) or nb_episodes")
        self._check_compiled("fit")
        if overlap and not self.can_overlap:
            raise ValueError(f"{type(self).__name__} cannot learn while the env steps: leave out overlap=True")
        if self._running is not None:
            raise RuntimeError("fit() was called inside fit() or test(), by a callback or another thread")
        from rl.callbacks import TrainEpisodeLogger, TrainIntervalLogger, Visualizer

        options = (action_repetition, nb_max_episode_steps, nb_max_start_steps, start_step_policy)
        own: list[Any] = []
        if verbose == 1:
            own.append(TrainIntervalLogger(interval=log_interval))
        elif verbose > 1:
            own.append(TrainEpisodeLogger())
        if visualize:
            own.append(Visualizer())
        params = {"nb_steps": nb_steps, "nb_episodes": nb_episodes, "verbose": verbose}
        state = self.run_state
        state.training, self.stop_training = True, False
        try:
            if seed is not None:
                self.seed(seed)  # before lanes are opened, for which an agent may draw
            lanes = self._lanes_for(env, options, seed)
            state.overlap, state.learnt = overlap, state.step
            if overlap and not lanes.driver.is_vector:
                raise ValueError(
                    "overlap=True needs a vector env, whose workers step meanwhile (make_gym_env makes one)"
                )
            stop_step = None
            if nb_steps is not None:
                stop_step = state.requested = state.requested + nb_steps
            history = self._run(lanes, [own, callbacks or []], params, stop_step=stop_step, nb_episodes=nb_episodes)
        except BaseException:
            self._lanes = None  # the env may be in the middle of a step
            raise
        finally:
            state.training = state.overlap = False
            # A next fit owes only what the last vector step took too much, not what a stop left undone.
            state.requested = state.step if nb_steps is None else min(state.step, state.requested)
        return history

    def test(
        self,
        env: Any,
        nb_episodes: int = 1,
        action_repetition: int = 1,
        callbacks: Sequence[Any] | None = None,
        visualize: bool = True,
        nb_max_episode_steps: int | None = None,
        nb_max_start_steps: int = 0,
        start_step_policy: Callable[[Any], Any] | None = None,
        verbose: int = 1,
        *,
        seed: int | None = None,
    ) -> keras.callbacks.History:
        """Plays episodes without learning; nothing of the training changes: no counter, statistic or random stream.

        On N lanes the episodes are dealt out in advance, `divmod(nb_episodes, N)`, so that short episodes do not
        count more often than long ones. A test on the training env makes the next `fit` start new episodes. A callback
        may test during `fit`: on another env at any time, on the training env where no episode is open.

        Args:
            env: As in `fit`.
            nb_episodes: How many episodes to play.
            action_repetition: As in `fit`.
            callbacks: As in `fit`; `on_train_begin` and `on_train_end` are called, as in keras-rl.
            visualize: Render after each action; an env without a `render_mode` is left unrendered with one warning.
            nb_max_episode_steps: As in `fit`.
            nb_max_start_steps: As in `fit`.
            start_step_policy: As in `fit`.
            verbose: 0 silent, else a line per episode.
            seed: Seeds the env.

        Returns:
            The Keras `History` with `episode_reward` and `nb_steps` (of the episode), one entry per episode.

        Raises:
            RuntimeError: The agent is not compiled, or its running `fit` or `test` is amid an episode in this very env.
            ValueError: An argument, the env's spaces or the network do not fit.
        """
        nb_episodes = _count("nb_episodes", nb_episodes) or 1
        self._check_compiled("test")
        from rl.callbacks import TestLogger, Visualizer
        from rl.common.vec_env.wrappers import frozen_statistics

        options = (action_repetition, nb_max_episode_steps, nb_max_start_steps, start_step_policy)
        own: list[Any] = [TestLogger()] if verbose >= 1 else []
        if visualize:
            own.append(Visualizer())
        params = {"nb_episodes": nb_episodes, "verbose": verbose}
        training_state, stop_training = self.run_state, self.stop_training
        processor = self.processor or Processor()
        learns = processor.training
        streams = [(s, s.get_random_state()) for s in self.random_streams()]
        outer = self._running if self._running is not None and self._running.driver.env is env else None
        if outer is not None and outer.open.any():
            raise RuntimeError("test() was called by a callback amid an episode of this env: give it another env")
        self.run_state = RunState(training=False)
        self.run_state.step = training_state.step  # schedules read it
        self.stop_training = False
        try:
            processor.training = False
            with frozen_statistics(env):
                lanes = self._new_lanes(env, options, seed)
            each, more = divmod(nb_episodes, lanes.driver.nb_lanes)
            quota = np.full(lanes.driver.nb_lanes, each)
            quota[:more] += 1
            with frozen_statistics(env):
                return self._run(lanes, [own, callbacks or []], params, quota=quota)
        finally:
            self.run_state = training_state
            self.stop_training = stop_training
            processor.training = learns
            for stream, snapshot in streams:
                stream.set_random_state(snapshot)
            if outer is not None:
                _drivers[id(env)] = outer.driver
                outer.driver.reset()

    def _run(self, lanes: Lanes, callbacks: list[Any], params: dict[str, Any], **limits: Any) -> Any:
        from rl.callbacks import CallbackList

        params |= {"nb_lanes": lanes.driver.nb_lanes, "metrics": list(self.metrics_names)}
        lanes.follow(params["metrics"], self.run_state)
        first_epoch = self.run_state.finished  # Keras' epoch goes on where the last fit stopped
        hooks = CallbackList(callbacks, model=self, env=lanes.driver.env, params=params, first_epoch=first_epoch)
        did_abort, outer, self._running = True, self._running, lanes
        begin, end = self._on_test_begin, self._on_test_end
        if self.training:
            begin, end = self._on_train_begin, self._on_train_end
        try:
            begin()
            hooks.on_train_begin({})
            did_abort = run_agent(self, lanes, hooks, **limits)
            if self.run_state.overlap:
                self.learn()  # from the last step
        except KeyboardInterrupt:
            self._lanes = None
        finally:
            self._running = outer
            hooks.on_train_end({"did_abort": did_abort})
            end()
        return hooks.history

    def _lanes_for(self, env: Any, options: tuple, seed: int | None) -> Lanes:
        """The lanes of the last `fit`, if it was on this env and nothing asks for new episodes, else new ones."""
        lanes = self._lanes
        same = lanes is not None and lanes.driver.processor is self.processor and lanes.driver is _drivers.get(id(env))
        same = same and getattr(env, "closed", False) is not True  # a new driver says what is wrong with it
        if same and seed is None and self._driver_options == options:
            self.prepare(lanes.driver, lanes.driver.observe())
            return lanes
        lanes = self._new_lanes(env, options, seed)
        self._lanes, self._driver_options = lanes, options
        self.run_state.requested = self.run_state.step
        return lanes

    def _new_lanes(self, env: Any, options: tuple, seed: int | None) -> Lanes:
        from rl.driver import EnvDriver

        repetition, longest, start_steps, start_policy = options
        driver = EnvDriver(env, self.processor, repetition, longest, start_steps, start_policy)
        check_lanes(self, driver)
        _drivers[id(env)] = driver
        self.prepare(driver, driver.reset(seed=seed))
        self.open_lanes(driver.nb_lanes)
        self.run_state.hand = None
        return Lanes(driver)

    def _check_compiled(self, method: str) -> None:
        if not self.compiled:
            raise RuntimeError(
                f"{type(self).__name__}.{method}() was called before compile(); call "
                "agent.compile(optimizer='adam') first"
            )


def _count(name: str, value: float | None) -> int | None:
    """A count given as an integer, or as a float like 5e4."""
    if value is None:
        return None
    if not isinstance(value, Real) or isinstance(value, bool) or not float(value).is_integer() or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
    return int(value)


def __getattr__(name: str) -> Any:
    """The callbacks, which old scripts import from here as well."""
    import rl.callbacks

    if name in rl.callbacks.__all__:
        return getattr(rl.callbacks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class Env:
    """The old env API of keras-rl, for type hints and as a base of old envs: `reset()` -> observation.

    `step(action)` returns `(observation, reward, done, info)`. Agents accept such envs beside Gymnasium's.
    """

    reward_range = (-np.inf, np.inf)
    action_space: Any = None
    observation_space: Any = None

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        """Plays one step: `(observation, reward, done, info)`."""
        raise NotImplementedError(f"{type(self).__name__} must implement step(action)")

    def reset(self) -> Any:
        """Starts an episode and returns its first observation."""
        raise NotImplementedError(f"{type(self).__name__} must implement reset()")

    def render(self, mode: str = "human", close: bool = False) -> Any:
        """Shows the env."""
        raise NotImplementedError(f"{type(self).__name__} must implement render()")

    def close(self) -> None:
        """Releases what the env holds."""

    def seed(self, seed: int | None = None) -> list[int | None]:
        """Seeds the env's generators and returns the seeds used."""
        raise NotImplementedError(f"{type(self).__name__} must implement seed()")

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Takes run-time configuration."""
        raise NotImplementedError(f"{type(self).__name__} must implement configure()")


class Space:
    """A set of actions or observations, as keras-rl described it; Gymnasium's spaces serve as well."""

    def sample(self, seed: int | None = None) -> Any:
        """Draws a random element."""
        raise NotImplementedError(f"{type(self).__name__} must implement sample()")

    def contains(self, x: Any) -> bool:
        """Whether `x` is an element."""
        raise NotImplementedError(f"{type(self).__name__} must implement contains()")
