"""The benchmark itself: it runs, and it tells unlike work, too little learning and what failed from what is fine."""

import json

import keras
import pytest

from tests.benchmarks import compare

OURS, PEER = compare.on("jax", compare.PPO8), compare.by("sb3", compare.PPO8)
NAMES = compare.named(OURS), compare.named(PEER)


def round_of(rate, learnt, parameters=10, updates=0.25):
    return {"rate": rate, "return": learnt, "parameters": parameters, "updates": updates, "cores": 1.0}


def reported(ours, theirs):
    results = dict(zip(NAMES, (ours, theirs), strict=True))
    return compare.report([(OURS, PEER, 2.5)], [OURS, PEER], results)


def test_one_work_of_each_kind_runs_and_is_reported(tmp_path, capfd, monkeypatch):
    backend = keras.backend.backend()
    tiny = {"steps": 256, "warmup": 256}
    dqn, envs = compare.DQN8 | {"lanes": 2, **tiny}, compare.DUMMY64 | {"lanes": 3, **tiny}
    monkeypatch.setattr(compare, "COMPARED", [compare.Compared("dqn", dqn, envs, (0.55, 0.7))])
    options = ["--backend", backend, "--rounds", "1", "--no-peers", "--out", str(tmp_path)]
    code = compare.main(["--works", "dqn", *options])
    out = capfd.readouterr().out
    assert code == 0, out
    results = json.loads((tmp_path / "results.json").read_text())
    assert list(results) == [f"rl {backend}: dqn, 2 lanes", "rl: step, 3 lanes"]
    learnt, stepped = (rounds[0] for rounds in results.values())
    assert learnt["parameters"] == 4610 and learnt["updates"] == 1.0 and learnt["return"] > 8
    assert 0 < learnt["rate"] < stepped["rate"]
    assert (tmp_path / "results.md").read_text().strip() in out
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


def test_ratios_are_taken_within_a_round():
    ours = [round_of(10, 200), round_of(90, 190), round_of(40, 210)]
    theirs = [round_of(5, 200), round_of(30, 200), round_of(10, 200)]
    text, ratios, wrong = reported(ours, theirs)
    assert wrong == []
    assert ratios == [(OURS, PEER, [2.0, 3.0, 4.0], 2.5)]
    assert "| 3.00  | 2.00 to 4.00  | 2.5    |" in text and "| 200 (190 to 210) |" in text


@pytest.mark.parametrize(
    ("ours", "theirs", "fine"),
    [
        ([200, 210, 190], [215, 225, 205], True),  # less than a fifth
        ([100, 300, 200], [400, 200, 300], True),  # within the noise
        ([100, 110, 90], [200, 210, 190], False),
        ([100, 100], [200, 200], True),  # too few rounds
        ([-21, -21, -21], [-10, -11, -9], False),
    ],
)
def test_a_return_clearly_below_the_peers_is_an_error(ours, theirs, fine):
    wrong = reported([round_of(1, x) for x in ours], [round_of(1, x) for x in theirs])[2]
    assert [line.split(" against ")[0] for line in wrong] == ([] if fine else [NAMES[0]])
    assert fine or "learns less" in wrong[0]


@pytest.mark.parametrize("other", [{"parameters": 11}, {"updates": 0.2}])
def test_unlike_work_is_an_error(other):
    assert "not the same work" in reported([round_of(1, 9)], [round_of(1, 9, **other)])[2][0]


def test_what_failed_is_an_error_unless_it_is_a_peer_that_is_not_installed():
    text, ratios, wrong = reported(
        [{"error": "ValueError: no"}], [{"error": "ModuleNotFoundError: No module named 'sbx'"}]
    )
    assert ratios == [] and wrong == [f"{NAMES[0]} failed: ValueError: no"]
    assert "not installed" in text


def test_every_work_is_measured_once_and_by_the_peers_only_where_they_are_asked_for():
    for more, libraries in (([], {"rl", "sb3", "sbx", "envpool"}), (["--no-peers"], {"rl"})):
        args = compare.arguments(["--works", *compare.GROUPS, *more])
        compared = compare.pairs(args, compare.BACKENDS)
        names = [compare.named(spec) for spec in compare.to_measure(args, compare.BACKENDS, compared)]
        assert len(names) == len(set(names)) and {name.split(":")[0].split()[0] for name in names} == libraries
        assert {compare.named(spec) for pair in compared for spec in pair[:2]} <= set(names)
        assert {f"rl jax: dqn, {2**i} lanes" for i in range(1, 9)} <= set(names)
    assert len(compare.pairs(args, ["tensorflow"])) == 2  # ours against ours
