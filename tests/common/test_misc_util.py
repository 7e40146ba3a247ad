import random
import subprocess
import sys
from collections import OrderedDict, namedtuple

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from rl.common.misc_util import set_global_seeds, tree_leaves, tree_map, tree_paths, warn_user

Pair = namedtuple("Pair", "left, right")


def test_tree_map_keeps_structure_and_order():
    tree = {"b": (1, 2), "a": {"c": 3}}
    result = tree_map(lambda x, y, z: x + y * z, tree, {"a": {"c": 10}, "b": (20, 30)}, {"b": (1, 2), "a": {"c": 3}})
    assert result == {"b": (21, 62), "a": {"c": 33}}
    assert list(result) == ["b", "a"]
    assert tree_leaves(result) == [21, 62, 33]


def test_tree_map_of_a_leaf_and_of_empty_trees():
    assert tree_map(lambda x: x * 2, 4) == 8
    assert tree_map(lambda x: x * 2, ()) == ()
    assert tree_map(lambda x: x * 2, {}) == {}
    assert tree_leaves({"a": (), "b": {}}) == []
    np.testing.assert_array_equal(tree_map(np.negative, np.arange(3)), [0, -1, -2])


def test_tree_map_takes_lists_as_leaves_and_keeps_named_tuples():
    assert tree_map(len, {"a": [1, 2, 3]}) == {"a": 3}
    result = tree_map(lambda x: -x, Pair(1, (2, 3)))
    assert result == Pair(-1, (-2, -3))
    assert isinstance(result, Pair)


@pytest.mark.parametrize(
    ("tree", "other", "words"),
    [
        ({"a": 1}, {"b": 1}, r"keys \['a'\].*keys \['b'\]"),
        ({"a": 1}, 3, "keys.*a int"),
        ((1, 2), (1,), "length 2.*length 1"),
        ((1, 2), {"a": 1}, "length 2.*a dict"),
    ],
)
def test_tree_map_names_the_difference(tree, other, words):
    with pytest.raises(ValueError, match=words):
        tree_map(lambda x, y: x, tree, other)


def test_tree_paths_of_values():
    tree = OrderedDict(z=(1, {"q": 2}), a=3)
    assert tree_paths(tree) == [("['z'][0]", 1), ("['z'][1]['q']", 2), ("['a']", 3)]
    assert tree_paths(7) == [("", 7)]
    for path, leaf in tree_paths(tree):
        assert eval("tree" + path) == leaf


def test_tree_paths_of_spaces_match_those_of_their_samples():
    leaf = spaces.Box(-1, 1, (3,))
    space = spaces.Dict(
        {"b": spaces.Tuple((leaf, spaces.Discrete(3))), "a": spaces.Dict({"x": leaf}), "t": spaces.Text(4)}
    )
    paths = [path for path, _ in tree_paths(space)]
    assert paths == ["['a']['x']", "['b'][0]", "['b'][1]", "['t']"]
    assert paths == [path for path, _ in tree_paths(space.sample())]
    assert all(isinstance(leaf, gym.Space) for _, leaf in tree_paths(space))
    one_of = spaces.OneOf((leaf, spaces.Discrete(2)))
    assert tree_paths(one_of) == [("", one_of)]


def test_set_global_seeds_seeds_python_and_numpy():
    draws = []
    for seed in (5, np.int64(5), 6):
        set_global_seeds(seed)
        draws.append((random.random(), np.random.rand()))
    assert draws[0] == draws[1]
    assert draws[0][0] != draws[2][0] and draws[0][1] != draws[2][1]
    set_global_seeds(None)
    first = random.random()
    set_global_seeds(None)
    assert first != random.random()


@pytest.mark.parametrize(
    ("seed", "error"), [(-1, ValueError), (2**32, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_set_global_seeds_refuses_bad_seeds(seed, error):
    with pytest.raises(error, match="seed"):
        set_global_seeds(seed)


def test_set_global_seeds_seeds_keras_only_where_it_is_imported(monkeypatch):
    calls = []

    class FakeKeras:
        class utils:
            set_random_seed = staticmethod(calls.append)

    monkeypatch.setitem(sys.modules, "keras", FakeKeras)
    set_global_seeds(3)
    set_global_seeds(None)
    assert calls == [3]


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_warning_points_at_the_line_that_called_into_the_package(depth):
    package = {"warn_user": warn_user, "__name__": "rl.deep.module"}
    exec("def f(n):\n    f(n - 1) if n else warn_user('careful', RuntimeWarning)", package)
    with pytest.warns(RuntimeWarning, match="careful") as caught:
        package["f"](depth)
    assert [w.filename for w in caught] == [__file__]


@pytest.mark.timeout(60)
def test_import_is_light():
    code = (
        "import sys, rl.common.misc_util as m; m.set_global_seeds(1); "
        "print('keras' in sys.modules, 'gymnasium' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        == ["False"] * 2
    )
