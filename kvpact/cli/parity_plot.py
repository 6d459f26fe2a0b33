"""Where a cache differs from the reference, as a picture: layers by positions, a panel for each quantity."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpact.errors import BadRequest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kvpact.cli.parity_compare import LegReport

SUFFIXES = (".png", ".svg")
FLOOR = 1e-9
"""Differences below are drawn as this one, so that equal numbers have a place on a logarithmic scale."""
SMALLEST_SCALE, LARGEST_SCALE = 1e-6, 1e6
"""Bounds on the upper end of the scale; numbers that aren't any are infinitely far off."""


def check_plot(path: Path) -> None:
    """Refuses, before anything is computed, a file or an environment that can't give a picture.

    Raises:
        BadRequest: another suffix, no such folder, or matplotlib isn't installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BadRequest(f"--plot: found {str(path)!r}, expected a name in .png or .svg", param="--plot")
    if not path.parent.is_dir():
        raise BadRequest(f"--plot: there is no folder {path.parent}", param="--plot")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadRequest(
            "--plot: needs matplotlib, which isn't installed; run: pip install 'kvpact[plot]'", param="--plot"
        ) from error


def draw(reports: Sequence[LegReport], path: Path, *, model: str) -> None:
    """Draws the shortest length at which a leg fails, or the longest length if none does.

    Rows are legs, columns are keys, values and attention logits of the decoded row. A cross marks the first
    place beyond tolerance.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    shown = _shown(reports)
    panels = [quantity for quantity in shown[0].quantities if quantity.by_position_Ln.shape[1] > 1]
    panels = panels or list(shown[0].quantities)
    largest = max(float(quantity.by_position_Ln.max()) for leg in shown for quantity in leg.quantities)
    largest = min(max(largest, SMALLEST_SCALE), LARGEST_SCALE)
    norm = LogNorm(vmin=FLOOR, vmax=largest)
    figure = Figure(figsize=(4.2 * len(panels) + 1.2, 2.9 * len(shown) + 0.9), layout="constrained")
    grid = figure.subplots(len(shown), len(panels), squeeze=False)
    image = None
    for leg, row in zip(shown, grid, strict=True):
        for panel, axes in zip(panels, row, strict=True):
            image = _panel(axes, leg, panel.name, norm)
    assert image is not None
    bar = figure.colorbar(image, ax=grid, extend="min", shrink=0.9)
    bar.set_label("largest absolute difference")
    if FLOOR < shown[0].tolerance < largest:
        bar.ax.axhline(shown[0].tolerance, color="red", linewidth=1.5)
    word = "equal within" if all(leg.passed for leg in shown) else "differs by more than"
    figure.suptitle(f"{model}, {shown[0].prompt_tokens} prompt tokens: {word} {shown[0].tolerance:g}")
    figure.savefig(path, dpi=150)


def _shown(reports: Sequence[LegReport]) -> list[LegReport]:
    failed = [report.prompt_tokens for report in reports if not report.passed]
    length = min(failed) if failed else max(report.prompt_tokens for report in reports)
    return [report for report in reports if report.prompt_tokens == length]


def _panel(axes: Axes, leg: LegReport, name: str, norm: Any) -> Any:
    from matplotlib.ticker import MaxNLocator

    quantity = leg.quantity(name)
    gap_Ln = quantity.by_position_Ln.clamp(min=FLOOR, max=norm.vmax).numpy()
    image = axes.imshow(gap_Ln, aspect="auto", origin="lower", norm=norm, interpolation="nearest")
    axes.set_title(f"{leg.leg}: {name.replace('_', ' ')}", fontsize=10)
    axes.set_xlabel("position")
    axes.set_ylabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    if quantity.first is not None:
        axes.plot(quantity.first.position, quantity.first.layer, "x", color="red", markersize=9, mew=2)
    return image
