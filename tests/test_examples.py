"""Every example starts from nothing, trains, tests and ends."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
# Enough steps to get past the warm-up and through some gradient steps, no more: each is a new process.
ARGUMENTS = {
    "dqn_cartpole.py": ["--nb-steps", "1100", "--nb-test-episodes", "2", "--save-weights", "x.weights.h5"],
    "dqn_cartpole_vec.py": ["--nb-steps", "300", "--num-env", "3", "--nb-test-episodes", "2"],
    "duel_dqn_cartpole.py": ["--nb-steps", "1100", "--nb-test-episodes", "2", "--log", "duel.json"],
    "dqn_atari.py": [
        *("--nb-steps", "80", "--nb-steps-warmup", "40", "--limit", "1000", "--num-env", "2"),
        *("--nb-test-episodes", "1", "--nb-max-test-steps", "20"),
    ],
    "ppo_cartpole.py": ["--nb-steps", "300", "--num-env", "3", "--nb-test-episodes", "2"],
    "ppo_pendulum.py": [
        *("--nb-steps", "100", "--num-env", "2", "--nb-rollout-steps", "40", "--normalize"),
        *("--nb-test-episodes", "2"),
    ],
    "ppo_lunarlander.py": [
        *("--nb-steps", "100", "--num-env", "2", "--nb-rollout-steps", "40", "--continuous"),
        *("--nb-test-episodes", "2"),
    ],
    "ppo_atari.py": [
        *("--nb-steps", "40", "--num-env", "2", "--nb-rollout-steps", "16"),
        *("--nb-test-episodes", "1", "--nb-max-test-steps", "20"),
    ],
    "a2c_cartpole.py": ["--nb-steps", "300", "--num-env", "3", "--nb-test-episodes", "2"],
    "cem_cartpole.py": ["--nb-steps", "2000", "--num-env", "3", "--nb-test-episodes", "2"],
    "custom_agent.py": ["--nb-steps", "300", "--num-env", "3", "--nb-test-episodes", "2"],
    "ddpg_pendulum.py": ["--nb-steps", "1020", "--nb-test-episodes", "1", "--save-weights", "p.weights.h5"],
    "td3_pendulum.py": ["--nb-steps", "1020", "--num-env", "3", "--nb-test-episodes", "2"],
    "sac_pendulum.py": ["--nb-steps", "1020", "--num-env", "3", "--nb-test-episodes", "2"],
    "sac_halfcheetah.py": [
        *("--nb-steps", "30", "--nb-steps-warmup", "20", "--num-env", "2"),
        *("--nb-test-episodes", "1", "--nb-max-test-steps", "20"),
    ],
    "naf_pendulum.py": ["--nb-steps", "1020", "--nb-test-episodes", "1", "--save-weights", "n.weights.h5"],
    "ddpg_mujoco.py": [
        *("--nb-steps", "30", "--nb-steps-warmup", "20", "--num-env", "2"),
        *("--nb-test-episodes", "1", "--nb-max-test-steps", "20"),
    ],
    "sarsa_cartpole.py": ["--nb-steps", "300", "--num-env", "3", "--nb-test-episodes", "2", "--expected"],
}
NEEDS = {
    "dqn_atari.py": ["ale_py", "cv2"],
    "ppo_atari.py": ["ale_py", "cv2"],
    "ppo_lunarlander.py": ["Box2D"],
    "ddpg_mujoco.py": ["mujoco"],
    "sac_halfcheetah.py": ["mujoco"],
}


# Nothing is written unless asked for.
FILES = {
    "dqn_cartpole.py": ["x.weights.h5"],
    "duel_dqn_cartpole.py": ["duel.json"],
    "ddpg_pendulum.py": ["p_actor.weights.h5", "p_critic.weights.h5"],
    "naf_pendulum.py": ["n.weights.h5"],
}


def run(command, cwd):
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_example_is_run():
    assert sorted(path.name for path in (ROOT / "examples").glob("*.py")) == sorted([*ARGUMENTS, "visualize_log.py"])


@pytest.fixture(scope="module")
def started(request, tmp_path_factory):
    """The examples that are to be tested, two at a time, since each mostly waits for imports: `{name: (folder, run)}`.

    `run` is a future of what it prints.
    """
    wanted = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_example[")]
    folders = {name: tmp_path_factory.mktemp(name.removesuffix(".py")) for name in wanted}
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: (folder, pool.submit(run, [str(ROOT / "examples" / name), *ARGUMENTS[name]], folder))
            for name, folder in folders.items()
            if all(importlib.util.find_spec(module) for module in NEEDS.get(name, []))
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_example(name, started):
    for module in NEEDS.get(name, []):
        pytest.importorskip(module)
    folder, future = started[name]
    output = future.result()
    assert "Episode 1: reward:" in output  # the last thing each of them does is to test
    if name.startswith(("ppo", "a2c", "sarsa", "custom", "ddpg", "td3", "sac", "naf")):
        header, row = re.search(r"^( +steps .*)\n(.*)$", output, re.M).groups()
        metrics = dict(zip(header.split(), row.split(), strict=True))
        assert np.isfinite(float(metrics["loss"]))  # "--" where nothing was learnt
        assert re.search(r"^Mean return of the greedy policy: -?\d+\.\d$", output, re.M)
    written = {path.name for path in folder.iterdir()} - {"MUJOCO_LOG.TXT"}  # where MuJoCo warns
    assert sorted(written) == FILES.get(name, [])


def test_a_log_is_drawn_without_a_screen(tmp_path):
    pytest.importorskip("matplotlib")
    log = {"episode": [0, 1, 2], "episode_reward": [1.0, 2.0, 4.0], "nb_steps": [10, 30, 70], "loss": [None, None, 0.5]}
    (tmp_path / "log.json").write_text(json.dumps({**log, "mae": [None] * 3}))
    script = str(ROOT / "examples" / "visualize_log.py")
    drawn = {}
    for name, options in (("all.png", []), ("some.png", ["--nb-steps", "30"]), ("all.svg", ["--figsize", "4", "3"])):
        output = run([script, "log.json", "--output", name, *options], tmp_path)
        drawn[name] = re.search("Drew (.*) to", output).group(1)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert drawn == {"all.png": "episode_reward, loss", "some.png": "episode_reward", "all.svg": "episode_reward, loss"}
    assert "loss" in (tmp_path / "all.svg").read_text()
    (tmp_path / "log.json").write_text("{}")
    done = subprocess.run([sys.executable, script, "log.json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "holds no episode to draw" in done.stderr
