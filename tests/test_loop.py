"""What the loop calls, in which order and how often; when it stops; what Ctrl-C does."""

import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest

from rl.callbacks import Callback
from rl.common.vec_env import AutoresetMode, DummyVecEnv
from rl.loop import Interrupts, RunState
from tests.toy_agents import Noting, recorder
from tests.toy_envs import Counting

MODES = list(AutoresetMode)


def lanes_of(nb_lanes, mode=AutoresetMode.SAME_STEP, **options):
    return DummyVecEnv([lambda i=i: Counting(i, **options) for i in range(nb_lanes)], autoreset_mode=mode)


def short(call):
    """A hook's call as `name index@lane`, an agent's as `name lanes`."""
    name, what, logs = (*call, None, None)[:3]
    if name == "act":
        return "act " + " ".join(f"{int(row[1])}.{int(row[2])}" for row in what)
    if name == "observe":
        return "observe " + "".join("+" if v else "-" for v in what.valid)
    if name == "open_lanes":
        return f"open {what}"
    if name.startswith("on_train"):
        return f"{name[3:]} {what}"
    if name == "on_vector_step_end":
        return f"vector {what['nb_steps']} {what['step']}"
    if name.startswith("on_action"):
        return f"{name[3:]} e{logs['episode']}@{logs['lane']}"
    return f"{name[3:]} {what}@{logs['lane']}"


def trace(agent, run):
    """What `run(callback)` made the agent and a callback with all hooks see, in order."""
    agent.calls.clear()
    run(recorder(agent.calls))
    return [short(call) for call in agent.calls]


def test_keras_epochs_count_the_episodes_that_ended():
    agent, epochs = Noting(), []
    for env, seed in ((Counting(), None), (Counting(), None), (lanes_of(3), None), (Counting(), 1), (Counting(), 2)):
        epochs += agent.fit(env, 17, verbose=0, seed=seed).epoch  # each of which leaves an episode open
    assert epochs == list(range(len(epochs))) and len(epochs) == agent.run_state.finished > 15
    assert agent.run_state.episode > len(epochs)


def test_the_metrics_of_an_episode_are_means_over_updates_not_over_calls():
    class Learning(Noting):
        def observe(self, transition):
            k = self.step // 3  # a call of k updates, whose mean is k
            self.run_state.nb_updates += k
            return np.array([float(k)]) if k % 4 else None

    history = Learning().fit(lanes_of(3, lengths=(5,)), 15, verbose=0).history
    weights = np.array([1, 2, 3, 5])
    np.testing.assert_allclose(history["loss"], [(weights * weights).sum() / weights.sum()] * 3)


def test_sums_of_metrics_lose_no_update_in_a_long_life():
    state = RunState()
    state.add(np.array([1e8, np.nan], np.float32), 0)
    for _ in range(100):
        state.nb_updates += 2
        state.add(np.array([1.0, 0.5], np.float32), state.nb_updates - 2)
    np.testing.assert_array_equal(state.metric_sum, [1e8 + 200, 100])
    np.testing.assert_array_equal(state.metric_count, [201, 200])


# ---- the golden traces ----------------------------------------------------------------------------------------------


def step_of(lane, episode, step, act, count, observe="observe +"):
    return [
        f"step_begin {step}@{lane}",
        f"act {act}",
        f"action_begin e{episode}@{lane}",
        f"action_end e{episode}@{lane}",
        observe,
        f"step_end {step}@{lane}",
        f"vector {count}",
    ]


def test_trace_of_fit_on_one_env_and_of_a_second_fit_that_goes_on_with_the_open_episode():
    agent, env = Noting(), Counting(lengths=(2, 3))
    assert trace(agent, lambda c: agent.fit(env, nb_steps=4, callbacks=[c], verbose=0)) == [
        "open 1",
        "train_begin {}",
        "episode_begin 0@0",
        *step_of(0, 0, 0, "0.0", "1 1"),
        *step_of(0, 0, 1, "0.1", "2 2"),
        "episode_end 0@0",
        "episode_begin 1@0",
        *step_of(0, 1, 0, "1.0", "3 3"),
        *step_of(0, 1, 1, "1.1", "4 4"),
        "train_end {'did_abort': False}",
    ]
    assert trace(agent, lambda c: agent.fit(env, nb_steps=2, callbacks=[c], verbose=0)) == [
        "train_begin {}",
        "episode_begin 1@0",  # new to these callbacks
        *step_of(0, 1, 2, "1.2", "5 1"),
        "episode_end 1@0",
        "episode_begin 2@0",
        *step_of(0, 2, 0, "2.0", "6 2"),
        "train_end {'did_abort': False}",
    ]
    assert env.nb_resets == 3


def test_trace_of_test_on_one_env():
    agent, env = Noting(), Counting(lengths=(1, 2))
    assert trace(agent, lambda c: agent.test(env, 2, callbacks=[c], visualize=False, verbose=0)) == [
        "open 1",
        "train_begin {}",
        "episode_begin 0@0",
        *step_of(0, 0, 0, "0.0", "1 1"),
        "episode_end 0@0",
        "episode_begin 1@0",
        *step_of(0, 1, 0, "1.0", "2 2"),
        *step_of(0, 1, 1, "1.1", "3 3"),
        "episode_end 1@0",
        "train_end {'did_abort': False}",
    ]
    assert agent.step == 0


def test_trace_of_fit_on_three_lanes():
    agent = Noting()
    env = DummyVecEnv([lambda i=i: Counting(i, lengths=(i + 1, 9)) for i in range(3)])
    assert trace(agent, lambda c: agent.fit(env, nb_steps=6, callbacks=[c], verbose=0)) == [
        "open 3",
        "train_begin {}",
        *[f"episode_begin {i}@{i}" for i in range(3)],
        *[f"step_begin 0@{i}" for i in range(3)],
        "act 0.0 0.0 0.0",
        *[f"action_begin e{i}@{i}" for i in range(3)],
        *[f"action_end e{i}@{i}" for i in range(3)],
        "observe +++",
        *[f"step_end 0@{i}" for i in range(3)],
        "vector 3 3",
        "episode_end 0@0",
        "episode_begin 3@0",
        "step_begin 0@0",
        "step_begin 1@1",
        "step_begin 1@2",
        "act 1.0 0.1 0.1",
        "action_begin e3@0",
        "action_begin e1@1",
        "action_begin e2@2",
        "action_end e3@0",
        "action_end e1@1",
        "action_end e2@2",
        "observe +++",
        "step_end 0@0",
        "step_end 1@1",
        "step_end 1@2",
        "vector 6 6",
        "episode_end 1@1",
        "train_end {'did_abort': False}",
    ]


def test_trace_of_test_on_three_lanes_keeps_to_the_quota_of_each_lane():
    agent = Noting()
    env = DummyVecEnv([lambda i=i: Counting(i, lengths=(i + 1,)) for i in range(3)])
    calls = trace(agent, lambda c: agent.test(env, 4, callbacks=[c], visualize=False, verbose=0))
    hooks = [c for c in calls if c.startswith(("episode", "step"))]
    assert hooks == [
        *[f"episode_begin {i}@{i}" for i in range(3)],
        *[f"step_begin 0@{i}" for i in range(3)],
        *[f"step_end 0@{i}" for i in range(3)],
        "episode_end 0@0",
        "episode_begin 3@0",
        *["step_begin 0@0", "step_begin 1@1", "step_begin 1@2", "step_end 0@0", "step_end 1@1", "step_end 1@2"],
        "episode_end 3@0",
        "episode_end 1@1",
        *["step_begin 2@2", "step_end 2@2", "episode_end 2@2"],  # the others still move, unreported
    ]


def test_a_row_in_which_a_lane_only_resets_itself_fires_no_step_hook():
    agent = Noting()
    env = DummyVecEnv([lambda i=i: Counting(i, lengths=(i + 1,)) for i in range(2)], autoreset_mode="NextStep")
    calls = trace(agent, lambda c: agent.fit(env, nb_steps=5, callbacks=[c], verbose=0))
    assert [c for c in calls if c.startswith("observe")] == ["observe ++", "observe -+", "observe +-", "observe -+"]
    own = [c for c in calls if c.endswith("@0")]
    one = ["step_begin 0@0", "action_begin e{0}@0", "action_end e{0}@0", "step_end 0@0", "episode_end {0}@0"]
    assert own == [
        *["episode_begin 0@0", *[c.format(0) for c in one]],
        *["episode_begin 2@0", *[c.format(2) for c in one]],
    ]


@pytest.mark.parametrize("mode", MODES)
def test_start_steps_fire_no_step_hooks_and_count_nowhere(mode):
    agent, calls = Noting(), []
    env = lanes_of(3, mode, lengths=(9,))
    agent.fit(env, nb_steps=240, nb_max_start_steps=4, callbacks=[recorder(calls)], verbose=0, seed=0)
    nb_valid = sum(int(t.valid.sum()) for t in agent.transitions())
    assert nb_valid == agent.step == len([c for c in calls if c[0] == "on_step_end"])
    lengths = [c[2]["nb_episode_steps"] for c in calls if c[0] == "on_episode_end"]
    assert set(lengths) == {6, 7, 8, 9}


# ---- what the hooks are told ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_each_step_begins_and_ends_once_in_the_right_episode(mode, nb_lanes):
    agent, calls = Noting(interval=2), []
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes, mode)
    for _ in range(3):  # the second and third fit go on
        agent.fit(env, nb_steps=20, callbacks=[recorder(calls)], verbose=0)
    open_steps, ended, begun, ids, episode_of_lane = {}, [], [], [], {}
    for name, index, logs in [c for c in calls if len(c) == 3]:
        lane = logs["lane"]
        if name == "on_episode_begin":
            assert lane not in open_steps
            if episode_of_lane.get(lane) != index:
                assert index not in begun
                begun.append(index)
            episode_of_lane[lane] = index
        elif name == "on_step_begin":
            assert logs["episode"] == episode_of_lane[lane]
            open_steps[lane] = [index]
        elif name in ("on_action_begin", "on_action_end"):
            open_steps[lane].append(int(index))
        elif name == "on_step_end":
            step, first, second = open_steps.pop(lane)
            assert step == index
            assert first == second == logs["action"]
            number, episode, t = logs["observation"]
            assert (number, t, logs["reward"]) == (lane, index + 1, index + 1)
            assert set(logs) == {"action", "observation", "reward", "metrics", "episode", "info", "lane"}
            assert logs["episode"] == episode_of_lane[lane]
            assert np.shape(logs["metrics"]) == (1,)
            assert "total" in logs["info"]
            ids.append((lane, int(episode), logs["episode"]))
        elif name == "on_episode_end":
            assert index == episode_of_lane[lane]
            length = logs["nb_episode_steps"]
            assert logs["episode_reward"] == length * (length + 1) / 2
            assert logs["nb_steps"] <= agent.step
            ended.append(index)
    assert not open_steps
    assert len(ended) == len(set(ended)) > 5
    assert begun == list(range(len(begun)))  # lifetime ids, given in order
    assert len({(lane, episode) for lane, episode, _ in ids}) == len({i for *_, i in ids}) == len(begun)


def test_metrics_of_a_step_are_nan_without_an_update_and_those_of_an_episode_are_means():
    agent, calls = Noting(interval=2), []
    agent.fit(Counting(lengths=(1, 4, 3)), nb_steps=8, callbacks=[recorder(calls)], verbose=0)
    steps = [c[2]["metrics"][0] for c in calls if c[0] == "on_step_end"]
    np.testing.assert_array_equal(steps, [np.nan, 2, np.nan, 4, np.nan, 6, np.nan, 8])
    means = [c[2]["loss"] for c in calls if c[0] == "on_episode_end"]
    np.testing.assert_array_equal(means, [np.nan, 3, 7])


def test_step_logs_in_test_have_no_metrics():
    agent, calls = Noting(), []
    agent.test(lanes_of(2), 3, callbacks=[recorder(calls)], visualize=False, verbose=0)
    steps = [c[2] for c in calls if c[0] == "on_step_end"]
    assert steps
    assert all("metrics" not in logs for logs in steps)
    ends = [c[2] for c in calls if c[0] == "on_episode_end"]
    assert all(logs["nb_steps"] == logs["nb_episode_steps"] for logs in ends)
    assert all("loss" not in logs for logs in ends)


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_logged_observations_are_not_overwritten_by_later_steps(nb_lanes):
    class Reusing(Counting):
        def _obs(self):
            self.buffer = getattr(self, "buffer", np.zeros(3, np.float32))
            self.buffer[:] = super()._obs()
            return self.buffer

    agent, calls = Noting(), []
    env = Reusing() if nb_lanes == 1 else DummyVecEnv([lambda i=i: Reusing(i) for i in range(nb_lanes)])
    agent.fit(env, nb_steps=12 * nb_lanes, callbacks=[recorder(calls, ("on_step_end",))], verbose=0)
    times = [c[2]["observation"][2] for c in calls if c[2]["lane"] == 0]
    np.testing.assert_array_equal(times, [1, 2, 3, 1, 2, 3, 4, 5, 1, 2, 3, 4])


def test_without_step_hooks_no_hook_is_called_per_step(monkeypatch):
    def refuse(*args):
        raise AssertionError

    for name in ("on_step_begin", "on_step_end", "on_action_begin", "on_action_end"):
        monkeypatch.setattr(f"rl.callbacks.CallbackList.{name}", refuse)
    Noting().fit(lanes_of(3), nb_steps=30, callbacks=[recorder([], ("on_episode_end",))], verbose=0)


# ---- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_lanes", [1, 3])
@pytest.mark.parametrize("hook", ["on_step_begin", "on_step_end", "on_vector_step_end", "on_action_end"])
def test_stop_training_in_a_step_hook_ends_fit_after_that_step(hook, nb_lanes):
    agent = Noting()
    seen = []

    def stop(self, *args):
        seen.append(self.model.step)
        if self.model.step >= 2 * nb_lanes:
            self.model.stop_training = True

    ends = []
    callbacks = [type("Stopper", (Callback,), {hook: stop})(), recorder(ends, ("on_train_end",))]
    env = Counting() if nb_lanes == 1 else lanes_of(nb_lanes)
    agent.fit(env, nb_steps=1000, callbacks=callbacks, verbose=0)
    nb_calls = 3 if hook in ("on_step_begin", "on_action_end") else 2  # these see the count before the step
    assert agent.step == nb_calls * nb_lanes
    assert ends == [("on_train_end", {"did_abort": False})]
    before = agent.step
    agent.fit(env, nb_steps=5, verbose=0)  # told to stop once, not for ever
    assert agent.step - before in range(5, 5 + nb_lanes)


@pytest.mark.parametrize("plain", [False, True])
def test_stop_training_at_the_end_of_an_episode_still_reports_those_that_end_with_it(plain):
    class Stopper(keras.callbacks.Callback if plain else Callback):
        def stop(self, index, logs=None):
            self.model.stop_training = True

    setattr(Stopper, "on_epoch_end" if plain else "on_episode_end", Stopper.stop)
    agent = Noting()
    env = DummyVecEnv([lambda: Counting(lengths=(2,))] * 2 + [lambda: Counting(lengths=(3,))])
    history = agent.fit(env, nb_steps=1000, callbacks=[Stopper()], verbose=0)
    assert agent.step == 6
    assert history.history["episode_reward"] == [3.0, 3.0]


def test_stop_training_in_test_ends_the_test_only():
    class Stopper(Callback):
        def on_episode_end(self, episode, logs=None):
            self.model.stop_training = True

    agent = Noting()
    history = agent.test(Counting(), 10, callbacks=[Stopper()], visualize=False, verbose=0)
    assert len(history.history["episode_reward"]) == 1
    assert agent.stop_training is False


def test_run_state_refuses_what_it_does_not_know():
    with pytest.raises(AttributeError):
        RunState().steps = 3
    assert all(getattr(RunState(), name) == 0 for name in RunState.COUNTERS)


# ---- Ctrl-C ---------------------------------------------------------------------------------------------------------


class Pressing(Counting):
    """Ctrl-C is pressed during the steps with these numbers."""

    def __init__(self, *presses, times=1, **options):
        super().__init__(**options)
        self.presses, self.times, self.finished = presses, times, 0

    def step(self, action):
        result = super().step(action)
        for _ in range(self.times if self.total in self.presses else 0):
            signal.raise_signal(signal.SIGINT)
        self.finished += 1
        return result


@pytest.fixture(autouse=True)
def handler_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("method", ["fit", "test"])
def test_ctrl_c_ends_the_run_after_the_step_and_returns_the_history(method):
    agent, env, ends = Noting(), Pressing(7, lengths=(3,)), []
    options = {"nb_steps": 1000} if method == "fit" else {"nb_episodes": 1000, "visualize": False}
    history = getattr(agent, method)(env, callbacks=[recorder(ends, ("on_train_end",))], verbose=0, **options)
    assert history.history["episode_reward"] == [6.0, 6.0]
    assert ends == [("on_train_end", {"did_abort": True})]
    assert env.finished == env.total == 7
    assert len(agent.transitions()) == 7  # the step was learnt from
    assert not agent.training


def test_a_fit_after_ctrl_c_goes_on_with_the_open_episode():
    agent, env = Noting(), Pressing(4, lengths=(3,))
    agent.fit(env, nb_steps=1000, verbose=0)
    assert (agent.step, env.nb_resets) == (4, 2)
    history = agent.fit(env, nb_steps=6, verbose=0)
    assert (agent.step, env.nb_resets) == (10, 4)
    assert history.history["episode_reward"] == [6.0, 6.0]


def test_a_second_ctrl_c_breaks_into_the_step_and_the_agent_stays_usable():
    agent, env, ends = Noting(), Pressing(5, times=2, lengths=(3,)), []
    history = agent.fit(env, nb_steps=1000, callbacks=[recorder(ends, ("on_train_end",))], verbose=0)
    assert ends == [("on_train_end", {"did_abort": True})]
    assert (env.total, env.finished) == (5, 4)
    assert history.history["episode_reward"] == [6.0]
    assert not agent.training
    history = agent.fit(env, nb_steps=6, verbose=0)
    assert history.history["episode_reward"] == [6.0, 6.0]  # from a reset: the env was in the middle of a step


def test_ctrl_c_in_a_nested_test_ends_both():
    class Evaluation(Callback):
        def on_episode_end(self, episode, logs=None):
            self.history = self.model.test(Pressing(4, lengths=(3,)), 10, visualize=False, verbose=0)

    agent, evaluation, ends = Noting(), Evaluation(), []
    agent.fit(Counting(lengths=(2,)), 1000, callbacks=[evaluation, recorder(ends, ("on_train_end",))], verbose=0)
    assert evaluation.history.history["episode_reward"] == [6.0]
    assert agent.step == 2
    assert ends == [("on_train_end", {"did_abort": True})]


def test_interrupts():
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        assert interrupts.pressed
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(RuntimeError), Interrupts():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert not interrupts.pressed
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_fit_in_a_thread():
    agent, results = Noting(), []
    thread = threading.Thread(target=lambda: results.append(agent.fit(Counting(), nb_steps=30, verbose=0)))
    thread.start()
    thread.join(30)
    assert len(results[0].history["episode_reward"]) == 7


SCRIPT = """
import os, time
import keras, numpy as np
from rl.agents.dqn import DQNAgent
from rl.callbacks import Callback
from rl.common.vec_env import SubprocVecEnv
from rl.memory import SequentialMemory
from tests.toy_envs import Counting

class Slow(Counting):
    def step(self, action):
        time.sleep(0.001)
        return super().step(action)

class Ready(Callback):
    def on_train_begin(self, logs=None):
        self.said = False
    def on_vector_step_end(self, logs=None):
        if logs["step"] >= 400 and not self.said:
            self.said = True
            print("pids", *self.env.worker_pids, flush=True)
    def on_train_end(self, logs=None):
        print("did_abort", logs["did_abort"], flush=True)

env = SubprocVecEnv([lambda i=i: Slow(i) for i in range(8)])
layers = keras.layers
model = keras.Sequential([layers.Input((1, 3)), layers.Flatten(), layers.Dense(3)])
agent = DQNAgent(model, nb_actions=3, memory=SequentialMemory(1000), nb_steps_warmup=100)
agent.compile("adam", jit_compile=False)
history = agent.fit(env, nb_steps=10_000_000, callbacks=[Ready()], verbose=0)
print("episodes", len(history.history["episode_reward"]), flush=True)
ENDING
print("end", flush=True)
"""


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ending", ["env.close()", "pass"])
def test_ctrl_c_of_a_terminal_on_subprocesses(tmp_path, ending):
    (tmp_path / "main.py").write_text(SCRIPT.replace("ENDING", ending))
    environ = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "main.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
        start_new_session=True,  # a group of its own, as in a terminal
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("pids"), line + process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    words = out.split()
    assert words[:3] == ["did_abort", "True", "episodes"], out
    assert int(words[3]) > 50
    assert words[4] == "end"
    assert err.count("Traceback") == 0, err
    deadline = time.monotonic() + 5
    alive = set(line.split()[1:])
    while alive and time.monotonic() < deadline:
        alive = {pid for pid in alive if os.path.exists(f"/proc/{pid}")}
        time.sleep(0.05)
    assert not alive
