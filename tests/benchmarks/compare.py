"""Times this library and its peers on the same work, in turns, and says how they compare.

    python tests/benchmarks/compare.py                                  # all but Atari, both backends, 5 rounds
    python tests/benchmarks/compare.py --works dqn ppo --backend jax --rounds 3
    python tests/benchmarks/compare.py --works dqn --no-peers --profile # where the time of a vector step goes

The first run makes a virtual environment of requirements-peers.txt in build/peers. A round measures everything once,
each in a process of its own with one thread; ratios are taken within a round. What is printed lies in build/benchmarks,
too, as results.md, results.json and results.png.

Equal work: `works.py` sets both sides up. A pair with unlike numbers of parameters or of gradient steps per env step
is an error, and so is a return clearly below the peer's: from 3 rounds on, where the difference of the means exceeds
20 % of the peer's return and three times its own standard error.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
REQUIREMENTS = HERE / "requirements-peers.txt"
BACKENDS = ("tensorflow", "jax")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "PJRT_NPROC": "1", "NPROC": "1"}  # PJRT_NPROC or NPROC: JAX, by release
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}


class Compared(NamedTuple):
    """Our work and what it is held against (a peer's, or another of ours), and the ratios wanted on each backend."""

    group: str
    ours: dict
    other: dict
    wanted: tuple = (None, None)


def work(work, lanes, steps, **given):
    warmup = {"dqn": 3000, "ppo": 12_000, "sac": 2000, "atari": 200, "step": 3000}[
        work
    ]  # env steps before the clock starts
    return {"library": "rl", "work": work, "lanes": lanes, "steps": steps, "warmup": warmup} | given


def by(library, spec):
    return spec | {"library": library}


DQN1, DQN8, FUSED = work("dqn", 1, 6000), work("dqn", 8, 16_000), work("dqn", 1, 6000, fused=32)
PPO8, PPO64, DUMMY64 = work("ppo", 8, 40_000), work("ppo", 64, 320_000), work("step", 64, 320_000)
SAC256, SAC64 = work("sac", 1, 4000), work("sac", 1, 6000, units=64)
PONG, STEP = work("atari", 1, 400), work("step", 32, 64_000)
COMPARED = [
    Compared("dqn", DQN8, by("sb3", DQN8), (8, 11)),
    Compared("dqn", DQN8, by("sbx", DQN8), (2.2, 3)),
    Compared("dqn", DQN1, by("sb3", DQN1), (2, 4)),
    Compared("dqn", DQN1, by("sbx", DQN1), (2.5, 5.5)),
    Compared("dqn", FUSED, by("sb3", DQN1), (5, 10)),
    Compared("dqn", DQN8, DQN1, (4, 3)),
    Compared("ppo", PPO8, by("sb3", PPO8), (2.5, 4)),
    Compared("ppo", PPO8, by("sbx", PPO8)),
    Compared("ppo", PPO64, by("sb3", PPO8)),
    Compared("ppo", PPO64 | {"envs": "subproc"}, by("sb3", PPO8)),
    Compared("ppo", PPO64, DUMMY64, (0.55, 0.7)),
    Compared("ppo", PPO64 | {"envs": "native"}, by("sb3", PPO8)),
    Compared("ppo", work("ppo", 256, 800_000, envs="native"), by("sb3", PPO8), (12, 20)),
    Compared("sac", SAC256, by("sb3", SAC256), (1.5, 2)),
    Compared("sac", SAC256, by("sbx", SAC256), (None, 1)),
    Compared("sac", SAC64, by("sb3", SAC64), (4, 4)),
    Compared("sac", SAC64, by("sbx", SAC64)),
    Compared("step", STEP, by("sb3", STEP)),
    Compared("step", STEP | {"envs": "subproc"}, by("sb3", STEP | {"envs": "subproc"})),
    Compared("step", STEP | {"envs": "native"}, by("envpool", STEP)),
    Compared("atari", PONG, by("sb3", PONG)),
]
GROWTH = [work("dqn", 2**i, 6000 if i < 3 else 16_000) for i in range(9)]
GROWTH += [work("ppo", 2**i, max(20_000, 4 * 128 * 2**i)) for i in range(9)]
GROUPS = ["dqn", "ppo", "sac", "step", "growth", "atari"]


def named(spec):
    """What stands in tables for a measurement: `rl jax: dqn, 8 lanes`."""
    extra = [
        f"{spec[key]} {unit}"
        for key, unit in (("envs", "envs"), ("fused", "steps per execution"), ("units", "units"))
        if key in spec
    ]
    parts = [spec["work"], f"{spec['lanes']} lane{'s' * (spec['lanes'] > 1)}", *extra]
    return f"{spec['library']}{' ' * ('backend' in spec)}{spec.get('backend', '')}: {', '.join(parts)}"


def on(backend, spec):
    return spec | {"backend": backend} if spec["library"] == "rl" and spec["work"] != "step" else spec


def python_of_peers(folder):
    """Makes the peers' virtual environment where it is not there, or not of these requirements."""
    python, made_of, wanted = folder / "bin" / "python", folder / "requirements.txt", REQUIREMENTS.read_text()
    if not python.exists() or not made_of.exists() or made_of.read_text() != wanted:
        print(f"Installing the peers into {folder}: some minutes, the first time.", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        required, _, optional = wanted.partition("# Optional")
        (folder / "required.txt").write_text(required)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", str(folder / "required.txt")], check=True)
        for line in optional.splitlines()[1:]:
            if subprocess.run([*pip, line], capture_output=True, check=False).returncode:
                print(f"{line} does not install here; what needs it is left out.")
        made_of.write_text(wanted)
    return str(python)


def measure(spec, seed, scale, peers, profile=False):
    """Runs one work in a process of its own; a result of `works.py`, or `{"error": a sentence}`."""
    env = os.environ | ONE_THREAD | CPU_ONLY | {"PYTHONPATH": str(ROOT)}
    env |= {"KERAS_BACKEND": spec["backend"]} if "backend" in spec else {}
    python = sys.executable if spec["library"] == "rl" else peers
    given = spec | {key: max(1, int(scale * spec[key])) for key in ("steps", "warmup")}
    command = [python, str(HERE / "works.py"), json.dumps(given | {"seed": seed, "profile": profile})]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not results:
        return {"error": (done.stderr.strip().splitlines() or ["no result"])[-1][:200]}
    return json.loads(results[-1][7:])


def available(backend):
    """None where our library runs on this backend, otherwise why it does not."""
    env = os.environ | CPU_ONLY | {"KERAS_BACKEND": backend, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", "import rl.backend"], env=env, capture_output=True, text=True)
    return done.stderr.strip().splitlines()[-1] if done.returncode else None


def pairs(args, backends):
    """All `(ours, other, wanted)` to be compared, with the backend in our specs."""
    found = []
    for group, ours, other, wanted in COMPARED:
        if group in args.works and (args.peers or other["library"] == "rl"):
            found += [(on(b, ours), on(b, other), wanted[BACKENDS.index(b)]) for b in backends]
    return [pair for i, pair in enumerate(found) if pair not in found[:i]]


def to_measure(args, backends, compared):
    """All specs, each once, those that are compared next to each other."""
    specs = [spec for ours, other, _ in compared for spec in (ours, other)]
    more = [c.ours for c in COMPARED if c.group in args.works] + (GROWTH if "growth" in args.works else [])
    unique = {}
    for spec in specs + [on(backend, spec) for spec in more for backend in backends]:
        unique.setdefault(named(spec), spec)
    return list(unique.values())


def complaints(ours, other, ours_rounds, other_rounds):
    """What is wrong with a comparison: unlike work, or a return clearly below the other's."""
    a, b = ours_rounds[0], other_rounds[0]
    names = f"{named(ours)} against {named(other)}"
    if a["parameters"] is None or b["parameters"] is None:
        return []
    # A tenth, since the steps of a last rollout that is not complete are not learnt from.
    if a["parameters"] != b["parameters"] or abs(a["updates"] / max(b["updates"], 1e-9) - 1) > 0.1:
        done = [f"{x['parameters']} parameters, {x['updates']:.4f} gradient steps per env step" for x in (a, b)]
        return [f"{names}: not the same work ({done[0]}; {done[1]})"]
    returns = [[x["return"] for x in rounds if x["return"] is not None] for rounds in (ours_rounds, other_rounds)]
    if other["library"] == "rl" or min(map(len, returns)) < 3:
        return []
    means = [statistics.mean(values) for values in returns]
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in returns))
    if means[1] - means[0] > max(0.2 * abs(means[1]), 3 * error):
        return [f"{names}: it learns less, return {means[0]:.0f} against {means[1]:.0f} (+- {error:.0f})"]
    return []


def table(header, rows):
    """A markdown table that can be read in a terminal, too."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(f"| {' | '.join(str(x).ljust(w) for x, w in zip(line, widths, strict=True))} |" for line in lines)


def report(compared, specs, results):
    """The two tables, all ratios `(ours, other, [ratio per round], wanted)`, and all complaints."""
    rows, ratios, wrong = [], [], []
    for spec in specs:
        name, rounds = named(spec), results[named(spec)]
        good = [x for x in rounds if "error" not in x]
        if len(good) < len(rounds):
            error = next(x["error"] for x in rounds if "error" in x)
            is_missing = spec["library"] != "rl" and "ModuleNotFoundError" in error  # what requirements call optional
            wrong += [] if is_missing else [f"{name} failed: {error}"]
            rows.append([name, "not installed" if is_missing else "failed", *[""] * 4])
            continue
        rates = sorted(x["rate"] for x in good)
        returns = [x["return"] for x in good if x["return"] is not None]
        learnt = f"{statistics.mean(returns):.0f} ({min(returns):.0f} to {max(returns):.0f})" if returns else ""
        updates, cores = good[0]["updates"], statistics.median(x["cores"] for x in good)
        speed = f"{rates[0]:,.0f} to {rates[-1]:,.0f}"
        rows.append([name, f"{statistics.median(rates):,.0f}", speed, learnt, f"{updates:.3f}", f"{cores:.2f}"])
    for ours, other, wanted in compared:
        rounds = list(zip(results[named(ours)], results[named(other)], strict=True))
        if not any("error" in x for pair in rounds for x in pair):
            ratios.append((ours, other, sorted(a["rate"] / b["rate"] for a, b in rounds), wanted))
            wrong += complaints(ours, other, *zip(*rounds, strict=True))
    header = ["work", "env steps/s", "of the rounds", "return", "gradient steps per env step", "CPU time per second"]
    text = table(header, rows) + "\n"
    if ratios:
        lines = [
            [named(a), named(b), f"{statistics.median(r):.2f}", f"{r[0]:.2f} to {r[-1]:.2f}", wanted or ""]
            for a, b, r, wanted in ratios
        ]
        text += "\n" + table(["ours", "against", "ratio", "of the rounds", "wanted"], lines) + "\n"
    return text, ratios, wrong


def draw(path, ratios, specs, results):
    """The ratios as bars, with a mark where they are wanted, and the speed over the number of lanes."""
    try:
        import matplotlib
    except ImportError:
        print("No picture: matplotlib is not installed (pip install -e '.[dev]' does it).")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, lines) = pyplot.subplots(1, 2, figsize=(16, 2 + 0.4 * max(8, len(ratios))), layout="constrained")
    for i, (ours, _, rounds, wanted) in enumerate(ratios):
        bars.barh(
            i, statistics.median(rounds) - 1, left=1, color="skyblue" if ours.get("backend") == "jax" else "orange"
        )
        bars.plot([rounds[0], rounds[-1]], [i, i], color="black")
        if wanted:
            bars.plot(wanted, i, "|", color="red", markersize=16, markeredgewidth=2)
    bars.set_yticks(range(len(ratios)), [f"{named(a)}\n/ {named(b)}" for a, b, _, _ in ratios], fontsize=7)
    bars.set(xlabel="ratio of env steps/s: median, range of the rounds; red: wanted", xscale="log")
    bars.xaxis.set_major_formatter("{x:g}")
    bars.invert_yaxis()
    curves = {}
    for spec in specs:
        rates = [x["rate"] for x in results[named(spec)] if "error" not in x]
        if rates and spec["work"] in ("dqn", "ppo") and "envs" not in spec and "fused" not in spec:
            label = [spec["library"], *([spec["backend"]] if "backend" in spec else []), spec["work"]]
            curves.setdefault(" ".join(label), []).append((spec["lanes"], statistics.median(rates)))
    for label, points in curves.items():
        lines.plot(*zip(*sorted(points), strict=True), "o-", label=label)
    lines.set(xlabel="lanes", ylabel="env steps/s", yscale="log")
    lines.set_xscale("log", base=2)
    lines.xaxis.set_major_formatter("{x:g}")
    lines.legend()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", nargs="+", choices=GROUPS, default=GROUPS[:-1], help="default: all but atari")
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both", help="ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="times as many env steps, for a quick look")
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="ours alone")
    parser.add_argument("--peer", metavar="PYTHON", help="a Python that has the peers, instead of build/peers")
    parser.add_argument("--profile", action="store_true", help="only show where the time of our vector steps goes")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "benchmarks", help="folder of the results")
    return parser.parse_args(argv)


def main(argv=None):
    args = arguments(argv)
    backends = list(BACKENDS) if args.backend == "both" else [args.backend]
    missing = {backend: reason for backend in backends if (reason := available(backend))}
    notes = [f"Our {backend} backend is not available here: {reason}" for backend, reason in missing.items()]
    backends = [backend for backend in backends if backend not in missing]
    compared = pairs(args, backends)
    specs = to_measure(args, backends, compared)
    needs_peers = not args.profile and any(spec["library"] != "rl" for spec in specs)
    peers = (args.peer or python_of_peers(ROOT / "build" / "peers")) if needs_peers else None
    if args.profile:
        for spec in (spec for spec in specs if spec["library"] == "rl" and spec["work"] != "step"):
            result = measure(spec, 0, args.scale, peers, profile=True)
            print(f"{named(spec)}: {result.get('error', 'us per vector step')}")
            print("\n".join(f"  {us:8.1f} {label}" for label, us in result.get("profile", {}).items()), flush=True)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    if "step" in args.works:
        command = [sys.executable, str(HERE / "vec_env_speed.py"), "--seconds", str(args.scale)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        notes.append(f"```{subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout}```")
    print("\n".join(notes))
    results = {named(spec): [] for spec in specs}
    for seed in range(args.rounds):
        for spec in specs:
            results[named(spec)].append(measure(spec, seed, args.scale, peers))
            latest = results[named(spec)][-1]
            print(f"{seed + 1}: {named(spec)}: {latest.get('error') or format(latest['rate'], ',.0f')}", flush=True)
        text, ratios, wrong = report(compared, specs, results)  # in each round: an interruption loses little
        (args.out / "results.md").write_text("\n\n".join([text, *notes]))
        (args.out / "results.json").write_text(json.dumps(results, indent=1))
        draw(args.out / "results.png", ratios, specs, results)
    print(f"\n{text}")
    print("\n".join(f"ERROR: {line}" for line in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
