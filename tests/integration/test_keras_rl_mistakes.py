"""What keras-rl got wrong, and the tests that it stays right here: most stand with what they are about, the rest below.

keras-rl did each of these things; none of them was visible in a script but by its returns.
"""

import keras
import numpy as np
import pytest
from keras import layers

from rl.agents import CEMAgent, DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import EpisodeParameterMemory, SequentialMemory
from rl.policy import EpsGreedyQPolicy, LinearAnnealedPolicy
from tests.index_of_tests import missing
from tests.toy_envs import Counting

HERE = "integration/test_keras_rl_mistakes.py"

# what was wrong: where it is tested, as "file: test test ..."
TABLE = {
    "a time limit and nb_max_episode_steps were stored as terminal states": [
        "integration/test_known_values.py: a_time_limit_is_not_a_terminal_state",
        "integration/test_on_policy_known_values.py: a_time_limit_is_not_a_terminal_state_on_lanes",
        "agents/test_dqn.py: a_truncated_episode_bootstraps_and_a_terminated_one_does_not",
        "agents/test_sarsa.py: a_time_limit_is_not_the_end",
        "agents/test_naf.py: a_time_limit_is_not_a_terminal_state",
        "agents/test_ddpg.py: a_time_limit_is_not_a_terminal_state",
        "test_core.py: nb_max_episode_steps_truncates",
    ],
    "after each episode fit called forward and backward once more: a made-up row, an update too many": [
        f"{HERE}: there_are_as_many_rows_and_updates_as_env_steps",
    ],
    "counters were 16-bit integers": [
        "agents/test_dqn.py: counters_do_not_wrap",
        "test_core.py: counters_are_python_integers_that_do_not_wrap the_return_of_a_long_episode_is_exact",
    ],
    "each fit and test began at step 0: annealing, warm-up and CEM's noise started over": [
        f"{HERE}: a_second_fit_goes_on_with_schedules_and_warm_up the_noise_of_cem_decays_over_all_fits",
        "test_core.py: test_changes_nothing",
    ],
    "SARSA: the end of an episode and the pair that it belongs to were one step apart; there were no n-step returns": [
        "agents/test_sarsa.py: pairs_are_those_of_a_naive_list_of_steps one_update_against_the_equation",
        "agents/test_sarsa.py: the_fixed_point_is_that_of_the_policy_and_not_q_star",
    ],
    "CEM: the elite came from all episodes in memory, not from the last generation": [
        "agents/test_cem.py: a_generation_against_numpy long_episodes_are_waited_for_and_old_members_do_not_count",
    ],
    "CEM: an elite of one or two members, whose deviation collapses": [
        "agents/test_cem.py: a_generation_on_a_linear_objective_moves_as_theory_says bad_arguments",
    ],
    "CEM: the weights that were saved and tested were those of the luckiest episode": [
        "agents/test_cem.py: the_search_starts_at_the_networks_weights_and_test_uses_the_mean saved_and_loaded",
    ],
    "NAF: the precision matrix depended on the action, so that mu was not the best one": [
        "agents/test_quadratic.py: q_has_its_one_maximum_at_mu_and_curvature_p",
        "agents/test_naf.py: a_precision_network_that_takes_the_action_is_given_zeros",
    ],
    "NAF: in mode 'diag' the precision matrix could be indefinite": [
        "agents/test_quadratic.py: outputs_of_any_size_give_a_finite_positive_curvature",
        "agents/test_naf.py: a_curvature_is_positive_whatever_the_network_says",
    ],
    "NAF, DDPG: noise left the action space, and what was stored was not what was done": [
        "agents/test_naf.py: the_executed_action_is_the_one_that_is_learnt_from",
        "agents/test_naf.py: a_bandits_best_action_is_found_within_its_bounds",
        "agents/test_ddpg.py: a_bandits_best_action_is_found_within_its_bounds",
        "agents/test_continuous.py: the_stored_action_is_the_executed_one",
    ],
    "DDPG: with dt=0.01 the noise hardly changed within an episode": [
        "test_random.py: ornstein_uhlenbeck_statistics an_episode_begins_around_the_mean",
        "agents/test_continuous.py: noise_begins_anew_with_each_lanes_episode_and_its_schedule_counts_real_steps",
    ],
    "DQN: with memory_interval above 1 the successor was several steps away, its rewards and discount those of one": [
        f"{HERE}: a_row_is_one_step_whatever_the_memory_interval",
    ],
    "DQN: no Huber loss unless asked for (it stays so), which then must bound the gradient": [
        "agents/test_dqn.py: delta_clip_bounds_what_one_transition_can_do",
    ],
    "memory: deques of objects, batches made row by row": [
        "test_memory.py: time_to_sample_does_not_grow_with_the_memory hot_calls_are_fast frames_are_stored_once",
    ],
    "compile changed its caller's list of metrics, and the default one": [
        "compat/test_keras_rl_api.py: lists_and_dicts_that_are_passed_in_stay_as_they_are",
    ],
    "one global random stream": [
        "test_util.py: random_stream_leaves_the_global_stream_alone_after_first_use",
        f"{HERE}: agents_draw_from_streams_of_their_own",
    ],
    "LinearAnnealedPolicy could only fall": [
        "test_policy.py: annealing_follows_the_agents_step_in_both_directions",
    ],
    "soft updates of the target belonged to the optimizer": [
        "agents/test_replay.py: soft_updates_move_the_target_by_tau_after_each_gradient_step",
    ],
    "hard updates of the target could happen twice, or be missed, at the end of an episode": [
        "agents/test_replay.py: hard_copies_fall_on_multiples_of_the_interval",
    ],
}


@pytest.mark.parametrize("mistake", sorted(TABLE))
def test_each_mistake_has_its_test(mistake):
    assert not missing(TABLE[mistake])


# ---- those that stand here -----------------------------------------------------------------------------------------


def network():
    return keras.Sequential([keras.Input((1, 3)), layers.Flatten(), layers.Dense(3)])


def dqn(limit=500, **options):
    options = {"batch_size": 4, "nb_steps_warmup": 10, "target_model_update": 0.1} | options
    agent = DQNAgent(network(), nb_actions=3, memory=SequentialMemory(limit, window_length=1), **options)
    agent.compile("adam", jit_compile=False)
    return agent


def env_of(lanes, **options):
    envs = [lambda i=i: Counting(i, **options) for i in range(lanes)]
    return envs[0]() if lanes == 1 else DummyVecEnv(envs)


def drawn(agent):
    """Rows of the agent's memory, `(B, ...)` each."""
    with pytest.warns(UserWarning, match="rows repeat"):
        batch = agent.memory.sample_batch(500, gamma=0.9)
    return batch._replace(**{name: getattr(batch, name)[0] for name in batch._fields})


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("lanes", [1, 3])
def test_there_are_as_many_rows_and_updates_as_env_steps(lanes, truncate):
    agent = dqn()
    history = agent.fit(env_of(lanes, lengths=(1, 2, 3), truncate=truncate), nb_steps=60, verbose=0)
    assert len(history.history["episode_reward"]) == 30 and agent.step == 60
    assert agent.memory.nb_entries == 60 and agent.run_state.nb_updates == 50
    batch = drawn(agent)
    # Rewards count from 1 in each episode: a row that nobody played would bring 0, and lead to another episode.
    np.testing.assert_array_equal(batch.reward, batch.state0[:, 0, 2] + 1)
    np.testing.assert_array_equal(batch.state1[:, 0], batch.state0[:, 0] + [0, 0, 1])
    assert set(batch.terminal1) == ({0.0} if truncate else {0.0, 1.0})


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_second_fit_goes_on_with_schedules_and_warm_up(lanes):
    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, 90)
    agent, env = dqn(policy=policy, nb_steps_warmup=20, target_model_update=30), env_of(lanes)
    values, updates = [], []
    for _ in range(4):
        agent.fit(env, nb_steps=30, verbose=0)
        agent.test(env, nb_episodes=1, verbose=0, visualize=False)
        agent.training = True
        values.append(policy.get_current_value())
        agent.training = False
        updates.append(agent.run_state.nb_updates)
    np.testing.assert_allclose(values, [0.7, 0.4, 0.1, 0.1])
    assert updates == [10, 40, 70, 100]


def test_the_noise_of_cem_decays_over_all_fits():
    options = {"train_interval": 4, "batch_size": 4, "elite_frac": 0.5, "nb_steps_warmup": 0}
    memory = EpisodeParameterMemory(50)
    agent = CEMAgent(network(), nb_actions=3, memory=memory, noise_ampl=1.0, noise_decay_const=0.1, **options)
    agent.compile(jit_compile=False)
    sigmas = []
    for _ in range(3):
        agent.update_theta(np.zeros_like(agent.theta))  # members that are all alike: what remains is the noise
        agent.fit(Counting(lengths=(2,)), nb_steps=8, verbose=0)  # a generation
        sigmas.append(agent.theta[1].mean())
    np.testing.assert_allclose(sigmas, np.exp(-0.1 * np.array([8, 16, 24])), rtol=1e-5)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("interval", [2, 3])
def test_a_row_is_one_step_whatever_the_memory_interval(interval, lanes):
    agent = dqn(memory_interval=interval)
    agent.fit(env_of(lanes), nb_steps=20 * interval * lanes, verbose=0)
    assert agent.memory.nb_entries == 20 * lanes
    batch = drawn(agent)
    np.testing.assert_array_equal(batch.state1[:, 0], batch.state0[:, 0] + [0, 0, 1])
    np.testing.assert_array_equal(batch.reward, batch.state0[:, 0, 2] + 1)
    np.testing.assert_allclose(batch.discount, 0.9)


def test_agents_draw_from_streams_of_their_own():
    def actions(between):
        np.random.seed(1)
        agent, env, taken = dqn(policy=EpsGreedyQPolicy(1.0)), Counting(), []
        env.step = lambda action, step=env.step: (taken.append(int(action)), step(action))[1]
        agent.fit(env, nb_steps=20, seed=7, verbose=0)
        between()
        state = np.random.get_state()[1].copy()
        agent.fit(env, nb_steps=20, verbose=0)
        np.testing.assert_array_equal(np.random.get_state()[1], state)
        return taken

    def another_agent():
        dqn(policy=EpsGreedyQPolicy(1.0)).fit(Counting(), nb_steps=20, verbose=0)
        np.random.random(100)

    assert actions(lambda: None) == actions(another_agent)
