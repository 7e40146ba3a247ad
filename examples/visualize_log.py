"""Draws what `rl.callbacks.FileLogger` wrote: one curve per quantity over env steps. It needs matplotlib.

python examples/duel_dqn_cartpole.py --log duel.json
python examples/visualize_log.py duel.json                       # in a window
python examples/visualize_log.py duel.json --output duel.png     # to a file, without a screen
"""

import argparse
import json

import matplotlib
import numpy as np

# What tells where an episode stands, not how it went.
AXES = ("episode", "nb_steps", "lane")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the log that a FileLogger wrote")
    parser.add_argument("filename", help="the JSON file; one that is still being written will do")
    parser.add_argument("--output", metavar="FILE", help="draw to this file (.png, .pdf, .svg) instead of a window")
    parser.add_argument("--nb-steps", type=int, help="env steps to draw, from the start; default: all")
    parser.add_argument("--nb-smooth", type=int, default=20, help="episodes in the moving mean; 1 draws none")
    parser.add_argument("--figsize", type=float, nargs=2, metavar=("WIDTH", "HEIGHT"), help="of the picture, in inches")
    args = parser.parse_args()

    with open(args.filename, encoding="utf-8") as file:
        # A quantity that an episode lacks is null: nothing was learnt in the first ones, for instance.
        log = {name: np.array(values, float) for name, values in json.load(file).items()}
    if args.nb_steps is not None:
        log = {name: values[log["nb_steps"] <= args.nb_steps] for name, values in log.items()}
    names = [name for name, values in log.items() if name not in AXES and np.isfinite(values).any()]
    if not names:
        parser.error(f"{args.filename} holds no episode to draw")

    if args.output:
        matplotlib.use("agg")  # draws without a screen
    import matplotlib.pyplot as plt

    size = args.figsize or (10, 2 * len(names))
    figure, panels = plt.subplots(len(names), sharex=True, squeeze=False, figsize=size, layout="constrained")
    for panel, name in zip(panels[:, 0], names, strict=True):
        there = np.isfinite(log[name])
        steps, values = log["nb_steps"][there], log[name][there]
        width = min(args.nb_smooth, len(values))
        panel.plot(steps, values, marker=".", markersize=3, linewidth=0.5, color="tab:blue", alpha=0.5)
        if width > 1:
            at, mean = (np.convolve(x, np.ones(width) / width, mode="valid") for x in (steps, values))
            panel.plot(at, mean, color="tab:orange", label=f"mean of {width} episodes")
            panel.legend()
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    panels[-1, 0].set_xlabel("env steps")
    figure.align_ylabels()
    if args.output:
        figure.savefig(args.output)
        print(f"Drew {', '.join(names)} to {args.output}")
    else:
        plt.show()


if __name__ == "__main__":
    main()
