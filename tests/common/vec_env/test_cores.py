"""How many workers are chosen."""

import time
from pathlib import Path

import pytest

from rl.common.vec_env import cores
from rl.common.vec_env.cores import Probe, choose_workers, probe_env, time_steps, usable_cores
from tests.common.vec_env.envs import CountingEnv

pytestmark = pytest.mark.timeout(30)


@pytest.mark.parametrize(
    ("files", "want"),
    [
        ({}, 8),
        ({"/sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "20000 100000\n"}, 1),
        ({"/sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "250000", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_usable_cores(monkeypatch, files, want):
    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert usable_cores() == want


@pytest.mark.parametrize(
    ("probe", "waits"),
    [
        (Probe(2e-3, 1e-4, 1.0, 50), True),
        (Probe(2e-3, 1.9e-3, 1.0, 50), False),  # computes, and waits a little
        (Probe(2e-3, 2e-4, 0.0, 50), False),  # another process has the core
        (Probe(1e-4, 1e-5, 1.0, 50), False),  # too short to matter
    ],
)
def test_waiting(monkeypatch, probe, waits):
    monkeypatch.setattr(cores, "usable_cores", lambda: 4)
    assert probe.waits == waits
    for nb_envs in (1, 3, 12):
        workers, why = choose_workers(nb_envs, probe)
        assert workers == (nb_envs if waits else min(nb_envs, 4))
        assert ("waits" in why) == waits and str(workers) in why


def test_time_steps():
    class Sleeper(CountingEnv):
        def step(self, action):
            time.sleep(0.002)
            return super().step(action)

    probe = time_steps(Sleeper(length=3), nb_steps=10)
    assert probe.nb_steps == 10 and probe.seconds > 0.0019 and probe.cpu_seconds < 0.001 and probe.sleeps >= 1
    assert time_steps(Sleeper(), nb_steps=10**6, limit=0.1).nb_steps < 100


def test_the_probed_environment_lives_in_a_worker_and_is_closed(tmp_path):
    class Marked(CountingEnv):
        def close(self):
            (tmp_path / "closed").touch()

    probe = probe_env(Marked)
    assert probe.nb_steps == 50 and not probe.waits and (tmp_path / "closed").exists()


def test_a_failure_of_the_probed_environment_is_raised():
    with pytest.raises(TypeError):
        probe_env(lambda: CountingEnv(nonsense=1))
