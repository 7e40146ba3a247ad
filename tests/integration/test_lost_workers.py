"""A worker that is killed while an agent trains or tests: its episode is cut, its last step is not learnt from."""

import os
import signal

import gymnasium as gym
import numpy as np
import pytest

from rl.callbacks import Callback
from rl.common.vec_env import SubprocVecEnv, WorkerDiedError
from tests.agents import test_rollout
from tests.agents.test_replay import make_agent
from tests.toy_envs import Counting, WithPid


class Killer(Callback):
    """Kills the worker of a lane at given env steps."""

    def __init__(self, at, lane=1):
        self.at, self.lane, self.nb_kills = list(at), lane, 0
        self.ended = []

    def on_vector_step_end(self, logs=None):
        if self.at and logs["step"] >= self.at[0]:
            self.at.pop(0)
            self.nb_kills += 1
            os.kill(self.env.call("pid", indices=[self.lane])[0], signal.SIGKILL)

    def on_episode_end(self, episode, logs=None):
        self.ended.append((logs["lane"], logs["nb_episode_steps"], logs["episode_reward"]))


def four_lanes(mode, **options):
    fns = [lambda i=i: WithPid(i, lengths=(20,)) for i in range(4)]
    return SubprocVecEnv(fns, workers=2, autoreset_mode=mode, **options)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", list(gym.vector.AutoresetMode))
def test_training_goes_on_without_the_lost_rows(mode):
    agent, killer = make_agent(), Killer([50, 130])
    with four_lanes(mode, on_worker_failure="restart") as env, pytest.warns(RuntimeWarning, match="(?i)restarted"):
        history = agent.fit(env, nb_steps=400, verbose=0, callbacks=[killer])
    assert killer.nb_kills == 2
    assert agent.step == 400
    # Lanes 0 and 1 share the killed worker: two of their episodes are cut short, all others are whole.
    short = [(lane, length) for lane, length, _ in killer.ended if length != 20]
    assert len(short) == 4 and {lane for lane, _ in short} == {0, 1}
    for _, length, reward in killer.ended:
        assert reward == length * (length + 1) / 2  # the rewards 1, 2, 3, ... of each step, none twice, none lost
    assert len(history.history["episode_reward"]) == len(killer.ended)
    memory = agent.memory
    assert memory.nb_entries == 400
    batch = memory.sample_batch(2000)
    state0, state1 = batch.state0[0, :, 0], batch.state1[0, :, 0]
    np.testing.assert_array_equal(state1[:, 2], state0[:, 2] + 1)  # the next step of the episode, never the first
    np.testing.assert_array_equal(state1[:, 0], state0[:, 0])
    assert not np.any(batch.terminal1[0][state1[:, 2] < 20])


@pytest.mark.timeout(60)
def test_a_test_goes_on_as_well():
    agent, killer = make_agent(), Killer([30])
    with (
        four_lanes("SameStep", on_worker_failure="restart") as env,
        pytest.warns(RuntimeWarning, match="(?i)restarted"),
    ):
        history = agent.test(env, nb_episodes=8, verbose=0, visualize=False, callbacks=[killer])
    assert len(history.history["episode_reward"]) == 8


@pytest.mark.timeout(60)
def test_without_restart_the_error_reaches_the_user_and_the_agent_stays_usable():
    agent = make_agent()
    with four_lanes("SameStep") as env, pytest.raises(WorkerDiedError, match="SIGKILL"):
        agent.fit(env, nb_steps=400, verbose=0, callbacks=[Killer([50])])
    done = agent.step
    agent.fit(Counting(), nb_steps=20, verbose=0)
    assert agent.step == done + 20


@pytest.mark.timeout(60)
@pytest.mark.parametrize("mode", [gym.vector.AutoresetMode.NEXT_STEP, gym.vector.AutoresetMode.SAME_STEP])
def test_a_rollout_goes_on_without_the_lost_rows(mode):
    agent, killer = test_rollout.make_agent(normalize_observation=True, normalize_reward=True), Killer([50])
    rollouts, _ = test_rollout.watched(agent)
    with four_lanes(mode, on_worker_failure="restart") as env, pytest.warns(RuntimeWarning, match="(?i)restarted"):
        agent.fit(env, nb_steps=250, verbose=0, callbacks=[killer])
    assert killer.nb_kills == 1
    assert 250 <= agent.step < 254
    count = sum(int(r[-1].sum()) for r in rollouts)
    assert count + agent.storage.nb_valid == agent.step
    cut = 0
    for state0, _, reward, state1, terminated, ended, valid in rollouts:
        np.testing.assert_array_equal(state1[valid][:, 0, 2], state0[valid][:, 0, 2] + 1)
        np.testing.assert_array_equal(reward[valid], state1[valid][:, 0, 2])
        np.testing.assert_array_equal(terminated[valid], state1[valid][:, 0, 2] == 20)
        assert not reward[~valid].any() and not terminated[~valid].any()
        cut += int((ended & ~valid).sum())
    assert cut == 2  # the lost steps of lanes 0 and 1
    assert float(agent.model.normalizers[0].count) == float(agent.model.returns.count) == count
    assert all(np.isfinite(w).all() for w in agent.get_weights())
