"""The picture of a run has a panel for each group of metrics; its pixels are read back."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from pgtoolkit.tracking.curves import _limits, plot_curves

BLUE = (0x1F, 0x77, 0xB4)
ORANGE = (0xD9, 0x5F, 0x02)


def columns(count: int, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Return `count` steps of metrics, each a sine around 1."""
    steps = np.arange(1.0, count + 1)
    return {"step": steps, "documents_seen": 64 * steps} | {
        name: 1 + np.sin(steps / 9) / 2 for name in names
    }


def has_color(path: Path, color: tuple[int, int, int]) -> np.ndarray:
    """Return a boolean for each pixel, (height, width): whether it is close to the color."""
    pixels = np.round(imread(path)[..., :3] * 255)
    return np.abs(pixels - color).max(-1) < 12


def pixels_of_panels(
    path: Path, color: tuple[int, int, int], rows: int = 2, columns: int = 4
) -> np.ndarray:
    """Return the number of pixels of a color in each panel, (rows, columns)."""
    near = has_color(path, color).astype(int)
    panel_height = near.shape[0] // rows
    panel_width = near.shape[1] // columns
    cut = near[: rows * panel_height, : columns * panel_width]
    return cut.reshape(rows, panel_height, columns, panel_width).sum((1, 3))


@pytest.mark.parametrize("count", [1, 300])
def test_every_metric_with_values_has_a_panel(tmp_path, count):
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
    # Equal curves are drawn over each other, so the first is hidden by the second.
    drawn = pixels_of_panels(path, BLUE) + pixels_of_panels(path, ORANGE) > 5
    assert drawn.tolist() == [[True] * 4, [True, True, False, False]]
    has_second_curve = pixels_of_panels(path, ORANGE) > 5
    assert has_second_curve.tolist() == [[True, False, False, False], [False] * 4]
    picture = imread(path)
    height, width = picture.shape[:2]
    assert (np.round(picture[height // 2 :, width // 2 :, :3], 2) == 1).all()


@pytest.mark.parametrize("count", [1, 300])
def test_a_picture_has_only_the_panels_of_its_metrics(tmp_path, count):
    path = tmp_path / "curves.png"
    plot_curves(columns(count, ("loss", "grad_norm")), path, "title")
    assert (pixels_of_panels(path, BLUE, 1, 2) > 5).tolist() == [[True, True]]
    plot_curves(columns(count, ()), path, "title")
    assert pixels_of_panels(path, BLUE).sum() == 0


def test_the_other_values_fill_the_panel_of_a_metric_with_spikes(tmp_path):
    path = tmp_path / "curves.png"
    data = columns(300, ("loss",))
    plot_curves(data, path, "title")
    height_without_spikes = has_color(path, BLUE).any(-1).sum()
    data["loss"][100] = 1e6
    data["loss"][200] = -1e6
    plot_curves(data, path, "title")
    height = has_color(path, BLUE).any(-1).sum()
    assert height > 0.9 * height_without_spikes > 100


def test_only_spikes_are_outside_the_limits_of_an_axis():
    calm = np.sin(np.arange(300) / 9)
    ends = (calm.min(), calm.max())
    assert _limits(calm) == ends
    assert _limits(np.array([*calm, 50.0, -40.0, 60.0])) == ends
    assert _limits(np.array([*calm, 2.5])) == (ends[0], 2.5)  # within the others' range from them
    assert _limits(np.array([0.0] * 20 + [1.0])) == (0.0, 1.0)
    assert _limits(np.array([1.0, 2.0, 900.0])) == (1.0, 900.0)
    assert _limits(np.arange(20)) == (0, 19)
