"""The picture of a run: panels drawn from what the rows have, read back from the pixels."""

import numpy as np
import pytest
from matplotlib.image import imread

from pgtoolkit.tracking.curves import _limits, plot_curves

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xD9, 0x5F, 0x02)


def columns(count, names):
    steps = np.arange(1.0, count + 1)
    return {"step": steps, "documents_seen": 64 * steps} | {
        name: 1 + np.sin(steps / 9) / 2 for name in names
    }


def panels(path, color, rows=2, columns=4):
    """(rows, columns) number of pixels of a color in each panel."""
    pixels = np.round(imread(path)[..., :3] * 255)
    near = (np.abs(pixels - color).max(-1) < 12).astype(int)
    height, width = near.shape[0] // rows * rows, near.shape[1] // columns * columns
    return (
        near[:height, :width].reshape(rows, height // rows, columns, width // columns).sum((1, 3))
    )


@pytest.mark.parametrize("count", [1, 300])
def test_every_metric_has_a_panel_and_nothing_else_has(tmp_path, count):
    names = (
        "reward",
        "exact_match",
        "loss",
        "ratio_new_old",
        "clipped_ratio_fraction",
        "kl_new_old",
        "grad_norm",
    )
    path = tmp_path / "curves.png"
    data = columns(count, names) | {"entropy": np.full(count, np.nan)}
    plot_curves(data, path, "title")
    # Equal curves lie on top of each other, so the first is hidden by the second.
    drawn = panels(path, BLUE) + panels(path, ORANGE) > 5
    assert drawn.tolist() == [[True] * 4, [True, True, False, False]]
    assert (panels(path, ORANGE) > 5).tolist() == [[True, False, False, False], [False] * 4]
    assert (
        np.round(imread(path)[imread(path).shape[0] // 2 :, imread(path).shape[1] // 2 :, :3], 2)
        == 1
    ).all()
    plot_curves(columns(count, ("loss", "grad_norm")), path, "title")
    assert (panels(path, BLUE, 1, 2) > 5).tolist() == [[True, True]]
    plot_curves(columns(count, ()), path, "title")
    assert panels(path, BLUE).sum() == 0


def test_a_spike_does_not_flatten_its_panel(tmp_path):
    """The other values fill the panel's height."""
    path, data = tmp_path / "curves.png", columns(300, ("loss",))
    plot_curves(data, path, "title")
    calm = lines_of_pixels(path, BLUE)
    data["loss"][100] = 1e6
    data["loss"][200] = -1e6
    plot_curves(data, path, "title")
    assert lines_of_pixels(path, BLUE) > 0.9 * calm > 100


def test_limits_cut_spikes_alone():
    calm = np.sin(np.arange(300) / 9)
    ends = (calm.min(), calm.max())
    assert _limits(calm) == ends
    assert _limits(np.array([*calm, 50.0, -40.0, 60.0])) == ends
    assert _limits(np.array([*calm, 2.5])) == (ends[0], 2.5)  # within the others' range from them
    assert _limits(np.array([0.0] * 20 + [1.0])) == (0.0, 1.0)
    assert _limits(np.array([1.0, 2.0, 900.0])) == (1.0, 900.0)
    assert _limits(np.arange(20)) == (0, 19)


def lines_of_pixels(path, color):
    """In how many rows of pixels of the loss's panel, which is alone, the color occurs."""
    pixels = np.round(imread(path)[..., :3] * 255)
    return (np.abs(pixels - color).max(-1) < 12).any(-1).sum()
