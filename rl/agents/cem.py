"""The cross-entropy method: search for a policy's weights by the returns of whole episodes, without gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from rl import backend
from rl.agents.gradient import GradientAgent, states_of
from rl.agents.population import OLD, Population
from rl.agents.q_values import check_discrete
from rl.common.misc_util import tree_map
from rl.memory import EpisodeParameterMemory
from rl.networks import check_fit, check_output, feed
from rl.util import require


@keras.saving.register_keras_serializable(package="rl")
class CEMAgent(GradientAgent):
    """The cross-entropy method with decaying noise, on any number of lanes.

    Each episode is played by a member of a population, a policy whose weights are drawn from N(mu, diag(sigma^2)); it
    takes the action of its network's largest output. After a generation the members of the highest returns, the
    elite, give the next distribution (Szita and Lorincz 2006, doi:10.1162/neco.2006.18.12.2936, eq. 2 to 5):

        mu <- mean(elite),    sigma <- std(elite) + noise_ampl exp(-noise_decay_const step)

    Each lane plays a member of its own; one call evaluates the members of all lanes. mu starts at the network's weights
    and is what the network holds after each generation: `test` and `save_weights` use it, not a member.

    Differs from the paper in: the noise decays exponentially with the env steps and is added to the deviation, as in
    keras-rl, not to the variance. A generation ends when the members that were drawn for its first `train_interval`
    episodes have all been scored, so that long episodes are not left out; lanes that are free before play further
    members of the same distribution.

    Args:
        model: Keras network from states `(1, *obs)` or `(*obs)` to one number per action.
        nb_actions: Number of actions: the network's outputs.
        memory: An `EpisodeParameterMemory`, in which members and their returns are filed. Default: for 1000 episodes.
        batch_size: The elite's size is `elite_frac` of it.
        nb_steps_warmup: Env steps before the first generation may end.
        train_interval: Episodes per generation.
        elite_frac: See `batch_size`; an elite has at least two members.
        memory_interval: Has to be 1: every step counts for its episode's return.
        theta_init: `(2, P)`: mu and sigma to start with, for the network's P trainable weights. Default: the network's
            weights, and 1.
        noise_decay_const: Decay of the noise per env step.
        noise_ampl: The noise at env step 0.
        **kwargs: Passed to `Agent`.

    Raises:
        ValueError: An argument is out of range, or the network's output is not `(None, nb_actions)`.
    """

    measured = ("mean_best_reward",)

    def __init__(
        self,
        model: keras.Model,
        nb_actions: int,
        memory: Any = None,
        batch_size: int = 50,
        nb_steps_warmup: int = 1000,
        train_interval: int = 50,
        elite_frac: float = 0.05,
        memory_interval: int = 1,
        theta_init: Any = None,
        noise_decay_const: float = 0.0,
        noise_ampl: float = 0.0,
        **kwargs: Any,
    ):
        check_output(model, nb_actions, type(self).__name__)
        memory = EpisodeParameterMemory(1000) if memory is None else memory
        require("memory", memory, isinstance(memory, EpisodeParameterMemory), "an rl.memory.EpisodeParameterMemory")
        for name, value in (("batch_size", batch_size), ("train_interval", train_interval)):
            require(name, value, int(value) == value and value >= 2, "a whole number of at least 2")
        require("memory_interval", memory_interval, memory_interval == 1, "1: every step counts for the return")
        require("nb_steps_warmup", nb_steps_warmup, nb_steps_warmup >= 0, "at least 0")
        require("elite_frac", elite_frac, 0 < elite_frac <= 1, "above 0 and at most 1")
        require("noise_decay_const", noise_decay_const, noise_decay_const >= 0, "at least 0")
        require("noise_ampl", noise_ampl, noise_ampl >= 0, "at least 0")
        nb_best = int(batch_size * elite_frac)
        fits = 2 <= nb_best <= train_interval
        expected = f"such that the elite has 2 to train_interval={train_interval} of batch_size={batch_size} members"
        require("elite_frac", elite_frac, fits, expected)
        kwargs.setdefault("dtype", model.dtype_policy)
        super().__init__(**kwargs)
        self.nb_actions, self.memory, self.model = int(nb_actions), memory, model
        self.batch_size, self.nb_steps_warmup = int(batch_size), int(nb_steps_warmup)
        self.train_interval, self.elite_frac, self.memory_interval = int(train_interval), float(elite_frac), 1
        self.noise_decay_const, self.noise_ampl = float(noise_decay_const), float(noise_ampl)
        self.nb_best = nb_best
        self.population = Population()
        own = self.get_weights_flat([ops.convert_to_numpy(v) for v in model.trainable_variables])
        self.theta_init = theta_init
        theta = np.stack([own, np.ones_like(own)]) if theta_init is None else np.array(theta_init, np.float32)
        expected = f"(2, {own.size}): mu and sigma of the network's trainable weights"
        require("theta_init", theta.shape, theta.shape == (2, own.size), expected)
        self.update_theta(theta)

    # ---- the search distribution ------------------------------------------------------------------------------

    @property
    def theta(self) -> np.ndarray:
        """`(2, P)` float32: mu and sigma."""
        return self.population.theta

    @property
    def best_seen(self) -> tuple[float, np.ndarray | None]:
        """The highest return of an episode so far, and the weights `(P,)` of its member."""
        return self.population.best_seen

    def update_theta(self, theta: np.ndarray) -> None:
        """Sets mu and sigma, `(2, P)`, and gives the network mu for its weights."""
        self.population.theta = np.array(theta, np.float32)
        for variable, value in zip(
            self.model.trainable_variables, self.get_weights_list(self.population.theta[0]), strict=True
        ):
            variable.assign(value)

    def get_weights_flat(self, weights: Sequence[Any]) -> np.ndarray:
        """The trainable weights as one vector `(P,)`, float32."""
        return np.concatenate([np.ravel(np.asarray(w, np.float32)) for w in weights])

    def get_weights_list(self, weights_flat: Any) -> list[Any]:
        """A vector `(P,)`, or a tensor of it, as arrays of the shapes of the trainable weights."""
        parts, start = [], 0
        for variable in self.model.trainable_variables:
            size = int(np.prod(variable.shape))
            part = weights_flat[start : start + size]
            plain = isinstance(part, np.ndarray)
            parts.append(part.reshape(variable.shape) if plain else ops.reshape(part, variable.shape))
            start += size
        return parts

    def choose_weights(self, lanes: Sequence[int] | None = None) -> None:
        """Draws new members for some lanes, by default for all."""
        self.population.draw(range(len(self.population.members)) if lanes is None else lanes)

    # ---- acting -------------------------------------------------------------------------------------------------

    def compile(self, jit_compile: bool | str = "auto", run_eagerly: bool = False) -> None:  # type: ignore[override]
        """Configures the agent; there is no gradient, so there is neither an optimizer nor a metric to give.

        Args:
            jit_compile: As in `GradientAgent.compile`.
            run_eagerly: The same.
        """
        super().compile(None, None, jit_compile, 1, run_eagerly)

    def learners(self) -> dict[str, list[Any]]:
        """Nothing: see `GradientAgent.learners`."""
        return {}

    def get_compile_config(self) -> dict[str, Any] | None:
        """See `SavedAgent.get_compile_config`."""
        return {"jit_compile": self._jit_compile_given} if self.compiled else None

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """See `SavedAgent.compile_from_config`."""
        self.compile(**config)

    @property
    def metrics_names(self) -> list[str]:
        """`mean_best_reward`, the elite's mean return, and what the processor logs."""
        return [*self.measured, *[name for source in self._loggers() for name in source.metrics_names]]

    def prepare(self, driver: Any, observation: Any) -> None:
        """Checks that env and network fit, and makes the compiled functions; see `Agent.prepare`."""
        check_discrete(type(self).__name__, self.nb_actions, driver.action_space, self.processor)
        check_fit(self.model, self._example_states(observation, 1), self.nb_actions, type(self).__name__)
        self._make_functions()

    def open_lanes(self, nb_lanes: int) -> None:
        """Draws a member for each lane; the unfinished episodes of the old ones are not scored."""
        if self.training:
            self.population.open(nb_lanes)
            self.choose_weights()

    def random_streams(self) -> list[Any]:
        """The stream that the members are drawn from; see `Agent.random_streams`."""
        return [self.population]

    def _functions_to_compile(self) -> list[Callable]:
        return [self.call, self._members_outputs]

    def _members_outputs(self, members: Any, states: Any) -> Any:
        """Compiled: the outputs `(N, nb_actions)` of N members `(N, P)`, of the n-th one for the n-th state."""
        fixed = [v.value for v in self.model.non_trainable_variables]

        def one(row: tuple[Any, Any]) -> Any:
            weights, state = row
            state = feed(self.model, tree_map(lambda x: x[None], state))
            outputs, _ = self.model.stateless_call(self.get_weights_list(weights), fixed, state, training=False)
            return ops.cast(outputs[0], "float32")

        return backend.vectorize(one, (members, states))

    def act(self, observation: Any) -> np.ndarray:
        """The action of the largest output: of each lane's member in `fit`, of the mean policy in `test`."""
        states = states_of(observation)
        if not self.training:
            return self.evaluate(states).argmax(axis=-1)
        return self._functions[1](self.population.members, self._processed(states)).argmax(axis=-1)

    # ---- learning -----------------------------------------------------------------------------------------------

    def observe(self, transition: Any) -> np.ndarray | None:
        """Adds rewards to returns, files episodes that ended, and ends the generation; see `Agent.observe`."""
        if not self.training:
            return None
        p = self.population
        p.returns += transition.reward
        ended = np.flatnonzero(transition.terminated | transition.truncated).tolist()
        for lane in ended:
            if transition.valid[lane]:  # not where the env was lost
                self.memory.intermediate_rewards = [float(p.returns[lane])]
                self.memory.finalize_episode(p.score(lane))
            p.numbers[lane] = OLD
        if not ended:
            return None
        complete = p.is_complete(self.train_interval, self.nb_best)
        metrics = self._end_generation() if complete and self.step > self.nb_steps_warmup else None
        self.choose_weights(ended)
        return metrics

    def _end_generation(self) -> np.ndarray:
        best = self.population.end_generation(self.nb_best)
        elite = np.stack([member for _, member in best])
        noise = self.noise_ampl * np.exp(-self.noise_decay_const * self.step)
        self.update_theta(np.stack([elite.mean(axis=0), elite.std(axis=0) + noise]))
        self.run_state.nb_updates += 1
        return self._with_logged(np.array([np.mean([score for score, _ in best])]))

    # ---- files --------------------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """See `SavedAgent.save_own_variables`; a generation that is not complete is not saved."""
        super().save_own_variables(store)
        store["theta"] = self.theta

    def load_own_variables(self, store: Any) -> None:
        """See `SavedAgent.load_own_variables`."""
        super().load_own_variables(store)
        self.population.theta = np.array(store["theta"], np.float32)

    def load_weights(self, filepath: Any) -> None:
        """Reads a weights file into the network, and starts the search there; see `Agent.load_weights`."""
        super().load_weights(filepath)
        own = self.get_weights_flat([ops.convert_to_numpy(v) for v in self.model.trainable_variables])
        self.population.theta[0] = own
