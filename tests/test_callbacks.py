"""Callbacks under a scripted loop, which calls the hooks in the order of `rl.loop.run` and trains nothing."""

import csv
import json
import math
import re
import sys
import types
import warnings

import keras
import numpy as np
import pytest

from rl.callbacks import (
    Callback,
    CallbackList,
    FileLogger,
    ModelIntervalCheckpoint,
    TestLogger,
    TrainEpisodeLogger,
    TrainIntervalLogger,
    Visualizer,
    WandbLogger,
    _number,
)

NAN = math.nan
METRICS = ["loss", "mae", "mean_q"]
# Of which lengths the episodes of each lane are. Their returns are 10 * length + lane.
LENGTHS = {1: [[3, 5, 4, 2, 6]], 3: [[3, 5, 4, 2], [2, 2, 7, 3], [4, 1, 1, 8]]}


class StandIn(keras.Model):
    """What callbacks see of an agent."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.run = types.SimpleNamespace(metric_sum=0.0, metric_count=0.0)
        self.counters = types.SimpleNamespace(step=0, training=False)
        self.saved = []
        self.compile(optimizer="sgd")
        self(np.zeros((1, 2), "float32"))

    run_state = property(lambda self: self.run)
    step = property(lambda self: self.counters.step)
    metrics_names = property(lambda self: list(METRICS))

    @property
    def training(self):
        return self.counters.training

    @training.setter
    def training(self, value):
        self.counters.training = value

    def call(self, states):
        return self.dense(states)

    def save_weights(self, filepath, overwrite=False):
        self.saved.append(str(filepath))
        super().save_weights(filepath, overwrite=overwrite)


class ScriptedLoop:
    """Plays episodes of given lengths; keeps lanes and counters between fits, as an agent does."""

    def __init__(self, nb_lanes=1, lengths=None, returns=None, update_from=None, env=None):
        self.agent = StandIn()
        self.agent.counters.training = False
        self.lengths = [list(lane) for lane in (lengths or LENGTHS[nb_lanes])]
        self.returns = list(returns) if returns else None
        self.update_from = 5 * nb_lanes if update_from is None else update_from  # first env step with an update
        self.env = env
        self.open = {}  # lane -> [episode, length, step at begin, sums at begin]
        self.next_episode = 0
        self.loss = 1.0
        self.finished = []  # (episode, return, length)

    def _begin(self, lane):
        totals = (np.copy(self.agent.run.metric_sum), np.copy(self.agent.run.metric_count))
        self.open[lane] = [self.next_episode, 0, totals]
        self.next_episode += 1

    def _metrics(self):
        if self.agent.step < self.update_from:
            return None
        self.loss *= 0.9
        return np.array([self.loss, 0.5, NAN if self.agent.step % 2 else 2.0])

    def fit(self, callbacks, nb_steps=None, nb_episodes=None, verbose=0, training=True, after_step=None, epoch=0):
        lanes = range(len(self.lengths))
        params = {"nb_steps": nb_steps, "nb_episodes": nb_episodes, "verbose": verbose}
        params |= {"nb_lanes": len(self.lengths), "metrics": METRICS}
        hooks = CallbackList(callbacks, model=self.agent, env=self.env, params=params, first_epoch=epoch)
        agent, first, nb_ended = self.agent, self.agent.step, 0
        agent.counters.training = training
        agent.stop_training = False
        hooks.on_train_begin({})
        for lane, entry in sorted(self.open.items()):
            hooks.on_episode_begin(entry[0], {"lane": lane})
        while any(self.lengths) and (nb_steps is None or agent.step - first < nb_steps):
            for lane in lanes:
                if lane not in self.open and self.lengths[lane]:
                    self._begin(lane)
                    hooks.on_episode_begin(self.open[lane][0], {"lane": lane})
            busy = sorted(self.open)
            if hooks.wants_steps:
                for lane in busy:
                    logs = {"episode": self.open[lane][0], "lane": lane}
                    hooks.on_step_begin(self.open[lane][1], logs)
                    hooks.on_action_begin(lane, logs)
            agent.counters.step += len(busy)
            metrics = self._metrics() if training else None
            if metrics is not None:
                agent.run.metric_sum = agent.run.metric_sum + np.where(np.isnan(metrics), 0, metrics)
                agent.run.metric_count = agent.run.metric_count + ~np.isnan(metrics)
            for lane in busy:
                self.open[lane][1] += 1
                if hooks.wants_steps:
                    hooks.on_action_end(lane, {"episode": self.open[lane][0], "lane": lane})
                    info = {"mask": np.ones(2, bool), "text": "left", "none": None, "deep": {"a": {"b": 1}}}
                    logs = {"action": lane, "observation": {"img": np.zeros((2, 2)), "vec": np.zeros(3)}}
                    logs |= {"reward": 1.0, "episode": self.open[lane][0], "info": info, "lane": lane}
                    if training:
                        logs["metrics"] = [NAN] * 3 if metrics is None else list(map(float, metrics))
                    hooks.on_step_end(self.open[lane][1] - 1, logs)
            if hooks.wants_vector_steps:
                done = {"nb_steps": agent.step, "step": agent.step - first, "reward": np.ones(len(busy))}
                hooks.on_vector_step_end(done)
            for lane in busy:
                episode, length, (sums, counts) = self.open[lane]
                if length == self.lengths[lane][0]:
                    self.lengths[lane].pop(0)
                    del self.open[lane]
                    nb_ended += 1
                    value = self.returns.pop(0) if self.returns else 10.0 * length + lane
                    self.finished.append((episode, value, length))
                    logs = {
                        "episode_reward": value,
                        "nb_episode_steps": length,
                        "duration": 0.01 * length,
                        "lane": lane,
                    }
                    logs["nb_steps"] = agent.step if training else length
                    if training:
                        total = np.broadcast_to(agent.run.metric_sum - sums, 3)
                        number = np.broadcast_to(agent.run.metric_count - counts, 3)
                        logs |= {m: float(total[i] / number[i]) if number[i] else NAN for i, m in enumerate(METRICS)}
                    hooks.on_episode_end(episode, logs)
            if after_step:
                after_step()
            if agent.stop_training or (nb_episodes and nb_ended >= nb_episodes):
                break
        hooks.on_train_end({"did_abort": False})
        agent.counters.training = False
        return hooks.history


def recorder(*hooks):
    def hook(name):
        return lambda self, *args, **kwargs: self.calls.append((name, *args, *kwargs.values()))

    made = type("Recorder", (Callback,), {name: hook(name) for name in hooks})()
    made.calls = []
    return made


def of(callback, name):
    """The arguments of each call of one hook."""
    return [call[1:] for call in callback.calls if call[0] == name]


# ---- hooks -------------------------------------------------------------------------------------------------


def test_a_history_alone_wants_no_calls_per_step():
    loop = ScriptedLoop(3)
    hooks = CallbackList([FileLogger("x"), TrainEpisodeLogger()], model=loop.agent, params={})
    assert not hooks.wants_steps
    assert not hooks.wants_vector_steps


@pytest.mark.parametrize(
    "name",
    ["on_step_begin", "on_step_end", "on_action_begin", "on_action_end", "on_batch_begin", "on_batch_end"]
    + ["on_train_batch_begin", "on_train_batch_end"],
)
def test_step_hooks_are_found_in_classes_and_on_instances(name):
    agent = StandIn()
    from_class = recorder(name)
    on_instance = keras.callbacks.LambdaCallback(**{name: lambda *args, **kwargs: None})
    for callback in (from_class, on_instance):
        hooks = CallbackList([callback], model=agent, params={})
        assert hooks.wants_steps
        assert not hooks.wants_vector_steps
    assert CallbackList([recorder("on_vector_step_end")], model=agent, params={}).wants_vector_steps
    assert not CallbackList([recorder("on_vector_step_end")], model=agent, params={}).wants_steps


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_own_hooks_follow_every_lane_and_episode(nb_lanes):
    names = [
        "on_train_begin",
        "on_train_end",
        "on_episode_begin",
        "on_episode_end",
        "on_step_begin",
        "on_step_end",
    ]
    names += ["on_action_begin", "on_action_end", "on_vector_step_end"]
    spy, loop = recorder(*names), ScriptedLoop(nb_lanes)
    loop.env = object()
    loop.fit([spy])
    assert spy.env is loop.env
    assert spy.model is loop.agent
    assert spy.params == {
        "nb_steps": None,
        "nb_episodes": None,
        "verbose": 0,
        "nb_lanes": nb_lanes,
        "metrics": METRICS,
    }
    nb_steps = sum(map(sum, LENGTHS[nb_lanes]))
    for name in names[4:8]:
        assert len(of(spy, name)) == nb_steps
    assert [episode for episode, _ in of(spy, "on_episode_end")] == [episode for episode, _, _ in loop.finished]
    per_episode = {}
    for step, logs in of(spy, "on_step_end"):
        assert step == len(per_episode.setdefault(logs["episode"], []))
        per_episode[logs["episode"]].append(logs["metrics"])
        assert logs["info"]["text"] == "left"  # untouched, whatever is in it
    assert {e: len(rows) for e, rows in per_episode.items()} == {e: n for e, _, n in loop.finished}
    assert np.array(per_episode[0]).ndim == 2  # as users' copies of the episode logger index it
    assert of(spy, "on_vector_step_end")[-1][0]["nb_steps"] == nb_steps
    assert of(spy, "on_train_end") == [({"did_abort": False},)]


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_keras_epochs_and_batches_begin_and_end_in_turn(nb_lanes):
    names = ["on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end"]
    spy, loop = recorder(*names), ScriptedLoop(nb_lanes)
    loop.fit([spy])
    calls = [(name, index) for name, index, _ in spy.calls]
    epoch, batch, expected = -1, 0, []
    for name, _ in calls:  # rebuild the only legal sequence of the same hooks
        if name == "on_epoch_begin":
            epoch, batch = epoch + 1, 0
        expected.append((name, epoch if "epoch" in name else batch))
        if name == "on_train_batch_end":
            batch += 1
    assert calls == expected
    for kind in ("epoch", "train_batch"):
        kinds = [name for name, _ in calls if kind in name]
        assert kinds == [f"on_{kind}_begin", f"on_{kind}_end"] * (len(kinds) // 2)
    assert calls[0] == ("on_epoch_begin", 0)
    assert epoch + 1 == len(loop.finished)
    assert len(of(spy, "on_train_batch_end")) == sum(map(sum, LENGTHS[nb_lanes]))


def test_keras_logs_are_scalars_and_batches_leave_out_what_was_not_updated():
    spy, loop = recorder("on_epoch_end", "on_batch_end"), ScriptedLoop(1)
    loop.fit([spy])
    first, last = of(spy, "on_epoch_end")[0][1], of(spy, "on_epoch_end")[-1][1]
    names = {"episode_reward", "nb_episode_steps", "nb_steps", "duration", *METRICS}
    assert set(first) == set(last) == names
    assert type(first["nb_steps"]) is int
    assert math.isnan(first["loss"])  # the column is there from the first episode on
    assert last["loss"] < 1
    batches = [logs for _, logs in of(spy, "on_batch_end")]
    assert batches[0] == {"reward": 1.0}
    assert set(batches[5]) == {"reward", *METRICS}
    assert set(batches[6]) == {"reward", "loss", "mae"}  # mean_q was NaN at this step


@pytest.mark.parametrize("update_freq", ["epoch", 10])
def test_batch_logs_that_tensorboard_would_drop_are_not_given_to_it(update_freq):
    board = recorder("on_train_batch_end")
    board.update_freq = update_freq
    ScriptedLoop(1).fit([board])
    assert all(bool(logs) is (update_freq != "epoch") for _, logs in of(board, "on_train_batch_end"))


def test_what_an_episode_hook_adds_reaches_history_and_numpy_scalars_become_numbers():
    class Success(Callback):
        def on_episode_end(self, episode, logs=None):
            logs["success"] = np.float32(episode % 2)
            logs["trace"] = np.zeros(3)

    history = ScriptedLoop(3).fit([Success()])
    assert sorted(history.history["success"]) == [0.0] * 6 + [1.0] * 6
    assert type(history.history["success"][0]) is float
    assert "trace" not in history.history


def test_history_has_one_entry_per_finished_episode_and_epochs_can_go_on_in_a_second_fit():
    loop = ScriptedLoop(3)
    first = loop.fit([], nb_steps=12)
    nb_first = len(loop.finished)
    assert 0 < nb_first
    assert first.history["episode_reward"] == [value for _, value, _ in loop.finished]
    assert first.epoch == list(range(nb_first))
    second = loop.fit([], epoch=nb_first)
    assert second.history["episode_reward"] == [value for _, value, _ in loop.finished[nb_first:]]
    assert second.epoch == list(range(nb_first, len(loop.finished)))
    assert second.history["nb_steps"] == sorted(second.history["nb_steps"])


def test_a_history_of_the_user_is_used():
    mine = keras.callbacks.History()
    assert ScriptedLoop(1).fit([[mine]]) is mine
    assert len(mine.history["episode_reward"]) == 5


@pytest.mark.parametrize(("bad", "words"), [(FileLogger, "parentheses"), (print, "got"), ([None], "None")])
def test_what_is_no_callback_is_refused(bad, words):
    with pytest.raises(TypeError, match=f"Expected instances.*{words}"):
        CallbackList([Visualizer(), bad], model=StandIn(), params={})


def test_a_failed_begin_is_not_followed_by_ends_that_hide_it():
    class Fails(Callback):
        def on_train_begin(self, logs=None):
            raise RuntimeError("no")

    before, after, agent = recorder("on_train_end"), TrainEpisodeLogger(), StandIn()
    hooks = CallbackList([before, Fails(), after], model=agent, params={"nb_steps": 1})
    with pytest.raises(RuntimeError, match="no"):
        hooks.on_train_begin({})
    hooks.on_train_end({"did_abort": True})
    assert len(before.calls) == 1


# ---- Keras' callbacks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("nb_lanes", [1, 3])
@pytest.mark.parametrize("order", [0, 1])
def test_csv_logger_has_all_columns_although_the_first_episodes_have_no_loss(tmp_path, nb_lanes, order):
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1)
    callbacks = [plateau, keras.callbacks.CSVLogger(tmp_path / "log.csv")][:: 1 - 2 * order]
    loop = ScriptedLoop(nb_lanes)
    loop.fit(callbacks)
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [float(row["episode_reward"]) for row in rows] == [value for _, value, _ in loop.finished]
    assert [int(row["epoch"]) for row in rows] == list(range(len(rows)))
    assert rows[0]["loss"] == "nan"
    assert float(rows[-1]["loss"]) < 1
    assert ("learning_rate" in rows[0]) is (order == 0)
    assert all(row[None] if None in row else True for row in rows)


def test_early_stopping_on_rewards_needs_no_mode_and_restores_the_best_weights():
    loop = ScriptedLoop(1, lengths=[[2] * 9], returns=[1, 5, 3, 2, 4, 4, 4, 4, 4])
    weights = []

    def move():
        kernel = loop.agent.dense.kernel
        kernel.assign(kernel + 1)
        weights.append(kernel.numpy())

    stopping = keras.callbacks.EarlyStopping("episode_reward", patience=3, restore_best_weights=True)
    # The weights move after the hooks of each step: at the end of the second episode there were three moves.
    history = loop.fit([stopping], after_step=move)
    assert history.history["episode_reward"] == [1, 5, 3, 2, 4]
    assert stopping.mode == "max"
    np.testing.assert_array_equal(loop.agent.dense.kernel.numpy(), weights[2])
    # and once more with the same object
    loop.returns = [9, 8, 7, 6]
    assert loop.fit([stopping]).history["episode_reward"] == [9, 8, 7, 6]


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("episode_reward", "max"), ("mean_best_reward", "max"), ("success_rate", "max"), ("loss", "min")]
    + [("critic_loss", "min"), ("mae", "min"), ("mean_squared_error", "min"), ("mean_q", "auto")],
)
def test_mode_of_monitors(monitor, mode):
    explicit = keras.callbacks.EarlyStopping(monitor, mode="min")
    automatic = keras.callbacks.ReduceLROnPlateau(monitor)
    CallbackList([automatic, explicit], model=StandIn(), params={})
    assert automatic.mode == mode
    assert explicit.mode == "min"


def test_a_monitor_whose_direction_is_unclear_gets_keras_error():
    with pytest.raises(ValueError, match="mode='max'"):
        ScriptedLoop(1, update_from=0).fit([keras.callbacks.EarlyStopping("mean_q")])


def test_patience_does_not_run_while_there_is_no_loss():
    lengths = [[1] * 12]
    stopping = keras.callbacks.EarlyStopping("loss", patience=2)
    loop = ScriptedLoop(1, lengths=lengths, update_from=9)
    assert len(loop.fit([stopping]).epoch) == 12  # the loss falls from the ninth episode on
    assert stopping.best < 1
    plateau = keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5, min_delta=10)
    loop = ScriptedLoop(1, lengths=lengths, update_from=9)
    history = loop.fit([plateau])
    rates = history.history["learning_rate"]
    assert len(rates) == 12  # one per episode: no shift against the other lists
    assert rates[:9] == [rates[0]] * 9
    assert float(loop.agent.optimizer.learning_rate) == pytest.approx(rates[0] * 0.5**3)


def test_checkpoint_keeps_the_weights_of_the_best_episode(tmp_path):
    path = tmp_path / "best-{episode_reward:.0f}-{nb_steps:03d}.weights.h5"
    loop = ScriptedLoop(1, lengths=[[2] * 3], returns=[1, 5, 3])
    best = keras.callbacks.ModelCheckpoint(path, "episode_reward", save_best_only=True, save_weights_only=True)
    loop.fit([best])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best-1-002.weights.h5", "best-5-004.weights.h5"]


def test_checkpoint_by_loss_waits_for_a_loss(tmp_path):
    loop = ScriptedLoop(1, lengths=[[1] * 8], update_from=4)
    path = tmp_path / "{epoch:02d}.weights.h5"
    loop.fit([keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True)])
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n:02d}.weights.h5" for n in (4, 5, 6, 7, 8)]


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_checkpoint_every_n_steps_counts_the_steps_of_all_lanes(tmp_path, nb_lanes):
    loop = ScriptedLoop(nb_lanes)
    loop.fit([keras.callbacks.ModelCheckpoint(tmp_path / "a.weights.h5", save_freq=5, save_weights_only=True)])
    assert len(loop.agent.saved) == loop.agent.step // 5
    loop = ScriptedLoop(nb_lanes)
    every = keras.callbacks.ModelCheckpoint(
        tmp_path / "b.weights.h5", "loss", save_freq=2, save_best_only=True, save_weights_only=True
    )
    loop.fit([every])
    assert len(loop.agent.saved) > 2  # the loss falls


def test_checkpoints_by_epoch_want_no_calls_per_step(tmp_path):
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "a.keras"),
        keras.callbacks.BackupAndRestore(tmp_path / "backup"),
    ]
    assert not CallbackList(callbacks, model=StandIn(), params={}).wants_steps


def test_terminate_on_nan_is_not_fooled_by_steps_without_update():
    loop = ScriptedLoop(1, lengths=[[10, 10]], update_from=15)
    assert len(loop.fit([keras.callbacks.TerminateOnNaN()]).epoch) == 2
    loop = ScriptedLoop(1, lengths=[[10, 10]], update_from=15)
    loop.loss = math.inf
    assert len(loop.fit([keras.callbacks.TerminateOnNaN()]).epoch) == 1


def test_progbar_logger_follows_the_length_of_each_episode(capsys):
    loop = ScriptedLoop(1, lengths=[[2, 30, 4]])
    loop.fit([keras.callbacks.ProgbarLogger()], verbose=1, nb_episodes=3)
    text = re.sub(r"\x1b\[\d*m|\x08", "", capsys.readouterr().out)
    assert ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"] == re.findall(r"Epoch \d/\d", text)
    assert all(f"{n}/{n} " in text for n in (2, 30, 4))
    assert "nan" not in text and "loss: 0." in text
    assert max(len(line) for line in re.split(r"[\r\n]", text)) < 200


def test_lambda_callback_with_hooks_of_both_kinds():
    seen = []
    callback = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(("epoch", epoch, logs["episode_reward"])),
        on_train_begin=lambda logs: seen.append("begin"),
        on_train_end=lambda logs: seen.append("end"),
        on_episode_begin=lambda episode, logs: seen.append(("episode", episode)),
    )
    ScriptedLoop(1, lengths=[[2, 1]]).fit(callback)
    assert seen == ["begin", ("episode", 0), ("epoch", 0, 20.0), ("episode", 1), ("epoch", 1, 10.0), "end"]


def test_learning_rate_scheduler_and_remote_state_of_keras_callbacks(tmp_path):
    loop = ScriptedLoop(3)
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 1.0 / (epoch + 1))
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup", save_freq=2)
    history = loop.fit([scheduler, backup])
    np.testing.assert_allclose(history.history["learning_rate"], [1 / (n + 1) for n in range(12)], rtol=1e-6)


# ---- loggers -----------------------------------------------------------------------------------------------


def lines_of(capsys):
    out = capsys.readouterr().out
    assert "nan" not in out
    assert "\r" not in out
    assert max(map(len, out.splitlines())) <= 100
    return out.splitlines()


def columns_end(line):
    return [match.end() for match in re.finditer(r"\S(?=  |$)", line)]


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_test_logger(capsys, nb_lanes):
    loop, logger = ScriptedLoop(nb_lanes), TestLogger()
    loop.fit([logger], nb_episodes=4, training=False)
    lines = lines_of(capsys)
    assert lines[0] == "Testing for 4 episodes ..."
    expected = [f"Episode {i + 1}: reward: {v:.3f}, steps: {n}" for i, (_, v, n) in enumerate(loop.finished)]
    assert lines[1:] == expected
    loop.fit([logger], nb_episodes=1, training=False)
    assert lines_of(capsys)[1].startswith("Episode 1: ")


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_train_episode_logger(capsys, nb_lanes):
    loop, logger = ScriptedLoop(nb_lanes), TrainEpisodeLogger()
    loop.fit([logger], nb_steps=12)
    nb_first, overshoot = len(loop.finished), loop.agent.step
    head, header, *rows, end = lines_of(capsys)
    assert head == "Training for 12 steps ..."
    assert header.split() == ["steps", "episode", "duration", "length", "steps/s", "reward", *METRICS]
    assert re.fullmatch(r"done, took \d+\.\d{3} seconds", end)
    cells = [row.split() for row in rows]
    assert [(int(c[1]) - 1, float(c[5]), int(c[3])) for c in cells] == loop.finished
    assert cells[0][0] == f"{min(n for _, _, n in loop.finished) * nb_lanes}/12"
    assert cells[0][-3:] == ["--", "--", "--"] if nb_lanes == 1 else True
    assert {len(row) for row in [header, *rows]} == {len(header)}
    # One lane: 0.01 s a step. With three, the steps of all lanes count.
    assert cells[0][4] == ("100" if nb_lanes == 1 else "300")
    loop.fit([logger], nb_steps=100)
    rows = lines_of(capsys)[2:-1]
    assert [int(row.split()[1]) - 1 for row in rows] == [e for e, _, _ in loop.finished[nb_first:]]
    assert int(rows[-1].split()[0].split("/")[0]) == loop.agent.step - overshoot


def test_train_episode_logger_repeats_its_header_and_keeps_nothing(capsys):
    logger = TrainEpisodeLogger()
    ScriptedLoop(1, lengths=[[1] * 101]).fit([logger], nb_episodes=101)
    lines = lines_of(capsys)
    assert lines[0] == "Training for 101 episodes ..."
    assert [i for i, line in enumerate(lines) if "steps/s" in line] == [1, 52, 103]
    assert lines[2].split()[0] == "1"
    assert logger.begun == {}


def test_wide_numbers_stay_in_their_columns(capsys):
    loop = ScriptedLoop(1, lengths=[[2] * 5], returns=[-1e9, 12345.678, 0.0, -99999.9, 5], update_from=0)
    for loss in (1e-9, 123456.7, 1e12):
        loop.loss = loss
        loop.lengths, loop.returns = [[2] * 5], [-1e9, 12345.678, 0.0, -99999.9, 5]
        loop.fit([TrainEpisodeLogger()], nb_steps=10_000_000)
        _, header, *rows, _ = lines_of(capsys)
        assert {len(row) for row in rows} == {len(header)}
        assert all(len(row.split()) == 9 for row in rows)


def test_small_numbers_keep_two_digits():
    shown = [_number(x) for x in (0.0, 0.0123, 0.00123, 0.00042, -0.00042, 6.5e-5)]
    assert shown == ["0.0000", "0.0123", "0.0012", "4.2e-04", "-4.2e-04", "6.5e-05"]
    assert [_number(x, digits=3) for x in (0.012, 0.0042, -21.0)] == ["0.012", "4.2e-03", "-21.000"]


def test_lines_stay_within_100_characters_for_a_million_steps_and_an_annealed_policy(capsys, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("rl.callbacks.time.perf_counter", lambda: next(clock))

    class Annealed(StandIn):
        metrics_names = property(lambda self: [*METRICS, "mean_eps"])

    agent = Annealed()
    hooks = CallbackList([TrainEpisodeLogger(), TrainIntervalLogger()], model=agent, params={"nb_steps": 10**6})
    hooks.on_train_begin({})
    agent.counters.step = 10**6
    agent.run.metric_sum, agent.run.metric_count = np.full(4, -123456.7), np.ones(4)
    logs = {"episode_reward": -123456.7, "nb_episode_steps": 27000, "nb_steps": 10**6, "duration": 9999.9}
    hooks.on_vector_step_end({"step": 10**6, "nb_steps": 10**6, "reward": np.ones(1)})
    hooks.on_episode_end(99_998, logs | dict.fromkeys(agent.metrics_names, -123456.7))
    hooks.on_train_end({})
    rows = [line for line in lines_of(capsys) if "1000000/1000000" in line]
    assert rows[0].split()[1:6] == ["99999", "10000s", "27000", "3", "-123456.7"]
    assert rows[1].split()[2:6] == ["1", "-123456.7", "-123457", "-123457"]
    assert [row.split()[6:] for row in rows] == [["-123456.7"] * 4] * 2


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_train_interval_logger_in_a_file(capsys, nb_lanes):
    loop, logger = ScriptedLoop(nb_lanes), TrainIntervalLogger(interval=6)
    for nb_steps in (15, 100):
        nb_before, first = len(loop.finished), loop.agent.step
        sums = [np.broadcast_to(x, 3) for x in (loop.agent.run.metric_sum, loop.agent.run.metric_count)]
        loop.fit([logger], nb_steps=nb_steps)
        head, header, *rows, end = lines_of(capsys)
        done = loop.agent.step - first
        assert head == f"Training for {nb_steps} steps ..."
        assert header.split() == ["steps", "steps/s", "episodes", "reward", "min", "max", *METRICS]
        assert end.startswith("done, took")
        cells = [row.split() for row in rows]
        steps = [int(c[0].split("/")[0]) for c in cells]
        assert steps[-1] == done  # the last, partial interval is not lost
        assert all(b // 6 > a // 6 for a, b in zip(steps[:-2], steps[1:-1], strict=True))
        values = [v for _, v, _ in loop.finished[nb_before:]]
        assert sum(int(c[2]) for c in cells) == len(values)
        known = [c for c in cells if c[3] != "--"]
        assert max(float(c[5]) for c in known) == max(values)
        assert min(float(c[4]) for c in known) == min(values)
        assert float(known[0][3]) == pytest.approx(np.mean(values[: int(known[0][2])]), abs=1e-3)
        assert cells[-1][7] == "0.5000"  # mae
        assert len({len(row) for row in [header, *rows]}) == 1
    assert "--" not in cells[0][6:]
    sums, counts = loop.agent.run.metric_sum - sums[0], loop.agent.run.metric_count - sums[1]
    if len(cells) == 1:
        assert float(cells[0][6]) == pytest.approx(sums[0] / counts[0], abs=1e-4)


def test_interval_means_are_over_all_updates_even_where_no_episode_ends(capsys):
    loop = ScriptedLoop(1, lengths=[[50]], update_from=5)
    losses = 0.9 ** np.arange(1, 27)
    loop.fit([TrainIntervalLogger(interval=10)], nb_steps=30)
    rows = [line.split() for line in lines_of(capsys)[2:-1]]
    assert [row[0] for row in rows] == ["10/30", "20/30", "30/30"]
    assert [row[2:6] for row in rows] == [["0", "--", "--", "--"]] * 3
    expected = [losses[:6].mean(), losses[6:16].mean(), losses[16:26].mean()]
    np.testing.assert_allclose([float(row[6]) for row in rows], expected, atol=1e-4)


class Terminal:
    """A stream that says it is a terminal, and what can be seen on it."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass

    def isatty(self):
        return True

    def screen(self):
        shown = []
        for line in self.text.split("\n"):
            cells = []
            for part in line.split("\r"):
                cells[: len(part)] = part
            shown.append("".join(cells).rstrip())
        return shown


def test_train_interval_logger_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    clock = iter(np.arange(0, 1000, 0.05))
    monkeypatch.setattr("rl.callbacks.time.perf_counter", lambda: float(next(clock)))
    ScriptedLoop(1, lengths=[[7] * 6]).fit([TrainIntervalLogger(interval=20)], nb_steps=40)
    parts = re.split(r"[\r\n]", terminal.text)
    bars = [part.rstrip() for part in parts if "[" in part]
    assert len(bars) > 10
    assert re.fullmatch(r" 2/20 \[===\.{27}\] \d+ steps/s - mean reward: --", bars[0])
    assert any(re.fullmatch(r"18/20 \[={27}\.{3}\] \d+ steps/s - mean reward: 70.000", bar) for bar in bars)
    assert max(map(len, parts)) < 100 and max(map(len, bars)) < 80
    shown = terminal.screen()  # at the end no trace of the bar is left
    assert [line.split()[0] for line in shown if line] == ["Training", "steps", "20/40", "40/40", "done,"]


def test_the_bar_fits_a_narrow_terminal_and_leaves_nothing_of_a_longer_one(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    clock = iter(np.arange(0, 1000, 0.05))
    monkeypatch.setattr("rl.callbacks.time.perf_counter", lambda: float(next(clock)))
    for columns in (80, 40):
        terminal.text = ""
        monkeypatch.setenv("COLUMNS", str(columns))
        loop = ScriptedLoop(1, lengths=[[5] * 4], returns=[-1000, 1000, 1000, 1000])
        loop.fit([TrainIntervalLogger(interval=100)], nb_steps=20)
        bars = [part for part in re.split(r"[\r\n]", terminal.text) if "[" in part]
        assert max(len(bar.rstrip()) for bar in bars) <= columns - 1
        assert all(len(bar) >= len(last.rstrip()) for last, bar in zip(bars[:-1], bars[1:], strict=True))
        if columns == 80:
            assert any(len(bar.rstrip()) < len(last.rstrip()) for last, bar in zip(bars[:-1], bars[1:], strict=True))


@pytest.mark.parametrize("interval", [0, -1, 2.5])
def test_intervals_are_checked(interval, tmp_path):
    for make in (
        TrainIntervalLogger,
        lambda n: FileLogger("x", n),
        lambda n: ModelIntervalCheckpoint("x", n),
    ):
        with pytest.raises(ValueError, match="interval is a number of .* at least 1; got"):
            make(interval)


def test_loggers_say_when_a_run_was_interrupted(capsys):
    for logger in (TrainEpisodeLogger(), TrainIntervalLogger(10)):
        hooks = CallbackList([logger], model=StandIn(), params={"nb_steps": 10, "nb_episodes": 2})
        hooks.on_train_begin({})
        hooks.on_train_end({"did_abort": True})
        first, last = lines_of(capsys)
        assert first == "Training for 10 steps or 2 episodes ..."
        assert last.startswith("interrupted after 0.0")


def strict_json(path):
    def refuse(token):
        raise AssertionError(f"{token} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


@pytest.mark.parametrize("nb_lanes", [1, 3])
def test_file_logger_is_strict_json_and_goes_on_in_a_second_fit(tmp_path, nb_lanes):
    path, loop = tmp_path / "new" / "log.json", ScriptedLoop(nb_lanes)
    logger = FileLogger(path)
    for nb_steps in (12, 100):  # 12 ends within episodes
        loop.fit([logger], nb_steps=nb_steps)
        data = strict_json(path)
        finished = sorted(loop.finished)
        assert data["episode"] == [episode for episode, _, _ in finished]
        assert data["episode_reward"] == [value for _, value, _ in finished]
        assert data["nb_episode_steps"] == [length for _, _, length in finished]
        names = {"episode", "episode_reward", "nb_episode_steps", "nb_steps", "duration", "lane", *METRICS}
        assert set(data) == names
        assert {len(values) for values in data.values()} == {len(finished)}
    assert data["loss"][0] is None or nb_lanes > 1
    assert 0 < data["loss"][-1] < 1
    assert [p.name for p in path.parent.iterdir()] == ["log.json"]


def test_file_logger_interval_extra_keys_and_infinities(tmp_path):
    path, written = tmp_path / "log.json", []

    class Extra(Callback):
        def on_episode_end(self, episode, logs=None):
            written.append(len(strict_json(path)["episode"]) if path.exists() else 0)
            if episode == 2:
                logs["bonus"] = np.float32(1.5)
                logs["loss"] = math.inf

    ScriptedLoop(1).fit([Extra(), FileLogger(path, interval=2)])
    assert written == [0, 0, 2, 2, 4]
    data = strict_json(path)
    assert data["bonus"] == [None, None, 1.5, None, None]
    assert data["loss"][2] is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path, loop = tmp_path / "log.json", ScriptedLoop(1)
    logger = FileLogger(path)
    loop.fit([logger], nb_steps=8)
    before = path.read_text()
    with path.open() as old:  # a reader of the old file is not torn
        logger.save_data()
        assert old.read() == before
        assert not path.samefile(f"/proc/self/fd/{old.fileno()}") if sys.platform == "linux" else True

    def die(data, file, **kwargs):
        file.write("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "dump", die)
    with pytest.raises(KeyboardInterrupt):
        loop.fit([logger])
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["log.json"]


@pytest.mark.parametrize(("nb_lanes", "steps"), [(1, [6, 12, 18]), (3, [6, 12, 18, 24, 30])])
def test_interval_checkpoint_counts_env_steps_over_its_life(tmp_path, nb_lanes, steps):
    loop = ScriptedLoop(nb_lanes)
    checkpoint = ModelIntervalCheckpoint(tmp_path / "dqn_{step}.weights.h5", interval=6)
    loop.fit([checkpoint], nb_steps=8)
    loop.fit([checkpoint], nb_steps=100)
    saved = [int(re.search(r"dqn_(\d+)", name)[1]) for name in loop.agent.saved]
    if nb_lanes == 1:
        assert saved == steps
    else:  # a vector step of three passes the multiples; the name says where it really was
        assert len(saved) == loop.agent.step // 6
        assert all(a // 6 == b // 6 for a, b in zip(saved, range(6, 1000, 6), strict=False))
    assert all((tmp_path / f"dqn_{n}.weights.h5").exists() for n in saved)


def test_interval_checkpoint_names_prints_and_rests_in_tests(tmp_path, capsys):
    path = str(tmp_path / "{step:03d}_{episode_reward:.0f}_{loss:.1f}.weights.h5")
    loop = ScriptedLoop(1)
    checkpoint = ModelIntervalCheckpoint(path, 4, verbose=1)
    loop.fit([checkpoint], nb_steps=13)
    names = [name[len(str(tmp_path)) + 1 :] for name in loop.agent.saved]
    assert names[0] == "004_30_nan.weights.h5"
    assert names[2].startswith("012_50_0.")
    assert capsys.readouterr().out.splitlines() == [
        f"Step {step}: saving model to {name}" for step, name in zip((4, 8, 12), loop.agent.saved, strict=True)
    ]
    loop.fit([checkpoint], training=False)
    assert len(loop.agent.saved) == 3


@pytest.mark.parametrize("path", ["{steps}.weights.h5", "{}.weights.h5", "{step"])
def test_interval_checkpoint_refuses_unknown_fields_before_the_first_step(path):
    loop = ScriptedLoop(1)
    with pytest.raises(ValueError, match=r"cannot fill in filepath .* Known fields: .*episode_reward.*step"):
        loop.fit([ModelIntervalCheckpoint(path, 4)])
    assert loop.agent.step == 0


class Screen:
    def __init__(self, **attributes):
        self.nb_frames = 0
        self.__dict__.update(attributes)

    def render(self):
        self.nb_frames += 1


@pytest.mark.parametrize("attributes", [{"render_mode": "human"}, {"render_mode": "rgb_array"}, {}])
def test_visualizer_renders_after_each_vector_step(attributes):
    loop = ScriptedLoop(3, env=Screen(**attributes))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop.fit([Visualizer()])
    assert loop.env.nb_frames == max(map(sum, LENGTHS[3]))


@pytest.mark.parametrize("env", [Screen(render_mode=None), object()])
def test_visualizer_warns_once_where_nothing_can_be_shown(env):
    loop = ScriptedLoop(1, env=env)
    with pytest.warns(UserWarning, match=rf"{type(env).__name__} has no.*render_mode='human'") as warned:
        loop.fit([Visualizer()])
    assert len(warned) == 1
    assert getattr(env, "nb_frames", 0) == 0


def test_wandb_logger(monkeypatch):
    run = types.SimpleNamespace(rows=[], config=None)
    run.log = run.rows.append
    run.config = types.SimpleNamespace(updates=[], update=lambda c, **kw: run.config.updates.append(c))
    arguments = {}
    fake = types.ModuleType("wandb")
    fake.init = lambda **kwargs: arguments.update(kwargs) or run
    monkeypatch.setitem(sys.modules, "wandb", fake)
    loop = ScriptedLoop(3, env=object())
    logger = WandbLogger(name="mine")
    loop.fit([logger], nb_steps=12)
    loop.fit([logger])
    assert arguments == {"project": "keras-rl", "name": "mine"}
    assert [row["episode"] for row in run.rows] == [episode for episode, _, _ in loop.finished]
    assert "loss" not in run.rows[0] or not math.isnan(run.rows[0]["loss"])
    assert run.rows[-1]["loss"] < 1
    assert [c["agent"] for c in run.config.updates] == ["StandIn", "StandIn"]
    assert run.config.updates[0]["env"] == "object"


def test_wandb_is_needed_only_for_its_logger(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbLogger()


def test_logging_costs_nothing_per_step():
    import timeit

    agent = StandIn()
    hooks = CallbackList([TrainIntervalLogger(10**9)], model=agent, params={"nb_steps": 10**9})
    hooks.on_train_begin({})
    logs = {"nb_steps": 8, "step": 8, "reward": np.ones(8)}
    seconds = min(timeit.repeat(lambda: hooks.on_vector_step_end(logs), number=1000, repeat=5)) / 1000
    assert seconds < 2e-5  # 0.5 us; a step with an update takes some 500 us
