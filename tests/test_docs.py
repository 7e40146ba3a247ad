"""What the documentation shows works: its scripts run, its links lead somewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    targets = [target.partition("#") for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    for path, _, anchor in targets:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.M)
            assert anchor in [re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_readme_example_runs(tmp_path):
    script = python_blocks("README.md")[0]
    assert "nb_steps=100000" in script and "nb_episodes=10" in script
    script = script.replace("nb_steps=100000", "nb_steps=100").replace("nb_episodes=10", "nb_episodes=2")
    # As users run it: a file without a guard, in which worker processes must not start over.
    (tmp_path / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert "Episode 2: reward:" in done.stdout
    assert done.stdout.count("Testing for 2 episodes") == 1


def test_the_agent_of_the_guide_learns():
    import keras

    from rl.memory import SequentialMemory

    source, *_ = python_blocks("docs/writing_an_agent.md")
    assert source[source.index("@keras.saving") :].strip() in (ROOT / "examples/custom_agent.py").read_text("utf-8")
    namespace = {}
    exec(source, namespace)

    env = gymnasium.make("CartPole-v1")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
    agent = namespace["SoftQAgent"](
        model=model, alpha=0.5, nb_actions=2, memory=SequentialMemory(limit=100), nb_steps_warmup=10
    )
    agent.compile("adam", jit_compile=False)
    before = model.get_weights()
    agent.fit(env, nb_steps=60, verbose=0, seed=1)
    assert agent.metrics_names[:2] == ["loss", "mean_v"]
    assert all(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))
    agent.test(env, nb_episodes=1, visualize=False, verbose=0)
    assert agent.from_config(agent.get_config()).alpha == 0.5


def test_the_rollout_agent_of_the_guide_learns():
    from rl.networks import actor_critic

    _, source, *_ = python_blocks("docs/writing_an_agent.md")
    namespace = {}
    exec(source, namespace)

    env = gymnasium.make("CartPole-v1")
    agent = namespace["HuberActorCritic"](
        *actor_critic(env), env.action_space, delta=0.5, nb_total_steps=80, nb_rollout_steps=20, entropy_weight=0.1
    )
    agent.compile("adam", ["mae"], jit_compile=False)
    before = agent.model.get_weights()
    agent.fit(env, nb_steps=60, verbose=0, seed=1)
    assert agent.metrics_names[:5] == ["loss", "mae", "policy_loss", "value_loss", "entropy"]
    assert all(np.any(a != b) for a, b in zip(before, agent.model.get_weights(), strict=True))
    assert agent.scheduled()["entropy_weight"] == pytest.approx(0.025)
    agent.test(env, nb_episodes=1, visualize=False, verbose=0)
    again = agent.from_config(agent.get_config())
    assert (again.delta, again.nb_total_steps, again.nb_rollout_steps) == (0.5, 80, 20)


@pytest.mark.parametrize("number", [2, 3])
def test_the_tables_of_the_guide_learn(number):
    namespace = {}
    exec(python_blocks("docs/writing_an_agent.md")[number], namespace)
    env = gymnasium.make("FrozenLake-v1", is_slippery=False)
    agent = namespace["TabularAgent"](4) if number == 2 else namespace["TabularLanes"](16, 4)
    agent.compile()
    agent.fit(env, nb_steps=8000, verbose=0, seed=0)
    history = agent.test(env, nb_episodes=2, visualize=False, verbose=0).history
    assert history["episode_reward"] == [1.0, 1.0]
    assert history["nb_steps"] == [6, 6]
    if number == 3:
        from rl.common.vec_env import DummyVecEnv

        agent = namespace["TabularLanes"](16, 4)
        agent.compile()
        lanes = DummyVecEnv([lambda: gymnasium.make("FrozenLake-v1", is_slippery=False)] * 3)
        agent.fit(lanes, nb_steps=24000, verbose=0, seed=0)
        assert agent.test(env, nb_episodes=1, visualize=False, verbose=0).history["nb_steps"] == [6]


@pytest.mark.parametrize("number", range(5))
def test_the_recipes_on_ppos_page_make_agents_that_learn(number):
    recipes = python_blocks("docs/agents/ppo.md")
    assert len(recipes) == 5
    namespace = {}
    exec(recipes[number], namespace)
    env, agent = namespace["env"], namespace["agent"]
    before = agent.model.get_weights()
    agent.fit(env, nb_steps=agent.nb_rollout_steps, verbose=0, seed=1)
    assert all(np.any(a != b) for a, b in zip(before, agent.model.get_weights(), strict=True))


def test_the_readmes_three_lines_make_an_agent_that_learns():
    _, lines, *_ = python_blocks("README.md")
    env = gymnasium.make("CartPole-v1")
    namespace = {"env": env}
    exec(lines, namespace)
    agent = namespace["ppo"]
    agent.compile(jit_compile=False)
    agent.fit(env, nb_steps=agent.nb_rollout_steps, verbose=0, seed=1)
    assert agent.run_state.nb_updates == 4
