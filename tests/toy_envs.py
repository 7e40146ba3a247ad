"""Small envs with known answers, shared by the tests. Classes at module level, so that worker processes find them.

They are here and not beside their tests: a worker imports the module of its env, and with most tests that means Keras.
"""

import os

import gymnasium as gym
import numpy as np


class TwoStateMDP(gym.Env):
    """s0 -a0-> s0 (0), s0 -a1-> s1 (0), s1 -a0-> terminal (1), s1 -a1-> s0 (0.2); observations are one-hot."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)
    GAMMA = 0.9
    Q_STAR = np.array([[0.852632, 0.947368], [1.0, 1.052632]])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = int(self.np_random.integers(2))
        return self._obs(), {}

    def _obs(self):
        return np.eye(2, dtype=np.float32)[self.state]

    def step(self, action):
        if self.state == 0:
            self.state = int(action)
            return self._obs(), 0.0, False, False, {}
        if action == 0:
            return self._obs(), 1.0, True, False, {}
        self.state = 0
        return self._obs(), 0.2, False, False, {}


class ConstantReward(gym.Env):
    """One state, reward 1 for ever; only a time limit ends an episode, so Q = 1 / (1 - gamma)."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, limit=None):
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.ones(1, np.float32), {}

    def step(self, action):
        self.t += 1
        return np.ones(1, np.float32), 1.0, False, self.t == self.limit, {}


class Counting(gym.Env):
    """Observations are `(env id, episode, step in the episode)`; the reward is the number of steps taken so far."""

    observation_space = gym.spaces.Box(-1e9, 1e9, (3,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, number=0, lengths=(3, 5, 4), truncate=False):
        self.number, self.lengths, self.truncate = number, lengths, truncate
        self.episode = -1
        self.total = 0
        self.nb_resets = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode += 1
        self.nb_resets += 1
        self.t = 0
        return self._obs(), {}

    def _obs(self):
        return np.array([self.number, self.episode, self.t], np.float32)

    def step(self, action):
        self.t += 1
        self.total += 1
        end = self.t >= self.lengths[self.episode % len(self.lengths)]
        return self._obs(), float(self.t), end and not self.truncate, end and self.truncate, {"total": self.total}


class WithPid(Counting):
    def pid(self):
        return os.getpid()


class Awkward(gym.Env):
    """Dict observations, and infos with a mask, a text, a nested dict, None, and a key of the last step only."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (4, 4, 1), np.uint8), vector=gym.spaces.Box(-1, 1, (2,), np.float32)
    )
    action_space = gym.spaces.Discrete(3)

    def __init__(self, number=0):
        self.number, self.episode = number, 0

    def _obs(self):
        return {"image": np.full((4, 4, 1), self.t, np.uint8), "vector": np.full(2, self.t / 10, np.float32)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.episode = 0, self.episode + 1
        return self._obs(), {"map": "start"}

    def step(self, action):
        self.t += 1
        end = self.t == 4 + self.number
        return self._obs(), 1.0, end, False, self.info(end)

    def info(self, end):
        info = {
            "action_mask": np.array([True, False, self.t % 2 == 0]),
            "name": f"step {self.t}",
            "nested": {"position": [self.t, -self.t], "deeper": {"t": self.t}},
            "nothing": None,
            "flag": self.t % 2 == 0,
            "count": self.t,
        }
        return info | ({"is_success": self.episode % 2 == 0} if end else {})


class Drift(gym.Env):
    """Three numbers that drift with the action and by chance, for any action space; reward: how near to 0 they are.

    Episodes last 3 to 8 steps and end either way. Actions are noted.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, action_space):
        self.action_space, self.actions = action_space, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.left = self.np_random.normal(size=3), int(self.np_random.integers(3, 9))
        return self.state.astype(np.float32), {}

    def step(self, action):
        self.actions.append(np.array(action))
        self.left -= 1
        push = 0.3 * (np.mean(action) - 0.5)
        self.state = 0.9 * self.state + push + 0.1 * self.np_random.normal(size=3)
        end = self.left == 0
        terminated = end and bool(self.np_random.random() < 0.5)
        return self.state.astype(np.float32), -float(self.state @ self.state), terminated, end and not terminated, {}


class Bandit(gym.Env):
    """One state, one step, reward -(a - 0.3)^2."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)

    def __init__(self, low, high):
        self.action_space = gym.spaces.Box(low, high, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.ones(1, np.float32), {}

    def step(self, action):
        return np.ones(1, np.float32), -float((action[0] - 0.3) ** 2), True, False, {}


class LinearQuadratic(gym.Env):
    """x' = A x + B u, reward -(x^T Q x + u^T R u); episodes are cut, never terminated."""

    GAMMA = 0.9

    def __init__(self, size):
        rng = np.random.default_rng(size)
        self.a, self.b, self.q, self.r = (np.array([[x]]) for x in (0.9, 0.5, 1.0, 0.1))
        if size > 1:
            self.a, self.b = (np.eye(size) * x + 0.15 * rng.normal(size=(size, size)) for x in (0.7, 0.5))
            half = 0.3 * rng.normal(size=(size, size))
            self.q, self.r = np.eye(size), 0.2 * np.eye(size) + half @ half.T
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = gym.spaces.Box(-3, 3, (size,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.t = self.np_random.uniform(-1, 1, len(self.a)), 0
        return self.x.astype(np.float32), {}

    def step(self, action):
        u = np.asarray(action, np.float64)
        reward = -float(self.x @ self.q @ self.x + u @ self.r @ u)
        self.x, self.t = self.a @ self.x + self.b @ u, self.t + 1
        return self.x.astype(np.float32), reward, False, self.t == 3, {}

    def solution(self):
        """`(S, K, P)`: V = -x^T S x, mu = -K x and P, by iterating the Riccati equation."""
        s = np.zeros_like(self.q)
        for _ in range(500):
            inner = self.r + self.GAMMA * self.b.T @ s @ self.b
            gain = np.linalg.solve(inner, self.GAMMA * self.b.T @ s @ self.a)
            s = self.q + self.GAMMA * self.a.T @ s @ (self.a - self.b @ gain)
        return s, gain, 2 * inner
