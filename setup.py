"""Metadata of the distribution `keras-rl3`, which provides the package `rl`."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
# Read, not imported: building the metadata must not need the package's own dependencies.
VERSION = re.search(r'^__version__ = "([^"]+)"', (ROOT / "rl" / "__init__.py").read_text("utf-8"), re.M)
if VERSION is None:
    raise RuntimeError('rl/__init__.py has no line of the form: __version__ = "1.2.3"')

# OpenCV is what Gymnasium's AtariPreprocessing resizes with.
ATARI = ["ale-py>=0.10", "opencv-python-headless>=4.8"]
BOX2D = ["gymnasium[box2d]>=1.1"]
CLASSIC_CONTROL = ["gymnasium[classic-control]>=1.1"]  # pygame, for windows and rgb frames only
JAX = ["jax>=0.6"]  # on CPUs; for GPUs see JAX's own extras
MUJOCO = ["gymnasium[mujoco]>=1.1"]
TENSORBOARD = ["tensorboard>=2.20"]  # TensorFlow itself stopped installing it with 2.21

setup(
    name="keras-rl3",
    version=VERSION.group(1),
    description="Deep reinforcement learning on Keras 3: one agent, many environments at once",
    long_description=(ROOT / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    packages=find_packages(include=["rl", "rl.*"]),
    package_data={"rl": ["py.typed"]},
    python_requires=">=3.11,<3.14",  # Keras needs 3.11; TensorFlow has no wheel for 3.14 yet
    install_requires=[
        "tensorflow>=2.20",  # the first with wheels for Python 3.13
        "keras>=3.12",
        "gymnasium>=1.1",  # the first to say in its metadata how a vector env resets itself
        "numpy>=1.26",
        "cloudpickle>=2.2",
        "h5py>=3.11",
    ],
    extras_require={
        "atari": ATARI,
        "box2d": BOX2D,
        "classic-control": CLASSIC_CONTROL,
        "jax": JAX,
        "mujoco": MUJOCO,
        "tensorboard": TENSORBOARD,
        "wandb": ["wandb>=0.16"],
        "gpu": ["tensorflow[and-cuda]>=2.20"],
        "dev": [
            *ATARI,
            *BOX2D,
            *CLASSIC_CONTROL,
            *JAX,
            *MUJOCO,
            *TENSORBOARD,
            "codespell>=2.3",
            "matplotlib>=3.8",  # tests/benchmarks draws with it, and its test
            "mypy>=1.15",
            "psutil>=5.9",
            "pytest>=8.3",
            "pytest-timeout>=2.3",
            "ruff>=0.17",
            "setuptools>=64",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
