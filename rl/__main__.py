"""`python -m rl` says which `rl` is imported, from where, and whether another distribution owns that name, too."""

import importlib.metadata
from pathlib import Path

import rl

NAME = "keras-rl3"


def main() -> None:
    """Prints the version, the folder, and the distributions that provide a package `rl`."""
    owners = sorted(set(importlib.metadata.packages_distributions().get("rl", ())))
    print(f"rl {rl.__version__} in {Path(rl.__file__).parent}")
    others = [name for name in owners if name != NAME]
    if others:
        print(f"Also installed under this name: {', '.join(others)}. Fix: pip uninstall {' '.join(others)}")


if __name__ == "__main__":
    main()
