"""One picture out of many: the frames of N environments as a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["tile_images"]


def tile_images(images: np.ndarray | Sequence[np.ndarray | None]) -> np.ndarray:
    """Tile N images into one, row by row from the top left.

    The grid has ``ceil(sqrt(N))`` rows and as few columns as hold all images; cells that are left over, and
    images that are None, are black.

    Args:
        images: N images of equal shape ``(H, W, C)`` or ``(H, W)`` and equal dtype, or an array of them. None
            stands for an environment that has no frame to show.

    Returns:
        An array ``(rows * H, columns * W, C)``, or ``(rows * H, columns * W)`` for images without channels.

    Raises:
        ValueError: If there is no image at all, or if the images differ in shape or dtype.
    """
    frames = [None if image is None else np.asarray(image) for image in images]
    shown = [(index, frame) for index, frame in enumerate(frames) if frame is not None]
    if not shown:
        raise ValueError(f"tile_images needs at least one image, got {len(frames)} images of which none has a frame.")
    first_index, first = shown[0]
    if first.ndim not in (2, 3):
        raise ValueError(f"tile_images expects images of shape (H, W, C) or (H, W), got {first.shape}.")
    for index, frame in shown:
        if frame.shape != first.shape or frame.dtype != first.dtype:
            raise ValueError(
                f"tile_images expects images of equal shape and dtype: image {first_index} is "
                f"{_describe(first)}, image {index} is {_describe(frame)}."
            )
    nb_rows = int(np.ceil(np.sqrt(len(frames))))
    nb_columns = -(-len(frames) // nb_rows)
    height, width = first.shape[:2]
    tiled = np.zeros((nb_rows * height, nb_columns * width, *first.shape[2:]), dtype=first.dtype)
    for index, frame in shown:
        row, column = divmod(index, nb_columns)
        tiled[row * height : (row + 1) * height, column * width : (column + 1) * width] = frame
    return tiled


def _describe(frame: Any) -> str:
    return f"{frame.shape} {frame.dtype}"
