"""`GradientAgent`: what agents share that learn by gradient steps, several of them in one compiled call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import ops

from rl import backend
from rl.common.misc_util import tree_leaves, tree_map
from rl.core import Agent
from rl.frames import as_frames
from rl.networks import feed, has_convolutions
from rl.util import clone_optimizer, get_metrics, get_optimizer, require


class GradientAgent(Agent):
    """An agent with a network, a loss, an optimizer and compiled functions; it does not know where batches come from.

    A subclass sets `self.model` and implements `loss_fn`, which `train_step` minimises. `ReplayAgent` draws batches
    from a memory, `RolloutAgent` makes them of the latest steps. Where several networks learn by losses and optimizers
    of their own, `learners` names them, and `train_step` calls `descend` for each.

    Args:
        **kwargs: Passed to `Agent`.
    """

    logged: tuple[str, ...] = ()  # names of what `loss_fn` logs beside the loss
    measured: tuple[str, ...] = ()  # names of what is logged once per compiled call, not per gradient step
    loss_learner = "model"  # which of the learners `loss_fn` teaches

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._functions: Any = None

    # ---- what an algorithm implements -------------------------------------------------------------------------

    def loss_fn(self, batch: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """The loss of a batch of tensors.

        Returns:
            `(loss, target, prediction, logs)`: a float32 scalar; what user metrics compare, each `(B,)`; one scalar
            per name in `logged`.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement loss_fn(batch)")

    def train_step(self, batch: Any) -> dict[str, Any]:
        """One gradient step on `loss_fn`; compiled. Returns `loss` and the names in `logged`."""
        return self.gradient_step(batch)

    def learners(self) -> dict[str, list[Any]]:
        """What learns with an optimizer of its own, by name: lists of networks. `optimizer` is the first one's.

        The loss of each is logged: that of `loss_learner` as `loss`, others as `<name>_loss`. Where nothing learns by
        gradients there is no optimizer.
        """
        return {"model": [self.model]}

    def gradient_step(self, batch: Any, weight: Any = None, max_norm: float | None = None) -> dict[str, Any]:
        """Minimises `loss_fn` by one step; see `descend`."""
        return self.descend(self.loss_learner, lambda: self.loss_fn(batch), weight, max_norm)

    def descend(
        self, learner: str, loss_fn: Callable, weight: Any = None, max_norm: float | None = None
    ) -> dict[str, Any]:
        """Minimises a loss and the layers' regularisers by one step, and updates the user's metrics; compiled.

        Args:
            learner: Which of `learners` takes the step; all others stay as they are.
            loss_fn: Gives what the method `loss_fn` does.
            weight: `(B,)` weights of the rows in the metrics. Default: all the same.
            max_norm: Scale the gradient down to this global norm where it is longer. Default: never.

        Returns:
            `loss`, NaN where the step was left out since it was not finite, and what `loss_fn` logs.
        """
        networks = self.learners()[learner]

        def penalised() -> tuple[Any, tuple]:
            loss, target, prediction, logs = loss_fn()
            for penalty in [x for network in networks for x in network.losses]:  # the layers' regularisers
                loss += ops.cast(penalty, "float32")
            return loss, (target, prediction, logs)

        learnt = [v for network in networks for v in network.trainable_variables]
        others = [v for network in networks for v in network.non_trainable_variables]
        optimizer = self.optimizers[learner]
        if optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__} has no optimizer: its compile() has to call super().compile(optimizer), or its "
                "backward() has to learn by itself"
            )
        loss, (target, prediction, logs) = backend.minimize(penalised, learnt, optimizer, others, max_norm)
        for metric in self._metrics_of(learner):
            if weight is None:
                metric.update_state(target, prediction)
            else:  # Keras takes the mean over the last axis before it weighs the rows
                metric.update_state(target[:, None], prediction[:, None], sample_weight=weight)
        return {"loss": loss, **logs}

    def gradient_steps(self, n: Any, kmax: int, batch_at: Callable[[Any], Any], stops: Any = None) -> tuple[Any, Any]:
        """Takes gradient steps in one compiled loop; called while compiling.

        Args:
            n: Number of steps, an int32 scalar known only at run time.
            kmax: Its upper bound, known when compiled.
            batch_at: Maps a step's index to its batch.
            stops: Maps a step's logs to whether it is the last one, or None: all n are taken.

        Returns:
            `(metrics, taken)`: means over the steps, in the order of `metrics_names`; their number, float32. A value
            other than the loss that is NaN says nothing, as of a network whose turn it was not, and is left out.
        """
        for metric in self._compiled_metrics:
            metric.reset_state()
        names = ("loss", *self.logged)

        def step(i: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            logs = self.train_step(batch_at(i))
            values = ops.stack([ops.cast(logs[name], "float32") for name in names])
            counts = ops.logical_or(is_loss, ops.logical_not(ops.isnan(values)))
            values = ops.stack([ops.where(counts, values, 0.0), ops.cast(counts, "float32")])
            return carry[0] + values, carry[1] if stops is None else stops(logs)

        is_loss = np.arange(len(names)) == 0
        start = (ops.zeros((2, len(names))), ops.zeros((), dtype="bool"))
        go_on = None if stops is None else lambda carry: ops.logical_not(carry[1])
        sums, _ = backend.repeat(n, kmax, step, start, go_on)
        means, taken = sums[0] / sums[1], sums[1, 0]
        results = [ops.cast(m.result(), "float32") for m in self._compiled_metrics]
        for i, learner in enumerate(self._metrics_taught):  # a metric without an update would say 0
            if learner != self.loss_learner:
                mean = means[names.index(f"{learner}_loss")]
                results[i] = ops.where(ops.isnan(mean), float("nan"), results[i])
        return ops.concatenate([means[:1], ops.stack(results), means[1:]]) if results else means, taken

    def call(self, states: Any, training: bool = False) -> Any:
        """The policy network's output for states `(B, W, *obs)`, in float32."""
        return ops.cast(self.model(feed(self.model, states), training=training), "float32")

    def evaluate(self, states: Any) -> Any:
        """The policy network's outputs, `(B, ...)` float32, for states `(B, W, *obs)`, compiled."""
        self._make_functions()
        return self._functions[0](self._processed(states))

    # ---- set-up -------------------------------------------------------------------------------------------------

    def default_optimizer(self) -> keras.optimizers.Optimizer:
        """What `compile` takes where no optimizer is given."""
        return keras.optimizers.Adam()

    def compile(
        self,
        optimizer: Any = None,
        metrics: list[Any] | None = None,
        jit_compile: bool | str = "auto",
        steps_per_execution: int = 1,
        run_eagerly: bool = False,
    ) -> None:
        """Configures the agent for training.

        Args:
            optimizer: A Keras optimizer or its name; None: `default_optimizer()`. Under `mixed_float16` it is wrapped
                in a `LossScaleOptimizer`. Of an agent with several `learners` a list of one for each, in their order;
                one alone is cloned for the others.
            metrics: Keras metrics, their names or functions; they compare the target of the value with its prediction.
                Functions that the agent logs anyway (keras-rl's `mean_q`) are left out. Of an agent with several
                `learners` also a list of a list for each.
            jit_compile: Compile with XLA. "auto": on CPUs too, where small networks gain several times, but not for
                convolutions on a CPU, which take ten times as long with several gradient steps per call. A layer that
                XLA refuses makes it fall back to a plain graph with one warning.
            steps_per_execution: Collect this many gradient steps before taking them, in one compiled call.
            run_eagerly: Compile nothing, for debugging.

        Raises:
            TypeError: The optimizer is none of Keras'.
            ValueError: Two metrics have the same name, or `steps_per_execution` is out of range.
        """
        whole = int(steps_per_execution) == steps_per_execution >= 1
        require("steps_per_execution", steps_per_execution, whole, "a whole number of at least 1")
        require("jit_compile", jit_compile, jit_compile in (True, False, "auto"), "True, False or 'auto'")
        learners = self.learners()
        networks = [self.model, *[network for group in learners.values() for network in group]]
        convolutions = any(has_convolutions(network) for network in networks)
        slow_with_xla = jit_compile == "auto" and backend.on_cpu(self.model.variables) and convolutions
        self._jit_compile_given = jit_compile
        with backend.device_scope(self.model.variables):
            # One that is made here gets its variables on the device.
            first, *more = self._get_optimizers(optimizer)
            resolved = self._get_metrics(metrics or [])
            super().compile(
                optimizer=first,
                jit_compile=bool(jit_compile) and not slow_with_xla and not run_eagerly,
                run_eagerly=run_eagerly,
                steps_per_execution=steps_per_execution,
            )
            scaled = keras.optimizers.LossScaleOptimizer
            if isinstance(self.optimizer, scaled):
                more = [x if isinstance(x, scaled) else scaled(x) for x in more]
            for name, x in zip(learners, [self.optimizer, *more], strict=bool(learners)):
                x.build([v for network in learners[name] for v in network.trainable_variables])
                if more:
                    setattr(self, f"{name}_optimizer", x)  # where Keras finds it when it saves the agent
        # Held in an object that Keras does not look into: once a model was called, it refuses new state.
        self._compiled_metrics = Untracked([metric for metrics in resolved.values() for metric in metrics])
        self._metrics_taught = Untracked([name for name, metrics in resolved.items() for _ in metrics])
        self._functions = None
        for stream in self.random_streams():  # seeded now, so that a test before the first fit changes nothing
            stream.get_random_state()

    @property
    def optimizers(self) -> dict[str, keras.optimizers.Optimizer]:
        """The optimizer of each of `learners`; there are some once the agent is compiled."""
        kept = ["optimizer", *[f"{name}_optimizer" for name in list(self.learners())[1:]]]
        return {name: getattr(self, attribute, None) for name, attribute in zip(self.learners(), kept, strict=False)}

    def _metrics_of(self, learner: str) -> list[keras.metrics.Metric]:
        return [m for m, name in zip(self._compiled_metrics, self._metrics_taught, strict=True) if name == learner]

    def _compiled_with(self) -> tuple[Any, Any]:
        names = list(self.learners())
        if len(names) == 1:
            return super()._compiled_with()
        return list(self.optimizers.values()), [self._metrics_of(name) for name in names]

    def _get_optimizers(self, given: Any) -> list[Any]:
        names = list(self.learners())
        if not names:
            return [None]
        if not isinstance(given, (list, tuple)):
            first = get_optimizer(self.default_optimizer() if given is None else given)
            return [first, *[clone_optimizer(first) for _ in names[1:]]]
        expected = f"one optimizer, or a list of {len(names)}: {names}" if len(names) > 1 else "one optimizer"
        require("optimizer", given, len(given) == len(names) > 1, expected)
        optimizers = [get_optimizer(x) for x in given]
        again = [any(x is y for y in optimizers[:i]) for i, x in enumerate(optimizers)]
        return [clone_optimizer(x) if known else x for x, known in zip(optimizers, again, strict=True)]

    def _get_metrics(self, given: list[Any]) -> dict[str, list[keras.metrics.Metric]]:
        names = list(self.learners())
        lists = [m for m in given if isinstance(m, (list, tuple))]
        expected = f"a list of metrics, or of {len(names)} such lists: {names}" if len(names) > 1 else "a list"
        require("metrics", given, not lists or len(lists) == len(given) == len(names) > 1, expected)
        parts = dict(zip(names, lists, strict=True)) if lists else {self.loss_learner: given}
        # First those of the loss, under their own names, then the others'.
        resolved = {self.loss_learner: get_metrics(parts[self.loss_learner], (*self.logged, *self.measured))}
        for name in names:
            if name != self.loss_learner:
                resolved[name] = get_metrics(parts.get(name, ()), (*self.logged, *self.measured))
                for metric in resolved[name]:
                    metric.name = f"{name}_{metric.name.removeprefix(f'{name}_')}"
        return resolved

    @property
    def metrics_names(self) -> list[str]:
        """`loss`, the metrics given to `compile`, what the algorithm logs, the policy's and the processor's."""
        names = ["loss", *[m.name for m in self._compiled_metrics], *self.logged, *self.measured]
        return names + [name for source in self._loggers() for name in source.metrics_names]

    def _loggers(self) -> list[Any]:
        return [x for x in (getattr(self, "policy", None), self.processor) if x is not None]

    def _with_logged(self, metrics: np.ndarray) -> np.ndarray:
        """Metrics of a call, and what policy and processor log beside them."""
        extra = [value for source in self._loggers() for value in source.metrics]
        return np.concatenate([metrics, extra]) if extra else metrics

    def check_spaces(self, observation_space: Any, action_space: Any) -> None:
        """Raises `ValueError` where the algorithm cannot work with an env's spaces."""

    def _make_functions(self) -> None:
        """Makes the compiled functions unless there are some."""
        if self._functions is None:
            self._check_compiled("evaluate")
            state, functions = list(self.variables), self._functions_to_compile()
            optimizers = [x for x in self.optimizers.values() if x is not None]  # a subclass may learn without one
            state += [v for optimizer in optimizers for v in optimizer.variables]
            state += [v for metric in self._compiled_metrics for v in metric.variables]
            first = backend.compile_function(functions[0], state, self.jit_compile, self.run_eagerly)
            more = [backend.compile_function(f, state, run_eagerly=self.run_eagerly, like=first) for f in functions[1:]]
            self._functions = Untracked([first, *more])

    def _functions_to_compile(self) -> list[Callable]:
        """The functions of tensors to compile: `call` first, then what else the agent needs."""
        raise NotImplementedError(f"{type(self).__name__} must implement _functions_to_compile()")

    def _example_states(self, observation: Any, window_length: int) -> Any:
        """States as the network will be given them, made of a first observation, for checks of shapes."""
        states = tree_map(lambda x: np.repeat(x[:, None], window_length, axis=1), observation)
        return self._processed(states, counts=False)  # only the shape is wanted here

    def _processed(self, states: Any, nb_axes: int = 1, counts: bool = True) -> Any:
        """States with one (B) or two (k, B) leading axes after the processor, which knows batches of one.

        With `counts=False` a processor that gathers statistics leaves them alone.
        """
        if self.processor is None:
            return states
        leading = tree_leaves(states)[0].shape[:nb_axes]
        flat = tree_map(lambda x: x.reshape(-1, *x.shape[nb_axes:]), states)
        learns = self.processor.training
        self.processor.training = learns and counts
        try:
            flat = self.processor.process_state_batch(flat)
        finally:
            self.processor.training = learns
        flat = tuple(flat) if isinstance(flat, list) else flat  # one batch per input, as keras-rl's processors give it
        return tree_map(lambda x: np.reshape(x, (*leading, *x.shape[1:])), flat)

    def _check_finite(self, loss: float, advice: str) -> None:
        if not np.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss} at env step {self.step} (gradient step {self.run_state.nb_updates}). The "
                "weights are the last good ones. Usual causes: rewards or observations that are huge or NaN, a "
                f"learning rate that is too high (try {advice})"
            )


def states_of(observation: Any) -> Any:
    """States `(N, 1, *obs)` of single observations `(N, *obs)`, in the dtype that networks are given."""
    return tree_map(lambda x: as_frames(x)[:, None], observation)


def when(condition: Any, step: Callable[[], Any], otherwise: Any) -> Any:
    """Takes a step, such as a gradient step, or leaves it out; called while compiling.

    Args:
        condition: A bool scalar that is known only at run time, or True.
        step: Returns a tree of tensors; it may assign variables.
        otherwise: The same tree for a step left out.
    """
    if condition is True:
        return step()
    return backend.repeat(ops.cast(condition, "int32"), 2, lambda i, _: step(), otherwise)


class Untracked(tuple):
    """A tuple that Keras' attribute tracking leaves alone."""
