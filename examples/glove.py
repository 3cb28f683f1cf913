"""Why does my GloVe model stay on a plateau in my own loop, where `fit` trains it well from the
same pipeline?

Because of a shape. The pipeline's labels are (B,), the model's outputs (B, 1). `prediction -
log(count)` in a hand-written loop is then (B, B): every pair is fitted to the count of every other
pair of its batch. `fit` trains the same model with the same function, as Keras gives labels the
rank of the outputs before a loss. One line fixes the loop.

1. the loop as written, with a bare operation on (B,) and (B, 1): the plateau;
2. the same loop and one more line: `count = ops.reshape(count, (-1, 1))`;
3. `keras.Model.fit`;
4. a hand-written loop over `trainer.steps`. 2, 3 and 4 are on one curve. (On TensorFlow 4 is a few
   per cent apart: Keras squares the gradients of equal embedding rows there before it sums them.)
   The loss as written, as an `Objective`, is refused before anything runs, with an error that names
   both shapes;
5. the loop of 4, its rows shuffled in a window of 1000. This is the second, smaller effect: the
   table is sorted, and a window still yields one word's pairs, then the next word's. Runs 1 to 4
   permute all rows every epoch.

The vectors (Pennington, Socher and Manning, "GloVe: Global Vectors for Word Representation", 2014)
come from real text: the language reference in Python's library (`pydoc_data.topics`), or any text
file, which may be larger than memory.

    KERAS_BACKEND=jax python examples/glove.py [--quick] [--corpus FILE] [--out FOLDER]
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import glove_pairs
import glove_vectors
import keras
from glove_loops import by_hand
from keras import ops

import wholestep as ws

BATCH_SIZE = 512
SHUFFLE_WINDOW = 1000
RATE = 0.005
SEED = 7
AS_WRITTEN = "own loop, as written"
MENDED = "own loop, labels reshaped"
KERAS = "keras fit"
OURS = "own loop over trainer.steps"
WINDOW = f"the same, a window of {SHUFFLE_WINDOW} rows"
ASK = ("class", "function", "exception", "import", "string", "loop", "tuple", "module")


def main(argv=None):
    """Build the table, train in five ways, save vectors and a picture; return the measurements by
    name.
    """
    arguments = parse(argv)
    print(f"Engine: {keras.backend.backend()}.")
    corpus = arguments.corpus
    out = arguments.out
    words = glove_pairs.vocabulary(
        glove_pairs.lines(corpus), arguments.vocabulary, arguments.min_count
    )
    if len(words) < 2:
        raise SystemExit(
            "Fewer than two words occur often enough: try a smaller --min-count or another "
            "--corpus."
        )
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        text = glove_pairs.lines(corpus)
        focal, context, count = glove_pairs.cooccurrences(
            text, words, arguments.window, Path(folder)
        )
        print(
            f"{len(count)} pairs of words within {arguments.window} words. Loss over all of them, "
            "by epoch:"
        )
        result = train(((focal, context), count), len(words), arguments.dim, arguments.epochs)
    learned = result.pop("vectors")
    names = list(words)
    asked = [word for word in ASK if word in words] or glove_vectors.content(words)[: len(ASK)]
    result |= {"num_words": len(words), "num_pairs": len(count)}
    result["neighbours"] = {word: glove_vectors.nearest(word, names, learned) for word in asked}
    path = out / f"glove-{keras.backend.backend()}.txt"
    result["vectors"] = glove_vectors.save(path, words, learned, header=arguments.header)
    result["picture"] = glove_vectors.picture(result["losses"], names, learned, out)
    report(result)
    return result


def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, help="a text file (UTF-8); without it, Python's language reference")
    add("--quick", action="store_true", help="frequent words only, shorter vectors, few epochs")
    add("--window", type=int, default=10, help="words to either side that count as context")
    add("--vocabulary", type=int, default=20_000, help="the most frequent words, at most")
    add("--min-count", type=int, help="how often a word must occur (5; quick: 15)")
    add("--dim", type=int, help="length of a vector (100; quick: 32)")
    add("--epochs", type=int, help="(12; quick: 6)")
    add("--out", type=Path, default=Path("out"), help="folder of the vectors and the picture")
    add(
        "--header",
        action="store_true",
        help="begin the vectors as word2vec does: number of words, length",
    )
    arguments = parser.parse_args(argv)
    for name, usual, quick in (("min_count", 5, 15), ("dim", 100, 32), ("epochs", 12, 6)):
        if getattr(arguments, name) is None:
            setattr(arguments, name, quick if arguments.quick else usual)
    return arguments


# ---- the model and its loss ----


def glove_loss(count, prediction):
    """Return min(count / 100, 1)^0.75 * (prediction - log(count))^2, unreduced.

    Rare pairs have small weights; the weights of frequent pairs are limited.
    """
    weight = ops.minimum(count / 100, 1) ** 0.75
    return weight * (prediction - ops.log(count)) ** 2


def network(num_words, dim):
    """Return the model that predicts log count = target . context + a bias of each, as (rows, 1);
    compiled.
    """
    focal = keras.Input((), dtype="int32", name="focal")
    context = keras.Input((), dtype="int32", name="context")
    target = embedding(num_words, dim, "target", 1)(focal)
    other = embedding(num_words, dim, "other", 2)(context)
    biases = [
        keras.layers.Embedding(num_words, 1, "zeros", name=f"{name}_bias")(word)
        for name, word in (("target", focal), ("other", context))
    ]
    model = keras.Model(
        (focal, context), keras.layers.add([keras.layers.Dot(1)([target, other]), *biases])
    )
    model.compile(keras.optimizers.Adam(RATE), glove_loss)
    return model


def embedding(num_words, dim, name, seed):
    # the same in every run
    start = keras.initializers.RandomUniform(-0.5 / dim, 0.5 / dim, seed=SEED + seed)
    return keras.layers.Embedding(num_words, dim, start, name=name)


# ---- the loss of the hand-written loop, as usual in Keras 3 on either engine ----


def as_written(model, pair, count):
    return ops.mean(glove_loss(count, model(pair, training=True)))  # (B,) and (B, 1) make (B, B)


def mended(model, pair, count):
    count = ops.reshape(count, (-1, 1))
    return ops.mean(glove_loss(count, model(pair, training=True)))


def fit(model, batches, epochs, note):
    """Train with `keras.Model.fit` on the same batches, in the same order."""
    stream = (batch for _ in range(epochs) for batch in batches)
    noting = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: note(model))
    model.fit(
        stream,
        steps_per_epoch=len(batches),
        epochs=epochs,
        callbacks=[noting],
        verbose=0,
        shuffle=False,
    )


def loop(model, batches, epochs, note):
    for step in ws.Trainer(model).steps(batches, epochs):
        if step.batch + 1 == len(batches):
            note(model)


class AsWritten(ws.Objective):
    """The loss as written: the mistake, made on purpose."""

    def __call__(self, model, batch, training):
        """Return (B, B) values, which no update can divide among B rows."""
        pair, count = batch
        return ws.Mean(glove_loss(count, model(pair, training=training)))


def refusal(data, num_words, dim):
    """Return the library's error for the loss as written."""
    try:
        return ws.Trainer(network(num_words, dim), AsWritten()).update(
            next(ws.Batches(data, BATCH_SIZE))
        )
    except ws.SpecificationError as error:
        return str(error)


# ---- five runs from the same weights; each has a curve: the loss over all pairs after every epoch
# ----


def train(data, num_words, dim, epochs):
    """Train in five ways; return the curves, the vectors, and the library's error for the first
    way.
    """
    models = {}
    losses = {}
    order = glove_pairs.window_shuffled(len(data[1]), SHUFFLE_WINDOW, SEED)
    windowed = keras.tree.map_structure(lambda column: column[order], data)
    for name, way, rows, shuffle in (
        (AS_WRITTEN, by_hand(as_written), data, True),
        (MENDED, by_hand(mended), data, True),
        (KERAS, fit, data, True),
        (OURS, loop, data, True),
        (WINDOW, loop, windowed, False),
    ):
        print(f"{len(losses) + 1}. {name}:", end="", flush=True)
        models[name], losses[name], began = network(num_words, dim), [], time.perf_counter()

        def note(model, curve=losses[name]):
            curve.append(glove_vectors.loss_of(model, data))
            print(f" {curve[-1]:.4f}", end="", flush=True)

        way(models[name], ws.Batches(rows, BATCH_SIZE, seed=SEED, shuffle=shuffle), epochs, note)
        print(f" ({time.perf_counter() - began:.0f} s)", flush=True)
    learned = glove_vectors.vectors_of(models[OURS])
    return {"losses": losses, "refusal": refusal(data, num_words, dim), "vectors": learned}


def report(result):
    last = {name: losses[-1] for name, losses in result["losses"].items()}
    together = [last[name] for name in (MENDED, KERAS, OURS)]
    print(
        f"1 ends at {last[AS_WRITTEN]:.4f}; 2, 3 and 4 at {min(together):.4f} to "
        f"{max(together):.4f}; ",
        end="",
    )
    print(f"5 at {last[WINDOW]:.4f}.")
    print(f"The loss of 1, as an Objective: {result['refusal']}")
    for word, others in result["neighbours"].items():
        print(f"{word:>12}: {', '.join(others)}")
    print(f"Vectors: {result['vectors']}, picture: {result['picture']}")
    print(
        "You have seen: a missing axis of the labels makes a plateau, and a small window of rows "
        "costs some, too."
    )


if __name__ == "__main__":
    main()
