"""I fine-tune a pretrained model with LoRA, on packed rows in which only the answers count. What
divides the loss?

The number of answer tokens in the whole update. Packed rows hold different numbers of them, so a
mean of microbatch means, which other tools take under gradient accumulation, weighs the tokens
unequally. The whole way:

1. Pretrain a small Transformer on the documentation of Python (`pydoc_data`), character by
character.
2. Load the weights of its backbone into a new model in bfloat16, and add LoRA to queries, values
and dense layers.
3. Teach it to write the first line of a docstring after the signature of a function. Short rows
   share a row; tokens weigh 1 in the docstring and 0 elsewhere; microbatches are as large as the
   memory limit permits (JAX).
4. Stop in mid-epoch, resume in a new model, and count the bits that differ from a run without a
stop.
5. Measure the loss and the gradient of one batch, divided in both ways.
6. Export to `.keras`, and load the file with Keras alone.

    KERAS_BACKEND=jax python examples/finetune.py [--quick] [--shards 2] [--preset NAME]

Allow 5 minutes on 2 CPU cores; with --quick, one, for a model that has learned little more than
spelling. `--shards` shards the kernels of queries, keys, values and wide layers (JAX). `--preset`
fine-tunes a model of keras-hub instead.
"""

import argparse
import os
import random
import tempfile
from importlib import import_module
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import devices
import keras
import numpy as np
from finetune_data import LENGTH, VOCABULARY, characters, docstrings, windows
from finetune_model import Answers, add_lora, new_backbone, sharded

import wholestep as ws

RANK = 4
NUM_ROWS = 32
NUM_PARTS = 8
MEMORY = 48 * 2**20  # of LoRA; in an update; for (5); bytes of an update


def main(argv=None):
    """Go the whole way; return the measurements by name."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer updates, on fewer functions")
    parser.add_argument(
        "--shards", type=int, default=1, help="the number of devices that share these kernels (JAX)"
    )
    parser.add_argument("--preset", help="a preset of keras-hub, or the folder of one")
    arguments = parser.parse_args(argv)
    devices.split_cpu(arguments.shards)
    pairs = docstrings()[: 640 if arguments.quick else None]
    train = pairs[: -len(pairs) // 8]
    held_out = pairs[-len(pairs) // 8 :]
    print(
        f"{len(pairs)} functions of the standard library. Engine: {keras.backend.backend()}.",
        flush=True,
    )
    if arguments.preset:
        return import_module("finetune_preset").tune(arguments.preset, train)
    policy = keras.config.dtype_policy()
    with tempfile.TemporaryDirectory() as folder:
        try:
            return fine_tune(Path(folder), train, held_out, arguments)
        finally:
            keras.config.set_dtype_policy(policy)
            keras.distribution.set_distribution(None)


def fine_tune(folder, train, held_out, arguments):
    num_updates, epochs = (40, 1) if arguments.quick else (1000, 4)
    pretrain(folder / "pretrained", num_updates)
    data = packed(train)
    unseen = packed(held_out)
    print(f"{len(train)} functions in {len(data)} batches of shape {data.shapes[0]}", flush=True)
    keras.config.set_dtype_policy("mixed_bfloat16")
    if arguments.shards > 1:
        keras.distribution.set_distribution(sharded(arguments.shards))
    model, other = (tune(weights, data, epochs) for weights in (folder / "pretrained", None))
    losses = [trainer_of(each).evaluate(unseen, verbose=0) for each in (model, other)]
    print(
        "Loss of a held-out character: {:.3f}; without the pretrained weights {:.3f}".format(
            *losses
        ),
        flush=True,
    )
    differing = stopped_and_resumed(folder, data, epochs, model)
    exported = export(model, folder / "tuned.keras", unseen)
    keras.config.set_dtype_policy("float32")
    errors = normalisation(model, data)
    print(
        "You have seen: an update is divided once, by the tokens that count in all of it, and "
        "every step around it."
    )
    return {"losses": losses, "differing": differing, "errors": errors, "exported": exported}


def new_task(pretrained=None, rank=RANK):
    """Return a model with a new head; its backbone has the weights of the checkpoint, if any, and
    LoRA.
    """
    random.seed(1)  # from which Keras draws the seeds of weights
    backbone = new_backbone()
    logits = keras.layers.Dense(VOCABULARY, dtype="float32", name="head")(backbone(backbone.input))
    if pretrained is not None:
        result = ws.load_weights(backbone, pretrained)  # before add_lora: no file has those weights
        print(
            f"Loaded {len(result.loaded)} weights; not used: {', '.join(result.unused)}.",
            flush=True,
        )
    if rank:
        add_lora(backbone, rank)
    return keras.Model(backbone.input, logits, name="task")


# ---- the steps ----


def packed(pairs):
    """Return batches of NUM_ROWS rows, each with several pairs."""
    rows = [characters(pair) for pair in pairs]
    options = {"tokens": NUM_ROWS * LENGTH, "boundaries": [LENGTH], "pack": True, "seed": 7}
    return ws.Batches(rows, length=lambda row: len(row["tokens"]), **options)


def pretrain(folder, num_updates):
    """Train all weights on windows of text, in float32; save the run."""
    trainer = ws.Trainer(new_task(rank=0), Answers(), optimizer=keras.optimizers.Adam(2e-3))
    for step in trainer.steps(ws.Batches(windows(), NUM_ROWS, seed=1), epochs=num_updates):
        if step.number == num_updates:
            print(f"Pretrained for {step.number} updates: loss {step.loss:.3f}", flush=True)
            trainer.save(folder)
            return


def trainer_of(model):
    """Return the trainer of a fine-tuning."""
    # TensorFlow does not know a program's memory
    limit = MEMORY if keras.backend.backend() == "jax" else None
    options = {
        "optimizer": keras.optimizers.Adam(3e-3),
        "microbatch_size": "auto",
        "memory_limit": limit,
    }
    return ws.Trainer(model, Answers(), **options)


def tune(pretrained, data, epochs, *, checkpoints=None, until=None):
    """Return the model that is fine-tuned on the data, after `until` updates or at the end."""
    trainer = trainer_of(new_task(pretrained))
    data.seek(0)
    for step in trainer.steps(data, epochs, checkpoints=checkpoints):
        if step.number == until:
            break
    else:
        if checkpoints is None and pretrained is not None:
            print(trainer.explain(), flush=True)
    return trainer.model


def stopped_and_resumed(folder, data, epochs, model):
    """Stop in the middle of the last epoch, resume in a new model, and return the number of bits
    that differ.
    """
    checkpoints = ws.Checkpoints(folder / "run", every_steps=2)
    stop = (epochs - 1) * len(data) + max(len(data) // 2, 3)
    tune(folder / "pretrained", data, epochs, checkpoints=checkpoints, until=stop)
    resumed = tune(None, data, epochs, checkpoints=checkpoints)
    pairs = zip(model.get_weights(), resumed.get_weights(), strict=True)
    num = sum(
        int(
            np.unpackbits(
                np.frombuffer(a.tobytes(), "uint8") ^ np.frombuffer(b.tobytes(), "uint8")
            ).sum()
        )
        for a, b in pairs
    )
    print(
        f"Stopped after update {stop} of {epochs * len(data)}, and resumed: {num} bits of the "
        "weights differ."
    )
    return num


def export(model, path, data):
    """Save the model, load it with Keras, and return the relative difference of the logits."""
    model.save(path)
    loaded = keras.models.load_model(path)
    batch = next(iter(data))
    inputs = {name: batch[name] for name in ("tokens", "positions", "segment_ids")}
    one, two = (keras.ops.convert_to_numpy(each(inputs)) for each in (model, loaded))
    lora = [np.abs(v.numpy()).max() for v in loaded.trainable_weights if "lora" in v.name]
    print(
        f"Exported, and loaded by Keras: logits differ by {relative_error(two, one):.0e} (bfloat16 "
        "rounds to 4e-03)."
    )
    print(
        f"LoRA is merged into the kernels, and {max(lora):.0f} in the file: to train on, resume "
        "the run.",
        flush=True,
    )
    return {"difference": relative_error(two, one), "largest": max(lora)}


# ---- the effect of the normalisation ----


def normalisation(model, data):
    """Return the loss and the gradient's error of one batch in microbatches, divided in two ways;
    in float32.
    """
    twin = new_task()
    twin.set_weights(model.get_weights())
    data.seek(0)
    batch = next(iter(data))
    num = NUM_ROWS // NUM_PARTS
    parts = [
        {name: leaf[i : i + num] for name, leaf in batch.items()} for i in range(0, NUM_ROWS, num)
    ]
    found = {
        "full batch": gradients(twin, [batch], NUM_ROWS),
        "divided once": gradients(twin, [batch], num),
    }
    found["mean of means"] = gradients(twin, parts, num)
    found = {name: [np.mean(each, axis=0) for each in pair] for name, pair in found.items()}
    errors = {
        name: relative_error(gradient, found["full batch"][1])
        for name, (_, gradient) in found.items()
    }
    counts = [int(part["weights"].sum()) for part in parts]
    print(f"A batch in {NUM_PARTS} microbatches, in which {counts} characters count:")
    for name, (loss, _) in found.items():
        print(f"  {name:13}  loss {loss:.7f}  error of the gradient {errors[name]:.0e}")
    return {name: (float(loss), errors[name]) for name, (loss, _) in found.items()}


def gradients(model, batches, microbatch_size):
    """Return the loss and the gradient of each batch; a gradient is the change by an update of
    plain SGD.
    """
    rate = 1024.0  # large, so that subtracting weights loses no digits
    trainer = ws.Trainer(
        model, Answers(), optimizer=keras.optimizers.SGD(rate), microbatch_size=microbatch_size
    )
    start = model.get_weights()
    losses = []
    found = []
    for batch in batches:
        losses.append(float(trainer.update(batch)["loss"]))
        moves = [before - after for before, after in zip(start, model.get_weights(), strict=True)]
        found.append(np.concatenate([move.ravel() for move in moves]) / rate)
        model.set_weights(start)
    return losses, found


def relative_error(found, right):
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))


if __name__ == "__main__":
    main()
