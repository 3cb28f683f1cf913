"""The table and the picture of examples/digits.py: how far the runs are from the first."""

from pathlib import Path

import keras
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_FLOOR = 1e-8  # a logarithmic axis cannot show 0
NOTES = """\
loss k      of epoch k, as each run reports it: wholestep weighs every row of the epoch by its
            sample weight, Keras averages the losses of its batches.
difference  of the parameters from the first row's, after the last epoch: the largest over all
            variables of max|a - b| / max|b|.
s/epoch     median over the epochs after the first (which compiles), from begin to end of the
            epoch."""


def table(rows: list) -> str:
    """Return the runs as a table, with the loss of a few epochs."""
    last = len(rows[0].losses) - 1
    shown = sorted({0, last // 4, last // 2, last})
    titles = [*(f"loss {i + 1}" for i in shown), "accuracy", "difference", "s/epoch"]
    lines = [f"{'':41}" + "".join(f"{title:>11}" for title in titles)]
    for row in rows:
        losses = "".join(f"{row.losses[i]:11.5f}" for i in shown)
        lines.append(
            f"{row.name:41}{losses}{row.accuracy:11.2%}{row.differences[-1]:11.1e}{row.seconds:11.3f}"
        )
    return "\n".join(lines)


def picture(rows: list, out: Path) -> Path:
    """Plot the differences of losses and parameters from the first run's; return the path of the
    picture.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.4), layout="constrained", sharey=True)
    whole = np.asarray(rows[0].losses)
    epochs = np.arange(1, len(whole) + 1)
    for i, row in enumerate(rows[1:], start=1):
        style = {
            "label": row.name,
            "linewidth": 7 - i,
            "color": f"C{i}",
            "marker": "." if len(epochs) < 3 else None,
        }
        left.plot(epochs, np.maximum(np.abs(row.losses - whole) / whole, _FLOOR), **style)
        right.plot(epochs, np.maximum(row.differences, _FLOOR), **style)
    left.set(
        xlabel="epoch",
        ylabel="relative difference (0 is drawn at 1e-8)",
        yscale="log",
        ylim=(_FLOOR / 2, 10),
    )
    left.set_title("How far the reported losses are from the first run's")
    right.set(xlabel="epoch", title="How far the parameters are: max|a - b| / max|b|")
    inset = left.inset_axes((0.55, 0.76, 0.42, 0.22))
    inset.plot(epochs, whole, color="C0")
    inset.set(yscale="log", xticks=[], title=None)
    inset.annotate(
        "loss of the first run",
        (0.97, 0.9),
        xycoords="axes fraction",
        ha="right",
        va="top",
        fontsize=8,
    )
    inset.tick_params(which="both", labelsize=7)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"digits-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
