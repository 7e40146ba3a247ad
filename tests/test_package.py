"""What importing costs, what may import what, and where names are found."""

import ast
import importlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from setuptools import find_packages

import rl

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = ("tensorflow", "jax", "torch")
SOURCES = sorted((ROOT / "rl").rglob("*.py"))
# By path: to walk the packages would be to import them, also in the worker that imports this file.
MODULES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SOURCES}
LIGHT_MODULES = [name for name in MODULES.values() if name == "rl" or f"{name}.".startswith("rl.common.")]

# Where keras-rl's users look for things.
DOCUMENTED = {
    "rl.core": ["Agent", "Processor", "Env", "Space"],
    "rl.agents": ["DQNAgent"],
    "rl.agents.dqn": ["AbstractDQNAgent", "DQNAgent", "mean_q"],
    "rl.memory": [
        *("Experience", "sample_batch_indexes", "RingBuffer", "zeroed_observation", "Memory"),
        "SequentialMemory",
    ],
    "rl.policy": [
        *("Policy", "LinearAnnealedPolicy", "SoftmaxPolicy", "EpsGreedyQPolicy", "GreedyQPolicy"),
        *("BoltzmannQPolicy", "MaxBoltzmannQPolicy", "BoltzmannGumbelQPolicy"),
    ],
    "rl.callbacks": [
        *(
            "Callback",
            "CallbackList",
            "TestLogger",
            "TrainEpisodeLogger",
            "TrainIntervalLogger",
            "FileLogger",
        ),
        *("Visualizer", "ModelIntervalCheckpoint", "WandbLogger"),
    ],
    "rl.processors": ["MultiInputProcessor", "WhiteningNormalizerProcessor", "Processor"],
    "rl.random": [
        *("RandomProcess", "AnnealedGaussianProcess", "GaussianWhiteNoiseProcess", "OrnsteinUhlenbeckProcess"),
    ],
    "rl.util": [
        *("clone_model", "clone_optimizer", "get_object_config", "huber_loss", "WhiteningNormalizer"),
    ],
    "rl.common": ["set_global_seeds"],
    "rl.common.cmd_util": ["make_gym_env"],
    "rl.common.vec_env": ["VecEnv", "SubprocVecEnv", "DummyVecEnv", "CloudpickleWrapper"],
    "rl.common.vec_env.subproc_env_vec": ["SubprocVecEnv"],
    "rl.common.tile_images": ["tile_images"],
}


def python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in (
            "import_module",
            "__import__",
        ):
            yield from (part.value for part in node.args[:1] if isinstance(part, ast.Constant))


def test_importing_what_workers_need_loads_no_keras():
    code = (
        f"import importlib, sys\nfor name in {LIGHT_MODULES}: importlib.import_module(name)\n"
        f"print([name for name in ('keras', *{BACKENDS}) if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "[]", done.stderr
    assert len(LIGHT_MODULES) > 5


class LoadedModulesEnv(gymnasium.Env):
    """Its observations say whether its process has loaded Keras, and a backend."""

    observation_space = gymnasium.spaces.Box(0, 1, (2,), np.int8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        backend = any(name in sys.modules for name in BACKENDS)
        return np.array(["keras" in sys.modules, backend], np.int8), {}

    def step(self, action):
        raise NotImplementedError


def test_env_worker_loads_no_keras():
    import keras  # noqa: F401  (loaded here, as in a user's script)

    from rl.common.vec_env import SubprocVecEnv

    env = SubprocVecEnv([LoadedModulesEnv] * 3)
    try:
        observation, _ = env.reset()
        np.testing.assert_array_equal(observation, np.zeros((3, 2)))
    finally:
        env.close()


def test_every_module_imports_without_a_warning_and_without_optional_packages():
    other = "tensorflow" if os.environ["KERAS_BACKEND"] == "jax" else "jax"
    optional = ("wandb", "tensorboard", "matplotlib", "pygame", "tqdm", "moviepy", "ale_py", "cv2", other)
    names = [name for name in MODULES.values() if not name.startswith(f"rl.backend.{other}")]
    code = (
        f"import importlib, sys\nfor name in {optional}: sys.modules[name] = None\n"
        f"for name in {names}: importlib.import_module(name)"
    )
    done = python("-W", "error", "-c", code)
    assert done.returncode == 0, done.stderr


def test_only_the_backend_package_imports_a_backend():
    found = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in SOURCES
        for name in imported_modules(ast.parse(path.read_text("utf-8")))
        if name.split(".")[0] in BACKENDS and path.parent != ROOT / "rl" / "backend"
    }
    assert found == set()
    for name in ("tensorflow", "jax"):  # the scan sees what there is
        seam = ast.parse((ROOT / "rl" / "backend" / f"{name}.py").read_text("utf-8"))
        assert {x.split(".")[0] for x in imported_modules(seam)} & set(BACKENDS) == {name}


def private_names(thing):
    return {name for name in dir(thing) if name.startswith("_") and not name.startswith("__")}


def test_no_module_reaches_into_keras():
    """Neither into `keras.src`, nor for an attribute that Keras keeps to itself, read or overridden."""
    import keras

    instances = (keras.Model(), keras.layers.Layer(), keras.callbacks.Callback(), keras.optimizers.SGD())
    private = {type(thing): private_names(thing) for thing in instances}
    anywhere = set().union(*private.values())
    assert "_tracker" in anywhere
    found = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text("utf-8"))
        names = list(imported_modules(tree))
        if not any(name.split(".")[0] == "keras" for name in names):
            continue
        found |= {f"{path.name}: {name}" for name in names if re.match(r"keras\.(src|.*\._)", name)}
        module = importlib.import_module(MODULES[path])
        own = {}  # nodes inside a class: the names that Keras keeps to itself in that class
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                bases = getattr(module, node.name).__mro__
                names = set().union(*(private.get(base, ()) for base in bases))
                own |= dict.fromkeys(ast.walk(node), names)
        for node in ast.walk(tree):
            forbidden = own.get(node, anywhere)
            if isinstance(node, ast.Attribute):
                name = node.attr
                if getattr(node.value, "id", None) != "self":
                    forbidden = anywhere
            elif isinstance(node, ast.FunctionDef):
                name, forbidden = node.name, own.get(node, ())
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
                "getattr",
                "setattr",
                "hasattr",
            ):
                name, forbidden = getattr(node.args[1], "value", None), anywhere
            else:
                continue
            if name in forbidden:
                found.add(f"{path.name}:{node.lineno}: {name}")
    assert found == set()


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_names_are_where_users_look(module):
    loaded = importlib.import_module(module)
    missing = [name for name in DOCUMENTED[module] if not hasattr(loaded, name)]
    assert missing == []


def test_star_import_brings_the_documented_names():
    for module in ("rl.memory", "rl.util"):
        namespace = {}
        exec(f"from {module} import *", namespace)
        assert set(DOCUMENTED[module]) <= set(namespace)


def test_every_folder_with_code_is_packaged():
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in SOURCES}
    assert folders == set(find_packages(str(ROOT), include=["rl", "rl.*"]))


def test_version_is_that_of_the_distribution():
    try:
        version = importlib.metadata.version("keras-rl3")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("keras-rl3 is not installed, only on the path")
    assert rl.__version__ == version
