"""Draws docs/loop.png: the losses of the README's first loop, as written and with the line that the report proposes.

KERAS_BACKEND=tensorflow python stepcheck/docs/picture.py
"""

import re
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image

matplotlib.use("Agg")
from matplotlib import pyplot as plt

DOCS = Path(__file__).parent
NUM_EPOCHS = 30
FIX = "y = y[:, None]"


def program() -> str:
    """Return the README's code up to the `with`: the data, the model and the loop."""
    blocks = re.findall(
        r"```python\n(.*?)```", (DOCS.parent / "README.md").read_text(), re.S
    )
    return "\n".join(blocks[:2]).partition("\nwith stepcheck.watch(")[0]


def losses(code: str) -> np.ndarray:
    """Return the mean of the losses that the loop returns, for each epoch."""
    names: dict = {}
    exec(compile(code, "train.py", "exec"), names)
    return np.reshape(
        names["train"](names["model"], epochs=NUM_EPOCHS), (NUM_EPOCHS, -1)
    ).mean(axis=1)


def drawn_from(path: Path) -> str:
    """Return the code that the picture was drawn from."""
    with Image.open(path) as image:
        return image.info["Source"]


def draw(path: Path) -> dict[str, np.ndarray]:
    """Draw the picture, which holds its code, and return the curves."""
    code = program()
    curves = {
        "as written": losses(code),
        f"with {FIX}": losses(f"{code}\n{FIX}"),
    }
    # 840 x 416 pixels, with letters that can be read at half of it
    figure, axes = plt.subplots(figsize=(5.25, 2.6), layout="constrained")
    epochs = np.arange(1, NUM_EPOCHS + 1)
    for (label, curve), colour in zip(
        curves.items(), ("tab:red", "tab:blue"), strict=True
    ):
        axes.plot(epochs, curve, color=colour, linewidth=2)
        axes.annotate(
            label,
            (epochs[-1], curve[-1]),
            (0, 7),
            textcoords="offset points",
            color=colour,
            ha="right",
            fontsize=12,
        )
    axes.set(
        xlabel="epoch", ylabel="loss of the loop", ylim=0, xlim=(1, NUM_EPOCHS)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=160, metadata={"Source": code})
    plt.close(figure)
    return curves


if __name__ == "__main__":
    draw(DOCS / "loop.png")
