"""Weights files: what is written is whole, what is read fits, and keras-rl's are read, too."""

import errno
import os
import resource

import h5py
import keras
import numpy as np
import pytest
from keras import layers

from rl.agents import CEMAgent, DDPGAgent, DQNAgent, SARSAAgent
from rl.memory import EpisodeParameterMemory, SequentialMemory
from rl.saving import read_weights, suffixed, write_weights


def network(*widths, nb_inputs=3, name=None):
    return keras.Sequential(
        [keras.Input((1, nb_inputs)), layers.Flatten(), *[layers.Dense(w) for w in widths]], name=name
    )


def dqn(model, **options):
    return DQNAgent(model, nb_actions=2, memory=SequentialMemory(limit=50, window_length=1), **options)


def cem(model):
    return CEMAgent(model, nb_actions=2, memory=EpisodeParameterMemory(limit=50, window_length=1), train_interval=40)


def sarsa(model):
    return SARSAAgent(model, nb_actions=2)


def assert_equal(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- files of keras-rl ---------------------------------------------------------------------------------------------


def write_as_keras_2(path, named, text=bytes, root="", chunks=1):
    """The layout that Keras 2 wrote, by hand.

    The root has the attribute `layer_names`; per layer there is a group with the attribute `weight_names`, and below it
    the values under these names, which repeat the layer's: `dense_1/dense_1/kernel:0`. A whole model has it all below
    `model_weights`. Names are bytes, in some versions text; a list that is too long for one attribute is split.

    Args:
        named: `[(layer, [(weight, value), ...]), ...]`, layers without weights included.
    """

    def set_names(group, attribute, names):
        names = [name.encode() for name in names] if text is bytes else names
        for i, part in enumerate(np.array_split(np.array(names, object), chunks)):
            group.attrs[attribute + (str(i) if chunks > 1 else "")] = part.tolist()

    with h5py.File(path, "w") as file:
        group = file.create_group(root) if root else file
        group.attrs["backend"], group.attrs["keras_version"] = b"tensorflow", b"2.2.4"
        set_names(group, "layer_names", [layer for layer, _ in named])
        for layer, weights in named:
            of_layer = group.create_group(layer)
            if chunks == 1 or weights:
                set_names(of_layer, "weight_names", [name for name, _ in weights])
            else:
                of_layer.attrs["weight_names"] = []
            for name, value in weights:
                of_layer.create_dataset(name, data=value)


def dense(name, nb_inputs, width, seed):
    rng = np.random.default_rng(seed)
    kernel, bias = rng.normal(size=(nb_inputs, width)).astype("f4"), rng.normal(size=width).astype("f4")
    return name, [(f"{name}/kernel:0", kernel), (f"{name}/bias:0", bias)]


def three_dense(last=2):
    """A network `3 -> 5 -> 4 -> last` as keras-rl's examples wrote it, with layers that have no weights between."""
    nothing = [(name, []) for name in ("flatten_1", "activation_1", "activation_2", "activation_3")]
    first, second, third = dense("dense_1", 3, 5, 1), dense("dense_2", 5, 4, 2), dense("dense_3", 4, last, 3)
    return [nothing[0], first, nothing[1], second, nothing[2], third, nothing[3]]


def values(named):
    return [value for _, weights in named for _, value in weights]


@pytest.mark.parametrize("make", [dqn, cem, sarsa])
@pytest.mark.parametrize("ending", [".h5f", ".h5"])
def test_agents_read_the_weights_that_keras_rl_wrote(make, ending, tmp_path):
    path = str(tmp_path / ("old" + ending))
    write_as_keras_2(path, three_dense())
    agent = make(network(5, 4, 2))
    agent.load_weights(path)
    assert_equal(agent.model.get_weights(), values(three_dense()))
    if make is dqn:
        assert_equal(agent.target_model.get_weights(), values(three_dense()))
    if make is cem:
        assert_equal([agent.theta[0]], [np.concatenate([v.ravel() for v in values(three_dense())])])
    new = str(tmp_path / "new.weights.h5")
    agent.save_weights(new)  # from here on it is Keras 3's format
    other = make(network(5, 4, 2))
    other.load_weights(new)
    assert_equal(other.model.get_weights(), values(three_dense()))


def test_ddpg_reads_the_pair_that_keras_rl_wrote(tmp_path):
    def pair():
        actor = keras.Sequential([keras.Input((1, 3)), layers.Flatten(), layers.Dense(5), layers.Dense(2)])
        action, observation = keras.Input((2,)), keras.Input((1, 3))
        x = layers.Dense(4)(layers.Concatenate()([action, layers.Flatten()(observation)]))
        critic = keras.Model([action, observation], layers.Dense(1)(x))
        return DDPGAgent(2, actor, critic, action, SequentialMemory(limit=50, window_length=1))

    actor = [("flatten_1", []), dense("dense_1", 3, 5, 1), dense("dense_2", 5, 2, 2)]
    critic = [(name, []) for name in ("observation_input", "action_input", "flatten_2", "concatenate_1")]
    critic += [dense("dense_3", 5, 4, 3), dense("dense_4", 4, 1, 4)]
    write_as_keras_2(str(tmp_path / "ddpg_actor.h5f"), actor)
    write_as_keras_2(str(tmp_path / "ddpg_critic.h5f"), critic)
    agent = pair()
    agent.load_weights(tmp_path / "ddpg.h5f")
    for network, named in ((agent.actor, actor), (agent.critic, critic)):
        assert_equal(network.get_weights(), values(named))
    for target, source in ((agent.target_actor, agent.actor), (agent.target_critic, agent.critic)):
        assert_equal(target.get_weights(), source.get_weights())
    write_as_keras_2(str(tmp_path / "ddpg_critic.h5f"), actor)  # a critic that does not fit
    other = pair()
    before = other.get_weights()
    with pytest.raises(ValueError, match="ddpg_critic.h5f does not fit"):
        other.load_weights(tmp_path / "ddpg.h5f")
    assert_equal(other.get_weights(), before)


@pytest.mark.parametrize("options", [{}, {"text": str}, {"root": "model_weights"}, {"chunks": 3}])
def test_variants_of_the_old_layout(options, tmp_path):
    path = str(tmp_path / "old.h5")
    write_as_keras_2(path, three_dense(), **options)
    model = network(5, 4, 2)
    read_weights({path: model})
    assert_equal(model.get_weights(), values(three_dense()))


def test_a_functional_network_and_a_dueling_head(tmp_path):
    path = str(tmp_path / "old.h5f")
    # keras-rl put a dense layer of one more output in the place of the last one, and a Lambda layer behind it.
    named = three_dense(last=3)
    named = [("flatten_1_input", []), *named[:-1], ("lambda_1", [])]
    write_as_keras_2(path, named)
    x = inputs = keras.Input((1, 3))
    x = layers.Flatten()(x)
    for width in (5, 4):
        x = layers.Activation("relu")(layers.Dense(width)(x))
    agent = dqn(keras.Model(inputs, layers.Dense(2)(x)), enable_dueling_network=True)
    agent.load_weights(path)
    assert_equal(agent.model.get_weights(), values(named))
    assert_equal(agent.target_model.get_weights(), values(named))


def test_nested_networks_and_frozen_statistics_keep_keras_2s_order(tmp_path):
    # Keras 2 wrote the weights of a layer that is a network together, those that are trained first.
    rng = np.random.default_rng(0)
    (_, first), (_, last) = dense("dense_1", 3, 4, 1), dense("dense_2", 4, 2, 2)
    norm = [(f"batch_normalization_1/{n}:0", rng.random(4).astype("f4")) for n in ("gamma", "beta", "mean", "variance")]
    path = str(tmp_path / "old.h5")
    write_as_keras_2(path, [("flatten_1", []), ("model_1", [*first, *norm[:2], *last, *norm[2:]])])
    inner = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(2)])
    model = keras.Sequential([keras.Input((1, 3)), layers.Flatten(), inner])
    read_weights({path: model})
    assert_equal(inner.layers[0].get_weights(), [value for _, value in first])
    assert_equal(inner.layers[1].get_weights(), [value for _, value in norm])
    assert_equal(inner.layers[2].get_weights(), [value for _, value in last])


@pytest.mark.parametrize(
    ("widths", "texts"),
    [
        ((5, 2), ["3 layers with weights (dense_1, dense_2, dense_3) for 2", "'mine'"]),
        ((5, 4, 4, 2), ["3 layers", "for 4"]),
        ((5, 7, 2), ["'dense_2' holds shapes [(5, 4), (4,)]", "needs [(5, 7), (7,)]"]),
        ((5, 4, 3), ["'dense_3' holds shapes [(4, 2), (2,)]", "needs [(4, 3), (3,)]"]),
    ],
)
def test_an_old_file_of_another_network_changes_nothing(widths, texts, tmp_path):
    path = str(tmp_path / "old.h5f")
    write_as_keras_2(path, three_dense())
    model = network(*widths, name="mine")
    before = model.get_weights()
    with pytest.raises(ValueError) as error:
        read_weights({path: model})
    assert all(text in str(error.value) for text in (*texts, path))
    assert_equal(model.get_weights(), before)


def test_weights_of_neither_side_are_left_out(tmp_path):
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)
            self.scale = self.add_weight(shape=(), name="scale")

        def call(self, x):
            return self.scale * self.dense(x)

    model = Scaled()
    model(np.zeros((1, 3), "f4"))
    path = str(tmp_path / "old.h5")
    write_as_keras_2(path, [dense("dense_1", 3, 2, 1)])
    with pytest.raises(ValueError, match="weights of its own"):
        read_weights({path: model})
    write_as_keras_2(path, [dense("dense_1", 3, 2, 1), ("top_level_model_weights", [("scale:0", np.float32(1))])])
    with h5py.File(path, "a") as file:  # where Keras 2 had it: in the file, but not among the layers
        file.attrs["layer_names"] = [b"dense_1"]
    with pytest.raises(ValueError, match=r"2 layers with weights \(dense_1, top_level_model_weights\) for 1"):
        read_weights({path: network(2)})


# ---- files that are none -------------------------------------------------------------------------------------------


def bad_file(kind, path):
    if kind == "truncated":
        write_weights({path: network(5, 4, 2)})
        with open(path, "r+b") as file:
            file.truncate(os.path.getsize(path) // 2)
    elif kind == "text":
        with open(path, "w") as file:
            file.write("weights")
    elif kind == "empty":
        open(path, "w").close()
    elif kind == "incomplete":
        write_as_keras_2(path, three_dense())
        with h5py.File(path, "a") as file:
            del file["dense_2/dense_2/bias:0"]
    elif kind == "foreign":
        with h5py.File(path, "w") as file:
            file["weights"] = np.zeros(3)
    elif kind == "folder":
        os.mkdir(path)


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("missing", FileNotFoundError, "no weights file at"),
        ("folder", FileNotFoundError, "no weights file at"),
        ("truncated", ValueError, "damaged"),
        ("text", ValueError, "damaged, or no weights file"),
        ("empty", ValueError, "damaged, or no weights file"),
        ("incomplete", ValueError, "damaged"),
        ("foreign", ValueError, "holds no weights of a Keras model"),
    ],
)
@pytest.mark.parametrize("ending", [".weights.h5", ".h5f"])
def test_a_file_that_cannot_be_read_is_one_error(kind, error, text, ending, tmp_path):
    path, agent = str(tmp_path / ("file" + ending)), dqn(network(5, 4, 2))
    bad_file(kind, path)
    before = agent.get_weights()
    with pytest.raises(error, match=text) as raised:
        agent.load_weights(path)
    assert path in str(raised.value)
    assert_equal(agent.get_weights(), before)


def test_a_checkpoint_of_keras_rl2_is_recognised(tmp_path):
    for ending in (".index", ".data-00000-of-00001"):
        (tmp_path / ("dqn.h5f" + ending)).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="keras-rl2 wrote .* save it as .h5"):
        dqn(network(2)).load_weights(tmp_path / "dqn.h5f")


@pytest.mark.parametrize(("there", "here"), [((4, 2), (5, 2)), ((4, 4, 2), (4, 2)), ((4,), (4, 4)), ((4, 4), (4,))])
def test_a_new_file_of_another_network_changes_nothing(there, here, tmp_path):
    path, model = str(tmp_path / "x.weights.h5"), network(*here, name="mine")
    write_weights({path: network(*there)})
    before = model.get_weights()
    with pytest.raises(ValueError, match="does not fit the network 'mine'"):
        read_weights({path: model})
    assert_equal(model.get_weights(), before)


# ---- whole or not at all -------------------------------------------------------------------------------------------


def test_an_existing_file_is_replaced_only_where_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    agent, path = dqn(network(2)), tmp_path / "x.h5f"
    agent.save_weights(path)
    content = path.read_bytes()
    agent.model.set_weights([np.ones_like(w) for w in agent.model.get_weights()])
    with pytest.raises(FileExistsError, match="x.h5f exists; pass overwrite=True"):
        agent.save_weights(path)
    assert path.read_bytes() == content
    agent.save_weights(path, overwrite=True)
    other = dqn(network(2))
    other.load_weights(path)
    assert_equal(other.model.get_weights(), agent.model.get_weights())
    assert [p.name for p in tmp_path.iterdir()] == ["x.h5f"]


@pytest.mark.parametrize("exists", [False, True])
def test_a_disk_that_is_full_leaves_the_old_file_and_no_other(exists, tmp_path):
    path, small, large = tmp_path / "x.weights.h5", dqn(network(2)), dqn(network(200, 200, 2))
    if exists:
        small.save_weights(path)
    content = path.read_bytes() if exists else None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # a file cannot grow above this, as on a full disk
    try:
        with pytest.raises(OSError, match=r"Cannot write .*x.weights.h5: File too large. Nothing was replaced"):
            large.save_weights(path, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == (["x.weights.h5"] if exists else [])
    if exists:
        assert path.read_bytes() == content
    large.save_weights(path, overwrite=True)  # HDF5 is none the worse for it


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    agent, path = dqn(network(2)), tmp_path / "x.h5"
    monkeypatch.setattr("tempfile.mkdtemp", refuse)  # a folder's mode does not stop the superuser
    with pytest.raises(PermissionError, match=r"Cannot write .*x.h5: Permission denied.*another folder"):
        agent.save_weights(path)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"Cannot write .*file/x.h5"):
        agent.save_weights(tmp_path / "file" / "x.h5")


def test_several_networks_are_written_and_read_together(tmp_path):
    class Pair(DQNAgent):
        def weights_files(self, path):
            return {suffixed(path, "_actor"): self.model, suffixed(path, "_critic"): self.critic}

    def pair(*widths):
        agent = Pair(network(2), nb_actions=2, memory=SequentialMemory(limit=50, window_length=1))
        agent.critic = network(*widths, name="critic")
        return agent

    agent, other, unlike = pair(4, 1), pair(4, 1), pair(5, 1)
    for ending in (".weights.h5", ".h5f", ".h5"):
        agent.save_weights(tmp_path / f"ddpg{ending}")
        assert {f"ddpg_actor{ending}", f"ddpg_critic{ending}"} <= {p.name for p in tmp_path.iterdir()}
    other.load_weights(tmp_path / "ddpg.h5f")
    for a, b in ((agent.model, other.model), (agent.critic, other.critic)):
        assert_equal(a.get_weights(), b.get_weights())
    before = unlike.model.get_weights()
    with pytest.raises(ValueError, match="ddpg_critic.h5f does not fit the network 'critic'"):
        unlike.load_weights(tmp_path / "ddpg.h5f")
    assert_equal(unlike.model.get_weights(), before)  # though the actor's file does fit
    (tmp_path / "ddpg_actor.h5").unlink()
    with pytest.raises(FileExistsError, match="ddpg_critic.h5 exists"):
        agent.save_weights(tmp_path / "ddpg.h5")
    assert not (tmp_path / "ddpg_actor.h5").exists()
    (tmp_path / "ddpg_critic.h5f").unlink()
    with pytest.raises(FileNotFoundError, match="ddpg_critic.h5f"):
        other.load_weights(tmp_path / "ddpg.h5f")


@pytest.mark.parametrize("path", ["x.ckpt", "x.keras", "x", "x.weights"])
def test_other_endings_are_refused(path, tmp_path):
    agent = dqn(network(2))
    for method in (agent.save_weights, agent.load_weights):
        with pytest.raises(ValueError, match=r"ends in .weights.h5 \(or keras-rl's .h5f, .h5\)"):
            method(tmp_path / path)
    assert list(tmp_path.iterdir()) == []
