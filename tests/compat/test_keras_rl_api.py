"""The names that scripts written for keras-rl import, and the arguments that they pass, are all there."""

import importlib
import inspect
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

from rl.agents import CEMAgent, DQNAgent, NAFAgent, SARSAAgent
from rl.core import Processor
from rl.memory import EpisodeParameterMemory, Experience, SequentialMemory
from rl.policy import EpsGreedyQPolicy
from rl.random import OrnsteinUhlenbeckProcess

inf = float("inf")

NAMES = {
    "rl.core": (
        "Agent Processor Env Space CallbackList TestLogger TrainEpisodeLogger TrainIntervalLogger Visualizer "
        "FileLogger ModelIntervalCheckpoint"
    ),
    "rl.agents": "DQNAgent NAFAgent ContinuousDQNAgent DDPGAgent CEMAgent SARSAAgent SarsaAgent",
    "rl.agents.dqn": "AbstractDQNAgent DQNAgent NAFLayer NAFAgent ContinuousDQNAgent mean_q",
    "rl.agents.ddpg": "DDPGAgent mean_q",
    "rl.agents.cem": "CEMAgent",
    "rl.agents.sarsa": "SARSAAgent SarsaAgent",
    "rl.memory": (
        "Experience sample_batch_indexes RingBuffer zeroed_observation Memory SequentialMemory EpisodeParameterMemory"
    ),
    "rl.policy": (
        "Policy LinearAnnealedPolicy SoftmaxPolicy EpsGreedyQPolicy GreedyQPolicy BoltzmannQPolicy "
        "MaxBoltzmannQPolicy BoltzmannGumbelQPolicy"
    ),
    "rl.processors": "Processor MultiInputProcessor WhiteningNormalizerProcessor",
    "rl.random": "RandomProcess AnnealedGaussianProcess GaussianWhiteNoiseProcess OrnsteinUhlenbeckProcess",
    "rl.callbacks": (
        "Callback CallbackList TestLogger TrainEpisodeLogger TrainIntervalLogger FileLogger Visualizer "
        "ModelIntervalCheckpoint WandbLogger"
    ),
    "rl.util": "clone_model clone_optimizer get_object_config huber_loss WhiteningNormalizer",
    "rl.common": "set_global_seeds",
    "rl.common.cmd_util": "make_gym_env",
    "rl.common.vec_env": "VecEnv CloudpickleWrapper SubprocVecEnv",
    "rl.common.vec_env.subproc_env_vec": "SubprocVecEnv",
    "rl.common.tile_images": "tile_images",
}


@pytest.mark.parametrize(
    ("module", "name"), [(module, name) for module, names in NAMES.items() for name in names.split()]
)
def test_a_name_is_where_it_was(module, name):
    found = getattr(importlib.import_module(module), name)
    assert callable(found)
    # A class that stands in two places is the same class in both.
    others = [other for other, names in NAMES.items() if name in names.split()]
    assert all(getattr(importlib.import_module(other), name) is found for other in others) or name == "mean_q"


def test_aliases():
    import rl.agents
    import rl.agents.dqn

    assert rl.agents.SarsaAgent is rl.agents.SARSAAgent
    assert rl.agents.ContinuousDQNAgent is rl.agents.NAFAgent is rl.agents.dqn.NAFAgent


def test_star_imports_give_what_scripts_take_from_them():
    code = "from rl.util import *\nfrom rl.memory import *\nclone_model, huber_loss, SequentialMemory, Experience"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", ["get_soft_target_model_updates", "AdditionalUpdatesOptimizer"])
def test_what_is_gone_says_what_to_use_instead(name):
    import rl.util

    with pytest.raises(AttributeError, match=f"{name} was part of keras-rl and is gone; use "):
        getattr(rl.util, name)
    with pytest.raises(ImportError):
        exec(f"from rl.util import {name}", {})


# ---- arguments -----------------------------------------------------------------------------------------------------

# "required" stands for an argument without a default. keras-rl's mutable defaults, [] and {}, are None here.
REQUIRED = inspect.Parameter.empty
REPLAY = {
    **dict.fromkeys(("nb_actions", "memory"), REQUIRED),
    **{"gamma": 0.99, "batch_size": 32, "nb_steps_warmup": 1000, "train_interval": 1, "memory_interval": 1},
    **{"target_model_update": 10000, "delta_range": None, "delta_clip": inf, "custom_model_objects": None},
}
ANNEALED = {"mu": 0.0, "sigma": 1.0}
FIT = {
    **{"env": REQUIRED, "nb_steps": REQUIRED, "action_repetition": 1, "callbacks": None, "verbose": 1},
    **{"visualize": False, "nb_max_start_steps": 0, "start_step_policy": None, "log_interval": 10000},
    "nb_max_episode_steps": None,
}
TEST = {
    **{"env": REQUIRED, "nb_episodes": 1, "action_repetition": 1, "callbacks": None, "visualize": True},
    **{"nb_max_episode_steps": None, "nb_max_start_steps": 0, "start_step_policy": None, "verbose": 1},
}
SIGNATURES = {
    "rl.core:Agent": {"processor": None},
    "rl.core:Agent.fit": FIT,
    "rl.core:Agent.test": TEST,
    "rl.core:Agent.save_weights": {"filepath": REQUIRED, "overwrite": False},
    "rl.core:Agent.load_weights": {"filepath": REQUIRED},
    "rl.core:Agent.forward": {"observation": REQUIRED},
    "rl.core:Agent.backward": {"reward": REQUIRED, "terminal": REQUIRED},
    "rl.core:Processor": {},
    "rl.core:Processor.process_step": dict.fromkeys(("observation", "reward", "done", "info"), REQUIRED),
    "rl.core:Processor.process_observation": {"observation": REQUIRED},
    "rl.core:Processor.process_reward": {"reward": REQUIRED},
    "rl.core:Processor.process_info": {"info": REQUIRED},
    "rl.core:Processor.process_action": {"action": REQUIRED},
    "rl.core:Processor.process_state_batch": {"batch": REQUIRED},
    "rl.agents.dqn:AbstractDQNAgent": REPLAY,
    "rl.agents.dqn:AbstractDQNAgent.compile": {"optimizer": REQUIRED, "metrics": None},
    "rl.agents:DQNAgent": {
        **{"model": REQUIRED, "policy": None, "test_policy": None, "enable_double_dqn": False},
        **{"enable_dueling_network": False, "dueling_type": "avg"},
    },
    "rl.agents:NAFAgent": {
        **dict.fromkeys(("V_model", "L_model", "mu_model"), REQUIRED),
        **{"random_process": None, "covariance_mode": "full"},
    },
    "rl.agents.dqn:NAFLayer": {"nb_actions": REQUIRED, "mode": "full"},
    "rl.agents:DDPGAgent": {
        **dict.fromkeys(("nb_actions", "actor", "critic", "critic_action_input", "memory"), REQUIRED),
        **{"gamma": 0.99, "batch_size": 32, "nb_steps_warmup_critic": 1000, "nb_steps_warmup_actor": 1000},
        **{"train_interval": 1, "memory_interval": 1, "delta_range": None, "delta_clip": inf, "random_process": None},
        **{"custom_model_objects": None, "target_model_update": 0.001},
    },
    "rl.agents:SARSAAgent": {
        **{"model": REQUIRED, "nb_actions": REQUIRED, "policy": None, "test_policy": None, "gamma": 0.99},
        **{"nb_steps_warmup": 10, "train_interval": 1, "delta_clip": inf},
    },
    "rl.agents:CEMAgent": {
        **dict.fromkeys(("model", "nb_actions", "memory"), REQUIRED),
        **{"batch_size": 50, "nb_steps_warmup": 1000, "train_interval": 50, "elite_frac": 0.05, "memory_interval": 1},
        **{"theta_init": None, "noise_decay_const": 0.0, "noise_ampl": 0.0},
    },
    "rl.agents:CEMAgent.compile": {},
    "rl.callbacks:TrainIntervalLogger": {"interval": 10000},
    "rl.callbacks:TrainEpisodeLogger": {},
    "rl.callbacks:TestLogger": {},
    "rl.callbacks:Visualizer": {},
    "rl.callbacks:FileLogger": {"filepath": REQUIRED, "interval": None},
    "rl.callbacks:ModelIntervalCheckpoint": {"filepath": REQUIRED, "interval": REQUIRED, "verbose": 0},
    "rl.callbacks:Callback.on_episode_begin": {"episode": REQUIRED, "logs": None},
    "rl.callbacks:Callback.on_episode_end": {"episode": REQUIRED, "logs": None},
    "rl.callbacks:Callback.on_step_begin": {"step": REQUIRED, "logs": None},
    "rl.callbacks:Callback.on_step_end": {"step": REQUIRED, "logs": None},
    "rl.callbacks:Callback.on_action_begin": {"action": REQUIRED, "logs": None},
    "rl.callbacks:Callback.on_action_end": {"action": REQUIRED, "logs": None},
    "rl.callbacks:Callback._set_env": {"env": REQUIRED},
    "rl.memory:Memory": {"window_length": REQUIRED, "ignore_episode_boundaries": False},
    "rl.memory:Memory.sample": {"batch_size": REQUIRED, "batch_idxs": None},
    "rl.memory:Memory.append": {
        **dict.fromkeys(("observation", "action", "reward", "terminal"), REQUIRED),
        "training": True,
    },
    "rl.memory:Memory.get_recent_state": {"current_observation": REQUIRED},
    "rl.memory:SequentialMemory": {"limit": REQUIRED},
    "rl.memory:EpisodeParameterMemory": {"limit": REQUIRED},
    "rl.memory:EpisodeParameterMemory.finalize_episode": {"params": REQUIRED},
    "rl.memory:RingBuffer": {"maxlen": REQUIRED},
    "rl.memory:sample_batch_indexes": dict.fromkeys(("low", "high", "size"), REQUIRED),
    "rl.memory:zeroed_observation": {"observation": REQUIRED},
    "rl.policy:LinearAnnealedPolicy": dict.fromkeys(
        ("inner_policy", "attr", "value_max", "value_min", "value_test", "nb_steps"), REQUIRED
    ),
    "rl.policy:EpsGreedyQPolicy": {"eps": 0.1},
    "rl.policy:GreedyQPolicy": {},
    "rl.policy:BoltzmannQPolicy": {"tau": 1.0, "clip": (-500.0, 500.0)},
    "rl.policy:MaxBoltzmannQPolicy": {"eps": 0.1, "tau": 1.0, "clip": (-500.0, 500.0)},
    "rl.policy:BoltzmannGumbelQPolicy": {"C": 1.0},
    "rl.policy:SoftmaxPolicy": {},
    "rl.policy:SoftmaxPolicy.select_action": {"nb_actions": REQUIRED, "probs": REQUIRED},
    "rl.policy:EpsGreedyQPolicy.select_action": {"q_values": REQUIRED},
    "rl.processors:MultiInputProcessor": {"nb_inputs": REQUIRED},
    "rl.processors:WhiteningNormalizerProcessor": {},
    "rl.random:AnnealedGaussianProcess": {
        **{"mu": REQUIRED, "sigma": REQUIRED, "sigma_min": None, "n_steps_annealing": 1000},
    },
    "rl.random:GaussianWhiteNoiseProcess": ANNEALED | {"sigma_min": None, "n_steps_annealing": 1000, "size": 1},
    "rl.random:OrnsteinUhlenbeckProcess": {
        **{"theta": REQUIRED, **ANNEALED, "dt": 0.01, "size": 1, "sigma_min": None, "n_steps_annealing": 1000},
    },
    "rl.util:WhiteningNormalizer": {"shape": REQUIRED, "eps": 0.01, "dtype": np.float64},
    "rl.util:huber_loss": dict.fromkeys(("y_true", "y_pred", "clip_value"), REQUIRED),
    "rl.util:clone_model": {"model": REQUIRED, "custom_objects": None},
    "rl.util:clone_optimizer": {"optimizer": REQUIRED},
    "rl.util:get_object_config": {"o": REQUIRED},
    "rl.common.cmd_util:make_gym_env": {
        **{"env_id": REQUIRED, "num_env": 2, "seed": 123, "wrapper_kwargs": None, "start_index": 0},
    },
    "rl.common.vec_env:VecEnv": dict.fromkeys(("num_envs", "observation_space", "action_space"), REQUIRED),
    "rl.common.vec_env:SubprocVecEnv": {"env_fns": REQUIRED},
    "rl.common:set_global_seeds": {"seed": REQUIRED},
}


@pytest.mark.parametrize("path", sorted(SIGNATURES))
def test_arguments_have_keras_rls_names_order_and_defaults(path):
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    parameters = [p for p in inspect.signature(found).parameters.values() if p.name != "self"]
    parameters = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    # Further arguments come after keras-rl's, so that a positional call means the same.
    assert [p.name for p in parameters][: len(SIGNATURES[path])] == list(SIGNATURES[path])
    for parameter, default in zip(parameters, SIGNATURES[path].values(), strict=False):
        if default is not REQUIRED:  # what keras-rl demanded may have a default here
            assert parameter.default == default, parameter.name


# ---- what scripts read, assign and call ----------------------------------------------------------------------------


def flat(*widths, window=1, nb_inputs=3):
    dense = [layers.Dense(w) for w in widths]
    return keras.Sequential([keras.Input((window, nb_inputs)), layers.Flatten(), *dense])


def memory():
    return SequentialMemory(limit=50, window_length=1)


AGENTS = {
    "dqn": lambda **o: DQNAgent(model=flat(2), nb_actions=2, memory=memory(), **o),
    "sarsa": lambda **o: SARSAAgent(model=flat(2), nb_actions=2, **o),
    "cem": lambda **o: CEMAgent(
        model=flat(2), nb_actions=2, memory=EpisodeParameterMemory(limit=50, window_length=1), **o
    ),
    "naf": lambda **o: NAFAgent(V_model=flat(1), L_model=flat(1), mu_model=flat(1), nb_actions=1, memory=memory(), **o),
}


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_attributes_that_scripts_read_or_assign(name):
    processor = Processor()
    agent = AGENTS[name](processor=processor)
    assert agent.processor is processor and agent.training is False and agent.step == 0 and not agent.compiled
    agent.compile() if name == "cem" else agent.compile(optimizer="adam", metrics=["mae"])
    assert agent.compiled
    agent.training, agent.step = True, 5
    assert agent.training is True and agent.step == 5
    agent.reset_states()
    assert agent.recent_action is None and agent.recent_observation is None
    assert isinstance(agent.layers, list) and isinstance(agent.metrics_names, list)
    assert isinstance(agent.get_config(), dict)
    expected = ["mean_best_reward"] if name == "cem" else ["loss", "mae"]
    assert agent.metrics_names[: len(expected)] == expected
    if name == "dqn":
        assert agent.metrics_names == ["loss", "mae", "mean_q"]
        assert agent.compute_q_values([np.ones(3)]).shape == (2,)
        assert agent.compute_batch_q_values([[np.ones(3)]] * 4).shape == (4, 2)
        agent.update_target_model_hard()
    if name == "cem":
        assert agent.theta.shape[0] == 2 and len(agent.best_seen) == 2
        assert len(agent.get_weights_list(agent.get_weights_flat(agent.model.get_weights()))) == 2
        agent.choose_weights()
    if name == "naf":
        assert agent.select_action([np.ones(3)]).shape == (1,)
        assert agent.combined_model is not None and agent.target_V_model is not agent.V_model


def test_the_old_spelling_of_delta_clip_warns_and_works():
    with pytest.warns(DeprecationWarning, match="delta_range"):
        agent = AGENTS["dqn"](delta_range=(-2.0, 2.0))
    assert agent.delta_clip == 2.0


def test_lists_and_dicts_that_are_passed_in_stay_as_they_are():
    metrics, objects = ["mae"], {}
    for _ in range(2):
        agent = AGENTS["dqn"](custom_model_objects=objects)
        agent.compile("adam", metrics=metrics)
        assert agent.metrics_names == ["loss", "mae", "mean_q"]
    assert metrics == ["mae"] and objects == {}


def test_values_of_small_classes():
    assert Experience._fields == ("state0", "action", "reward", "state1", "terminal1")
    policy = EpsGreedyQPolicy(eps=0.3)
    policy.eps = 0.0
    assert policy.select_action(q_values=np.array([1.0, 3.0, 2.0])) == 1
    noise = OrnsteinUhlenbeckProcess(theta=0.15, mu=0.0, sigma=0.3, size=2)
    noise.reset_states()
    assert noise.sample().shape == (2,) and noise.current_sigma == 0.3
    episodes = EpisodeParameterMemory(limit=5, window_length=1)
    for total in (1.0, 2.0):
        for terminal in (False, True):
            episodes.append(np.zeros(3), 0, total, terminal)
        episodes.finalize_episode(np.full(2, total))
    params, rewards = episodes.sample(2, batch_idxs=[0, 1])
    assert rewards == [2.0, 4.0] and [p.tolist() for p in params] == [[1.0, 1.0], [2.0, 2.0]]
    assert episodes.intermediate_rewards == [] and len(episodes.params) == len(episodes.total_rewards) == 2
