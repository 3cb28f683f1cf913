"""The words' vectors, their files, and pictures, for glove.py."""

import keras
import matplotlib
import numpy as np
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

matplotlib.use("Agg")
from matplotlib import pyplot as plt

PARTS = ("target", "other", "target_bias", "other_bias")


def vectors_of(model):
    """Return (words, dim): the sum of each word's two vectors, as in GloVe."""
    return sum(model.get_layer(name).get_weights()[0] for name in ("target", "other"))


def loss_of(model, data, size=1 << 16):
    """Return the mean loss over all pairs, in pieces, with numpy: the same measure for all runs."""
    (focal, context), count = data
    weights = {name: model.get_layer(name).get_weights()[0] for name in PARTS}
    total = 0.0
    for begin in range(0, len(count), size):
        i, j, met = (column[begin : begin + size] for column in (focal, context, count))
        products = np.einsum("ij,ij->i", weights["target"][i], weights["other"][j])
        error = products + weights["target_bias"][i, 0] + weights["other_bias"][j, 0] - np.log(met)
        total += float(np.sum(np.minimum(met / 100, 1) ** 0.75 * error**2))
    return total / len(count)


def content(words):
    """Return the words without stop words, the most frequent first."""
    return [word for word in words if word not in ENGLISH_STOP_WORDS]


def nearest(word, names, vectors, num=6):
    """Return the words with the nearest vectors by cosine."""
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    order = np.argsort(-(vectors @ vectors[names.index(word)]))
    return [names[i] for i in order if names[i] != word][:num]


def save(path, words, vectors, *, header=False):
    """Write one line a word, `word 0.1 0.2 ...`, in digits that give the same float32 back; return
    the path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        if header:
            file.write(f"{len(words)} {vectors.shape[1]}\n")
        for word, vector in zip(words, vectors, strict=True):
            file.write(" ".join([word, *(f"{value:.9g}" for value in vector)]) + "\n")
    return path


def load(path):
    """Return (words, vectors) of a file in the format of GloVe or, with a header, of word2vec."""
    with path.open(encoding="utf-8") as file:
        found = [line.split() for line in file]
    found = found[1:] if len(found[0]) == 2 else found
    return [line[0] for line in found], np.array([line[1:] for line in found], np.float32)


def picture(losses, names, vectors, out):
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(14, 6.5), layout="constrained", width_ratios=(2, 3)
    )
    draw_curves(left, losses)
    draw_words(right, names, vectors)
    path = out / f"glove-{keras.backend.backend()}.png"
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def draw_curves(axes, losses):
    styles = (
        ("#D55E00", 2.5, "-"),
        ("#56B4E9", 9, "-"),
        ("#F0E442", 5, "-"),
        ("#000000", 1.5, "-"),
        ("#888888", 2, "--"),
    )
    for (name, curve), (color, width, line) in zip(losses.items(), styles, strict=True):
        axes.plot(range(1, len(curve) + 1), curve, line, color=color, linewidth=width, label=name)
    axes.set(
        xlabel="epoch",
        ylabel="loss over all pairs",
        yscale="log",
        title="One model, one rate, one pipeline",
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    axes.grid(alpha=0.3, which="both")
    axes.spines[["top", "right"]].set_visible(False)


def draw_words(axes, names, vectors, num=100):
    """Draw frequent words (no stop words) in the two directions in which they differ most, where
    there is room.
    """
    chosen = [names.index(word) for word in content(names)[:num]]
    points = vectors[chosen] / np.linalg.norm(vectors[chosen], axis=1, keepdims=True)
    points = points - points.mean(axis=0)
    places = points @ np.linalg.svd(points, full_matrices=False)[2][:2].T
    places = (places - places.min(axis=0)) / np.ptp(places, axis=0)
    drawn = []
    for i, (x, y) in zip(chosen, places, strict=True):
        width = 0.007 * len(names[i])
        if all(abs(x - u) > width + other or abs(y - v) > 0.035 for u, v, other in drawn):
            drawn.append((x, y, width))
            size = 13 - len(drawn) / 15
            axes.text(x, y, names[i], ha="center", va="center", fontsize=size, color="#0072B2")
    axes.set(xlim=(-0.06, 1.06), ylim=(-0.04, 1.04), xticks=[], yticks=[])
    axes.set_title(f"{len(drawn)} frequent words, by what they stand beside")
    axes.spines[:].set_color("#cccccc")
