"""Makes Matplotlib figures for notebooks and files, without windows."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def new_figure(what: str, width_in: float, height_in: float) -> Figure:
    """Returns an empty Matplotlib figure.

    Matplotlib's global state is not used: no window opens, and no figure is
    kept. A notebook displays the figure nevertheless.

    Args:
        what: What needs Matplotlib, such as "Plots".
        width_in: The width in inches.
        height_in: The height in inches.

    Raises:
        ImportError: Matplotlib is not installed.
    """
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError(
            f"{what} need Matplotlib: pip install 'keras-fastdata[report]'"
        ) from error

    class NotebookFigure(figure.Figure):
        """A figure that IPython can display without `pyplot`."""

        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png")
            return file.getvalue()

    return NotebookFigure(
        figsize=(width_in, height_in), dpi=100, layout="constrained"
    )


def plain(text: Any) -> str:
    """Escapes `$` in a text, so that Matplotlib shows no formula."""
    return str(text).replace("$", r"\$")
