import numpy as np
import pytest

from rl.common.tile_images import tile_images


@pytest.mark.parametrize(
    ("nb_images", "grid"),
    [(1, (1, 1)), (2, (2, 1)), (3, (2, 2)), (4, (2, 2)), (5, (3, 2)), (7, (3, 3)), (9, (3, 3)), (10, (4, 3))],
)
@pytest.mark.parametrize("shape", [(4, 6, 3), (2, 3, 1), (5, 2)])
def test_every_image_is_where_it_belongs_and_the_rest_is_black(nb_images, grid, shape):
    images = np.stack([np.full(shape, index + 1, np.uint8) for index in range(nb_images)])
    tiled = tile_images(images)
    height, width = shape[:2]
    assert tiled.shape == (grid[0] * height, grid[1] * width, *shape[2:])
    assert tiled.dtype == np.uint8
    for cell in range(grid[0] * grid[1]):
        row, column = divmod(cell, grid[1])
        content = tiled[row * height : (row + 1) * height, column * width : (column + 1) * width]
        np.testing.assert_array_equal(content, cell + 1 if cell < nb_images else 0)


def test_a_missing_frame_leaves_its_cell_black():
    tiled = tile_images([np.ones((2, 2, 3), np.float32), None, np.full((2, 2, 3), 2, np.float32)])
    assert tiled.dtype == np.float32
    np.testing.assert_array_equal(tiled[:, :, 0], [[1, 1, 0, 0], [1, 1, 0, 0], [2, 2, 0, 0], [2, 2, 0, 0]])


def test_the_inputs_are_not_shared():
    images = np.ones((1, 2, 2, 3), np.uint8)
    tile_images(images)[:] = 9
    np.testing.assert_array_equal(images, 1)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([], "at least one image"),
        ([None, None], "2 images of which none"),
        ([np.zeros(3)], r"\(H, W, C\)"),
        (
            [None, np.zeros((2, 2, 3)), np.zeros((2, 3, 3))],
            r"image 1 is \(2, 2, 3\) float64, image 2 is \(2, 3, 3\)",
        ),
        ([np.zeros((2, 2)), np.zeros((2, 2), np.uint8)], "uint8"),
    ],
)
def test_refuses_what_cannot_be_tiled(images, words):
    with pytest.raises(ValueError, match=words):
        tile_images(images)
