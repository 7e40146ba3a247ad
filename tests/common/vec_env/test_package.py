"""What the package offers by name, and what its import costs."""

import subprocess
import sys

import pytest

import rl.common.vec_env as package

LAZY = {
    "adapters": ["from_gymnasium", "to_gymnasium", "LegacyVecEnv", "GymnasiumVecEnv", "VecEnvToGymnasium"],
    "checks": ["check_memory", "available_memory", "check_envs_equal"],
    "wrappers": [
        "VecEnvWrapper",
        "VecNormalize",
        "VecFrameStack",
        "VecMonitor",
        "VecVideoRecorder",
        "VecCheckNan",
        "frozen_statistics",
    ],
}


def test_everything_is_found_in_the_package():
    scope = {}
    exec("from rl.common.vec_env import *", scope)
    for module, names in LAZY.items():
        for name in names:
            found = getattr(package, name)
            assert found is scope[name] is getattr(sys.modules[f"rl.common.vec_env.{module}"], name)
            assert found.__name__ == name and name in package.__all__ and name in dir(package)
    assert len(set(package.__all__)) == len(package.__all__)
    assert set(package.__all__) <= set(dir(package)) and set(package.__all__) <= set(scope)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="'rl.common.vec_env' has no attribute 'VecNormalise'"):
        package.VecNormalise  # noqa: B018
    with pytest.raises(ImportError, match="VecNormalise"):
        from rl.common.vec_env import VecNormalise  # noqa: F401


@pytest.mark.parametrize("module", ["rl.common.vec_env", "rl.common.vec_env.worker"])
def test_workers_do_not_pay_for_wrappers_adapters_and_checks(module):
    # What `import gymnasium` itself loads, its own wrappers among it, is there in any case.
    code = f"""
import sys
import gymnasium
before = set(sys.modules)
import {module}
new = set(sys.modules) - before
print(sorted(name for name in new if name.startswith(("gymnasium.wrappers", "keras", "tensorflow"))))
print(sorted(name for name in new if name.rsplit(".", 1)[-1] in ("wrapper", "wrappers", "adapters", "checks")))
from rl.common.vec_env import VecNormalize
print(VecNormalize.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:3] == ["[]", "[]", "VecNormalize"]
