"""The picture of a run: panels drawn from what the rows have, read back from the pixels."""

import math

import numpy as np
import pytest
from matplotlib.image import imread

from pgtoolkit.tracking.curves import _limits, plot_curves

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xD9, 0x5F, 0x02)


def columns(count, names):
    steps = np.arange(1.0, count + 1)
    return {"step": steps, "documents_seen": 64 * steps} | {name: 1 + np.sin(steps / 9) / 2 for name in names}


def panels(path, color):
    """(2, 3) number of pixels of a color in each panel."""
    pixels = np.round(imread(path)[..., :3] * 255)
    near = (np.abs(pixels - color).max(-1) < 12).astype(int)
    height, width = near.shape[0] // 2 * 2, near.shape[1] // 3 * 3
    return near[:height, :width].reshape(2, height // 2, 3, width // 3).sum((1, 3))


@pytest.mark.parametrize("count", [1, 300])
def test_every_panel_draws_its_metrics(tmp_path, count):
    names = ("reward", "exact_match", "loss", "ratio_new_old", "clipped_ratio_fraction", "kl_new_old", "grad_norm")
    path = tmp_path / "curves.png"
    plot_curves(columns(count, (*names, "completion_length", "entropy")), path, "title")
    # Equal curves lie on top of each other, so the first may be hidden by the second; its axis label is not.
    assert (panels(path, BLUE) + panels(path, ORANGE) > 5).all()
    assert (panels(path, ORANGE) > 5).tolist() == [[True, False, True], [False, False, True]]


def test_a_spike_does_not_flatten_its_panel(tmp_path):
    """The other values fill the panel's height; the spike is an arrow at its edge, with its number."""
    path, data = tmp_path / "curves.png", columns(300, ("loss",))
    plot_curves(data, path, "title")
    calm = lines_of_pixels(path, BLUE)
    data["loss"][100] = 1e6
    data["loss"][200] = -1e6
    plot_curves(data, path, "title")
    assert lines_of_pixels(path, BLUE) > 0.9 * calm > 100


def test_limits_cut_spikes_alone():
    calm = [math.sin(i / 9) for i in range(300)]
    assert _limits(calm) == (min(calm), max(calm))
    assert _limits([*calm, 50.0, -40.0, 60.0]) == (min(calm), max(calm))
    assert _limits([*calm, 2.5]) == (min(calm), 2.5)  # within the others' range from them
    assert _limits([0.0] * 20 + [1.0]) == (0.0, 1.0)
    assert _limits([1.0, 2.0, 900.0]) == (1.0, 900.0)
    assert _limits(list(range(20))) == (0, 19)


def lines_of_pixels(path, color):
    """In how many rows of pixels of the loss's panel the color occurs."""
    pixels = np.round(imread(path)[..., :3] * 255)
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 3
    return (np.abs(pixels[:height, width : 2 * width] - color).max(-1) < 12).any(-1).sum()
