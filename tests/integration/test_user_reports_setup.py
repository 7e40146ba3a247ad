"""What users of Keras-style libraries ran into in installing, building, saving, in speed and for features, with tests.

Most of these tests stand with what they are about; those that need a whole run stand below.
"""

import copy
import importlib.metadata
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import rl
from rl.agents import DQNAgent
from rl.common.vec_env import DummyVecEnv
from rl.memory import SequentialMemory
from rl.policy import EpsGreedyQPolicy, LinearAnnealedPolicy
from tests.index_of_tests import missing
from tests.toy_envs import Counting

ROOT = Path(__file__).parents[2]
HERE = "integration/test_user_reports_setup.py"
QUIET = {"verbose": 0, "visualize": False}

# what was reported: where it is tested
SETUP = {
    "symbolic outputs have no length": ["agents/test_dqn.py: a_model_with_another_output_is_refused_at_construction"],
    "private names of Keras": ["test_package.py: no_module_reaches_into_keras"],
    "optimizers lack a method": ["agents/test_dqn.py: every_optimizer_changes_every_weight"],
    "two Keras in one process": [
        "agents/test_dqn.py: the_optimizer_of_tensorflows_keras_works foreign_optimizers_are_refused",
    ],
    "imports fail, or need a tracker's package": [
        "test_package.py: every_module_imports_without_a_warning_and_without_optional_packages",
        "test_callbacks.py: wandb_is_needed_only_for_its_logger",
    ],
    "installing replaces TensorFlow": [f"{HERE}: no_requirement_has_an_upper_bound"],
    "another distribution owns the name rl": [
        "test_package.py: version_is_that_of_the_distribution",
        f"{HERE}: it_says_which_package_is_imported",
    ],
    "reset returns a pair, step five values": [
        "common/test_single_env.py: old_api new_api a_wrong_number_of_values_from_step",
        "test_core.py: an_old_env_in_fit_and_test a_step_of_another_length_is_one_clear_type_error",
    ],
    "old endings of weights files": [
        "test_saving.py: agents_read_the_weights_that_keras_rl_wrote other_endings_are_refused",
        "agents/test_dqn.py: weights_round_trip",
        "agents/test_ddpg.py: weights_are_a_pair_of_files_and_reach_the_targets",
    ],
    "a wall of deprecation warnings": [f"{HERE}: a_memory_that_is_not_full_yet_brings_no_deprecation"],
    "it fails only after the actor's warm-up": [
        "agents/test_ddpg.py: the_actor_begins_after_the_critic",
        "integration/test_every_agent.py: it_learns_on_one_env_and_on_lanes",
    ],
    "examples that do not start": ["test_examples.py: every_example_is_run example"],
    "methods of an env are missing": [
        "common/test_single_env.py: envs_that_are_refused",
        "test_core.py: what_is_no_env_is_refused the_old_base_classes_name_what_is_missing",
    ],
}
SHAPES = {
    "a window axis where none is wanted": [
        "agents/test_dqn.py: inputs_with_and_without_the_window_axis an_input_without_a_window_axis_learns_the_same",
        "agents/test_dqn.py: a_model_with_another_input_is_refused_before_the_first_step",
    ],
    "DDPG with a window": ["agents/test_ddpg.py: windows_of_observations networks_that_do_not_fit_are_named"],
    "output (None, 1, 2)": ["agents/test_dqn.py: a_model_with_another_output_is_refused_at_construction"],
    "dict and tuple observations, in any order and with a window": [
        "agents/test_dqn.py: dict_observations_are_routed_by_name_whatever_their_order tuple_and_nested_observations",
        "agents/test_dqn.py: the_parts_of_a_window_are_padded_with_zeros_of_their_own_shape",
        "agents/test_ddpg.py: several_observations_are_routed_around_the_action",
        "integration/test_processors_fit.py: several_inputs_get_the_same_parts_however_an_observation_holds_them",
    ],
    "vector envs that disagree on nested observations": [
        "common/vec_env/test_parity.py: every_space random_nested_spaces",
    ],
    "one choice where the env wants several": [
        "agents/test_dqn.py: other_action_spaces_are_refused_by_name",
        "agents/test_a2c.py: the_env_gets_members_of_its_space_and_a_test_takes_the_most_probable_ones",
    ],
    "Discrete(3, start=5)": [
        "agents/test_dqn.py: an_offset_discrete_space",
        "test_driver.py: discrete_actions_that_start_at_five",
    ],
    "an activation per part of an action": [f"{HERE}: two_outputs_are_to_be_concatenated"],
    "actions outside of their bounds": [
        "agents/test_continuous.py: the_stored_action_is_the_executed_one",
        "agents/test_a2c.py: the_env_gets_clipped_actions_and_the_rollout_keeps_them_as_drawn",
    ],
    "a malformed observation after an hour": [
        "test_driver.py: an_observation_that_changes_is_refused_at_once",
    ],
    "arrays, texts and None in infos; verbose=2 with several inputs": [
        "integration/test_robustness.py: dict_observations_and_awkward_infos",
    ],
    "target networks of custom layers and subclassed models": [
        "agents/test_dqn.py: custom_layers_registered_and_by_name subclassed_models",
        "test_util.py: clone_says_what_to_register clone_has_equal_weights_and_outputs_but_shares_no_variable",
    ],
}
SAVING = {
    "after loading, training starts anew": [
        f"{HERE}: a_loaded_agent_that_is_given_its_memory_learns_the_same_bits",
        "integration/test_every_agent.py: a_saved_agent_comes_back_whole_and_goes_on",
        "agents/test_dqn.py: a_saved_agent_goes_on_in_a_fresh_process",
    ],
    "the memory cannot be kept, or is many GB": [
        "test_memory.py: a_copy_goes_on_alike",
        f"{HERE}: a_pickled_memory_is_no_larger_than_its_frames",
    ],
    "a burst of updates after resuming without the memory": [
        "agents/test_replay.py: past_the_warm_up_with_an_empty_memory_waits_for_a_batch_and_catches_nothing_up",
    ],
    "the network alone, without this library": [f"{HERE}: a_saved_network_needs_keras_alone"],
    "loading was never run": ["integration/test_every_agent.py: a_weights_file_holds_what_acts"],
    "CEM starts over": ["agents/test_cem.py: saved_and_loaded"],
    "the best weights are lost": ["test_callbacks.py: checkpoint_keeps_the_weights_of_the_best_episode"],
    "what a second fit does": ["integration/test_robustness.py: a_second_fit_keeps_network_optimizer_and_memory"],
    "a checkpoint breaks the training": ["integration/test_callbacks_fit.py: callbacks_do_not_disturb_the_training"],
}
SPEED = {
    "one call of the network per env": [f"{HERE}: all_lanes_share_one_call_of_the_network"],
    "memory grows, functions are traced again": [
        "integration/test_robustness.py: memory_and_traces_do_not_grow_with_the_steps agents_that_are_dropped_are_gone",
    ],
    "loggers keep observations": ["integration/test_robustness.py: loggers_keep_no_observations"],
    "frames are stored as floats, several times": [
        "test_memory.py: frames_are_stored_once frames_keep_their_dtype",
        "agents/test_dqn.py: uint8_images_stay_uint8_until_the_network",
    ],
    "sampling slows down": ["test_memory.py: time_to_sample_does_not_grow_with_the_memory"],
    "mixed precision": ["integration/test_precision_and_devices.py: mixed_precision_trains_without_nan"],
    "more processes are slower": ["common/test_cmd_util.py: workers_auto_keeps_cheap_envs_in_this_process"],
    "logging slows down": ["test_callbacks.py: logging_costs_nothing_per_step"],
}
FEATURES = {
    "PPO": ["integration/test_on_policy.py: ppo_learns_cartpole"],
    "several cores": [
        "integration/test_every_agent.py: it_learns_on_one_env_and_on_lanes "
        "lanes_in_another_process_give_the_same_weights",
    ],
    "recurrent networks": [
        "agents/test_dqn.py: a_recurrent_network_over_a_window",
        f"{HERE}: a_stateful_layer_is_refused_by_name",
    ],
    "stopping after some episodes": [
        "test_core.py: nb_episodes_is_exact_on_one_env of_both_limits_the_first_one_reached_decides "
        "fit_without_a_limit_is_refused",
    ],
    "searching hyper-parameters": [
        "integration/test_robustness.py: the_score_of_a_search_does_not_depend_on_what_ran_before_in_the_process",
    ],
    "several agents in one env": ["test_legacy.py: two_agents_take_turns_on_one_env"],
    "noise that fades, also after resuming": [
        "test_random.py: sigma_follows_the_schedule_in_env_steps_over_lanes a_resumed_process_goes_on_where_it_was",
        "agents/test_continuous.py: a_saved_agent_goes_on_with_the_noises_schedule "
        "noise_begins_anew_with_each_lanes_episode_and_its_schedule_counts_real_steps",
    ],
}
REPORTS = SETUP | SHAPES | SAVING | SPEED | FEATURES


@pytest.mark.parametrize("report", sorted(REPORTS))
def test_each_report_has_its_test(report):
    assert not missing(REPORTS[report])


# ---- those that stand here -----------------------------------------------------------------------------------------


def flat(*widths, window=1):
    start = [keras.initializers.GlorotUniform(seed=i) for i in range(len(widths))]
    dense = [layers.Dense(w, kernel_initializer=s) for w, s in zip(widths, start, strict=True)]
    return keras.Sequential([keras.Input((window, 3)), layers.Flatten(), *dense])


def dqn(model=None, **options):
    options = {"batch_size": 8, "nb_steps_warmup": 8, "target_model_update": 0.1} | options
    options.setdefault("memory", SequentialMemory(200, window_length=1))
    agent = DQNAgent(flat(8, 3) if model is None else model, nb_actions=3, **options)
    agent.compile("adam", jit_compile=False)
    return agent


def test_no_requirement_has_an_upper_bound():
    needed = [line for line in importlib.metadata.requires("keras-rl3") if "extra ==" not in line]
    names = [re.match(r"[\w-]+", line).group() for line in needed]
    assert {"keras", "gymnasium", "numpy", "tensorflow"} <= set(names)
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", line) for line in needed), needed
    assert importlib.metadata.metadata("keras-rl3")["Requires-Python"]


def test_it_says_which_package_is_imported(tmp_path, monkeypatch, capsys):
    done = subprocess.run([sys.executable, "-m", "rl"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"rl {rl.__version__} in {ROOT / 'rl'}"
    from rl.__main__ import main

    folder = tmp_path / "keras_rl-0.4.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: keras-rl\nVersion: 0.4.2\n")
    (folder / "top_level.txt").write_text("rl\n")
    monkeypatch.syspath_prepend(tmp_path)
    main()
    assert "Also installed under this name: keras-rl. Fix: pip uninstall keras-rl" in capsys.readouterr().out


def test_a_memory_that_is_not_full_yet_brings_no_deprecation():
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        agent = dqn(nb_steps_warmup=5, batch_size=32)
        agent.fit(Counting(), nb_steps=200, verbose=0)
    assert agent.run_state.nb_updates == 195
    ours = [w for w in raised if str(ROOT) in w.filename]  # not what Keras and its backends do to each other
    assert [str(w.message)[:37] for w in ours] == ["6 transitions for a batch of 32: rows"]


def test_two_outputs_are_to_be_concatenated():
    inputs = keras.Input((1, 3))
    x = layers.Flatten()(inputs)
    parts = [layers.Dense(1, activation="sigmoid")(x), layers.Dense(2, activation="tanh")(x)]
    with pytest.raises(ValueError, match=r"one output of shape \(None, 3\), got 2 outputs. Fix: concatenate"):
        dqn(keras.Model(inputs, parts))
    dqn(keras.Model(inputs, layers.Concatenate()(parts))).fit(Counting(), nb_steps=20, verbose=0)


def test_a_stateful_layer_is_refused_by_name():
    model = keras.Sequential([keras.Input((4, 3), batch_size=1), layers.LSTM(4, stateful=True), layers.Dense(3)])
    with pytest.raises(ValueError, match=r"has shape \(1, 3\), expected \(None, 3\). .*A stateful layer"):
        dqn(model, memory=SequentialMemory(200, window_length=4))


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_loaded_agent_that_is_given_its_memory_learns_the_same_bits(lanes, tmp_path):
    def env():
        return Counting() if lanes == 1 else DummyVecEnv([lambda i=i: Counting(i) for i in range(lanes)])

    policy = LinearAnnealedPolicy(EpsGreedyQPolicy(), "eps", 1.0, 0.1, 0.0, 100)
    agent = dqn(policy=policy)
    agent.fit(env(), nb_steps=60, seed=1, verbose=0)
    agent.save(tmp_path / "agent.keras")
    memory = copy.deepcopy(agent.memory)
    agent.fit(env(), nb_steps=60, verbose=0)
    loaded = keras.saving.load_model(tmp_path / "agent.keras")
    loaded.memory = memory
    loaded.fit(env(), nb_steps=60, verbose=0)
    assert loaded.step == agent.step == 120 and loaded.run_state.nb_updates == agent.run_state.nb_updates
    for a, b in zip(loaded.get_weights(), agent.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(loaded.optimizer.variables, agent.optimizer.variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(a), keras.ops.convert_to_numpy(b))
    assert loaded.policy.get_state() == agent.policy.get_state()
    assert loaded.memory.get_random_state() == agent.memory.get_random_state()


def test_a_pickled_memory_is_no_larger_than_its_frames(tmp_path):
    memory = SequentialMemory(2000, window_length=4)
    memory.rng = 1
    for i in range(2000):
        memory.append(np.full((42, 42), i % 255, np.uint8), i % 3, float(i), i % 50 == 49)
    (tmp_path / "memory.pkl").write_bytes(pickle.dumps(memory))
    assert (tmp_path / "memory.pkl").stat().st_size < 1.05 * 2000 * 42 * 42
    restored = pickle.loads((tmp_path / "memory.pkl").read_bytes())
    a, b = restored.sample_batch(32), memory.sample_batch(32)
    np.testing.assert_array_equal(a.state1, b.state1)


def test_a_saved_network_needs_keras_alone(tmp_path):
    agents = {
        "plain": dqn(),
        "double": dqn(enable_double_dqn=True),
        "dueling": dqn(enable_dueling_network=True, dueling_type="max"),
    }
    states = np.random.default_rng(0).normal(size=(5, 1, 3)).astype("f4")
    np.save(tmp_path / "states.npy", states)
    for name, agent in agents.items():
        agent.fit(Counting(), nb_steps=20, verbose=0)
        agent.model.save(tmp_path / f"{name}.keras")
    code = (
        "import sys, keras, numpy as np\nstates = np.load('states.npy')\n"
        "for name in ('plain', 'double', 'dueling'):\n"
        "    network = keras.saving.load_model(name + '.keras')\n"
        "    np.save(name + '.npy', keras.ops.convert_to_numpy(network(states)))\n"
        "assert not any(module.split('.')[0] == 'rl' for module in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=150)
    for name, agent in agents.items():
        np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), agent.compute_batch_q_values(states), atol=1e-6)


def test_all_lanes_share_one_call_of_the_network():
    agent, rows = dqn(nb_steps_warmup=10_000), []
    evaluate = agent.evaluate
    object.__setattr__(agent, "evaluate", lambda states: (rows.append(len(states)), evaluate(states))[1])
    agent.fit(DummyVecEnv([lambda i=i: Counting(i) for i in range(6)]), nb_steps=60, verbose=0)
    assert rows == [6] * 10
