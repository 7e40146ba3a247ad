"""keras-rl's way of driving an agent by hand: `forward` gives an action, `backward` takes what followed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl.common.misc_util import tree_map


class ForwardBackward:
    """Mixin of `ReplayAgent`: one lane, without `fit`. Set `agent.training = True` to learn.

    Several agents may share an env this way, turn by turn.
    """

    def forward(self: Any, observation: Any) -> Any:
        """Chooses an action for one observation, `(*obs)`."""
        action = self.explore(self.evaluate(_window(self.memory, observation)))[0]
        self.recent_observation, self.recent_action = observation, action
        return action

    def backward(self: Any, reward: float, terminal: bool = False) -> list[float]:
        """Stores what followed the last `forward`, counts the step, and learns where an update is due.

        Args:
            reward: The reward of the action that `forward` chose.
            terminal: Whether the episode terminated. Call `forward` and `backward(0., False)` once more on the last
                observation, as `fit` of keras-rl did, so that it is stored.

        Returns:
            One value per `metrics_names`, NaN without an update.
        """
        if self.step % self.memory_interval == 0:
            action = self.stored_actions(self.recent_action)
            self.memory.append(self.recent_observation, action, reward, terminal, training=self.training)
        metrics = None
        if self.training:
            self.run_state.step += 1
            if self.memory.nb_entries > 1:  # the newest row lacks its successor still
                metrics = self._learn(self.step - 1, 1, lambda: _window(self.memory, self.recent_observation))
        return [float("nan")] * len(self.metrics_names) if metrics is None else [float(m) for m in metrics]

    def _check_not_overridden(self) -> None:
        for name in ("forward", "backward"):
            if getattr(type(self), name) is not getattr(ForwardBackward, name):
                raise TypeError(
                    f"{type(self).__name__} overrides {name}(), which fit() and test() do not call. Override explore() "
                    "for actions, loss_fn() or train_step() for learning, or drive the agent by hand"
                )


def _window(memory: Any, observation: Any) -> Any:
    """The state `(1, W, *obs)` of the open episode with this observation as its last."""
    frames = memory.get_recent_state(observation)
    return tree_map(lambda *parts: np.stack([np.asarray(part) for part in parts])[None], *frames)
