"""The picture of a run: panels drawn from what the rows have, read back from the pixels."""

import math

import numpy as np
import pytest
from matplotlib.image import imread

from pgtoolkit.errors import StorageError
from pgtoolkit.tracking.plots import plot_curves

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xD9, 0x5F, 0x02)


def rows(count, names):
    return [
        {"step": i, "documents_seen": 64 * i, **{name: 1 + math.sin(i / 9) / 2 for name in names}}
        for i in range(1, count + 1)
    ]


def panels(path, color):
    """(2, 3) number of pixels of a color in each panel."""
    pixels = np.round(imread(path)[..., :3] * 255)
    near = (np.abs(pixels - color).max(-1) < 12).astype(int)
    height, width = near.shape[0] // 2 * 2, near.shape[1] // 3 * 3
    return near[:height, :width].reshape(2, height // 2, 3, width // 3).sum((1, 3))


@pytest.mark.parametrize("count", [1, 12, 300])
def test_every_panel_draws_its_metrics(tmp_path, count):
    names = ("reward", "exact_match", "loss", "ratio_new_old", "clipped_ratio_fraction", "kl_new_old", "grad_norm")
    path = tmp_path / "curves.png"
    plot_curves(rows(count, (*names, "completion_length", "entropy")), path, "title")
    # Equal curves lie on top of each other, so the first may be hidden by the second; its axis label is not.
    assert (panels(path, BLUE) + panels(path, ORANGE) > 5).all()
    assert (panels(path, ORANGE) > 5).tolist() == [[True, False, True], [False, False, True]]


def test_panels_without_data_stay_empty(tmp_path):
    path = tmp_path / "curves.png"
    plot_curves(rows(50, ("loss", "reward")), path, "title")
    assert (panels(path, BLUE) > 5).tolist() == [[True, True, False], [False, False, False]]
    plot_curves([], path, "title")
    assert panels(path, BLUE).sum() == 0


def test_rows_without_documents_seen_are_drawn_over_steps(tmp_path):
    plot_curves([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}], tmp_path / "curves.png", "title")
    assert panels(tmp_path / "curves.png", BLUE)[0, 1] > 5


def test_a_folder_that_is_gone_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match=r"curves\.png cannot be written"):
        plot_curves([], tmp_path / "gone" / "curves.png", "title")
