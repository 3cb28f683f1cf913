"""The picture of translate_dates.py: two curves over their tokens, and the errors of two
normalisations.
"""

from typing import NamedTuple

import keras
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt


class Curve(NamedTuple):
    """The loss of every update and its weight; and the cumulative numbers of real and of computed
    tokens.
    """

    losses: np.ndarray
    weights: np.ndarray
    num_real: np.ndarray
    num_computed: np.ndarray


def picture(curves, errors, out):
    """Draw the curves, up to the same number of real tokens, and the errors of a gradient; return
    the path.
    """
    most = min(curve.num_real[-1] for curve in curves.values())
    figure, axes = plt.subplots(
        1, 3, figsize=(14, 4.5), width_ratios=(4, 4, 3), layout="constrained"
    )
    axes[1].sharey(axes[0])
    for (name, curve), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        draw(
            axes,
            name,
            colour,
            Curve(*(column[: np.searchsorted(curve.num_real, most) + 1] for column in curve)),
        )
    axes[0].set(
        xlabel="real tokens seen, millions", ylabel="loss, mean of some updates", yscale="log"
    )
    axes[0].set_title("By the real tokens seen, they learn about as fast")
    axes[1].set(xlabel="tokens computed, millions, padding included")
    axes[1].set_title("By all tokens computed, padding costs time")
    axes[0].legend()
    bars = axes[2].bar(errors.keys(), errors.values(), color=("tab:blue", "tab:red"))
    axes[2].bar_label(bars, fmt="{:.0e}", padding=2)
    axes[2].set(yscale="log", ylim=(1e-8, 1), ylabel="relative error of the gradient")
    axes[2].set_title("One batch in parts, beside the whole")
    for panel in axes:
        panel.grid(alpha=0.3)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"translate-dates-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw(axes, name, colour, curve):
    num = max(1, min(50, len(curve.losses) // 4))
    sums = [
        np.convolve(values, np.ones(num), "valid")
        for values in (curve.losses * curve.weights, curve.weights)
    ]
    for panel, tokens in zip(axes, (curve.num_real, curve.num_computed), strict=False):
        panel.plot(tokens[num - 1 :] / 1e6, sums[0] / sums[1], label=name, color=colour)
