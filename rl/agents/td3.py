"""TD3: DDPG with twin critics, a smoothed target and a delayed actor."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import ops

from rl.agents.critics import TwinCritics, pair_of, twin_of
from rl.agents.ddpg import DDPGAgent
from rl.networks import action_input_index
from rl.util import clone_model, require


@keras.saving.register_keras_serializable(package="rl")
class TD3Agent(TwinCritics, DDPGAgent):
    """Twin delayed deep deterministic policy gradients on any number of lanes.

    `DDPGAgent` with three changes (Fujimoto et al. 2018, arXiv:1802.09477, algorithm 1): the least of two
    critics is the target, the target policy's action has clipped noise, and the actor and all targets move after every
    `policy_delay` steps of the critics only. With d = 1 where the episode terminated:

        a1 = clip(mu'(s1) + clip(N(0, target_noise^2), -target_noise_clip, target_noise_clip), low, high)
        y = r + gamma (1 - d) min(Q1'(s1, a1), Q2'(s1, a1))
        L_critic = mean Huber(y - Q1(s0, a0)) + mean Huber(y - Q2(s0, a0))
        L_actor = -mean Q1(s0, mu(s0))

    The actor says actions in [-1, 1], which are mapped to the env's bounds (`scale_actions=True`, the default here).

    Differs from the paper in: `delta_clip`, never by default; the noise of exploration is the user's, none by default;
    a truncated episode bootstraps from its true last observation, as in the authors' code.

    Args:
        nb_actions: Number of action components, A.
        actor: As in `DDPGAgent`. End it with tanh.
        critic: As in `DDPGAgent`; its twin is a copy with fresh weights. Or a list of two critics.
        critic_action_input: As in `DDPGAgent`; of two critics, at the same place in both.
        memory: A `SequentialMemory`.
        policy_delay: Gradient steps of the critics per step of the actor and the targets.
        target_noise: Standard deviation of the target action's noise, in the units of the actor's outputs.
        target_noise_clip: Its bound, in the same units.
        **kwargs: The other arguments of `DDPGAgent`, with other defaults for `batch_size` (256), `target_model_update`
            (0.005), `scale_actions` (True) and `nb_steps_random` (as many as `nb_steps_warmup_critic`).

    Attributes:
        critic_2: Q2.
        target_critic_2: Q2'.

    Raises:
        ValueError: A network does not fit, the twin would be no other critic, or an argument is out of range.
    """

    def __init__(
        self,
        nb_actions: int,
        actor: keras.Model,
        critic: Any,
        critic_action_input: Any,
        memory: Any,
        *,
        policy_delay: int = 2,
        target_noise: float = 0.2,
        target_noise_clip: float = 0.5,
        **kwargs: Any,
    ):
        require("policy_delay", policy_delay, int(policy_delay) == policy_delay >= 1, "a whole number of at least 1")
        require("target_noise", target_noise, target_noise >= 0, "at least 0")
        require("target_noise_clip", target_noise_clip, target_noise_clip >= 0, "at least 0")
        pair, owner = pair_of(critic), type(self).__name__
        kwargs = {"batch_size": 256, "target_model_update": 0.005, "scale_actions": True} | kwargs
        kwargs.setdefault("nb_steps_random", kwargs.get("nb_steps_warmup_critic", 1000))
        super().__init__(nb_actions, actor, pair[0], critic_action_input, memory, **kwargs)
        self.policy_delay = int(policy_delay)
        self.target_noise, self.target_noise_clip = float(target_noise), float(target_noise_clip)
        self.critic_2 = pair[1] if len(pair) == 2 else twin_of(pair[0], self.custom_model_objects, owner)
        action_input_index(self.critic_2, self.critic_action_input, self.nb_actions, owner)
        self.target_critic_2 = clone_model(self.critic_2, self.custom_model_objects)
        self.target_critic_2.trainable = False
        self._noise_seeds = keras.random.SeedGenerator(int(np.random.randint(2**31)))

    def target_action(self, states: Any) -> Any:
        """What the target policy does in the next states, with noise, `(B, A)`."""
        action = super().target_action(states)
        noise = keras.random.normal(ops.shape(action), stddev=self.target_noise, seed=self._noise_seeds)
        noise = ops.clip(noise, -self.target_noise_clip, self.target_noise_clip)
        low, high = self._acting.bounds[True].inner
        return ops.minimum(ops.maximum(action + noise, low), high)

    def prepare(self, driver: Any, observation: Any) -> None:
        """Also compiles anew where the env's bounds, which the target action keeps to, are others; see `Agent`."""
        before = self._acting.bounds[True].inner
        super().prepare(driver, observation)
        after = self._acting.bounds[True].inner
        if not all(np.array_equal(x, y) for x, y in zip(before, after, strict=True)):
            self._functions = None
            self._make_functions()
