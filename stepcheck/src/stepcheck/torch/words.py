"""The causes in PyTorch's words: explanations and fixes that differ from those for Keras."""

from collections.abc import Iterator
from dataclasses import replace

from stepcheck.report.causes import ADDED_UP_ONCE, OF_ROWS, OF_WEIGHTS
from stepcheck.report.found import Found

# By name the explanation, if it differs, and after an arrow the fix.
_TEXT = """
rows never used
    -> let the last, shorter batch through: `DataLoader(..., drop_last=False)`.
same order every pass
    -> `DataLoader(..., shuffle=True)`; with a `DistributedSampler` call `set_epoch(epoch)` in every epoch.
same batches every pass
    -> `DataLoader(dataset, batch_size, shuffle=True)` over rows, and not over batches.
batches of few labels
    -> `DataLoader(..., shuffle=True)`.
window carried over the epoch
    -> make a step of the rest at the end of each pass: `if (i + 1) % k == 0 or i + 1 == len(loader)`.
shuffle window
    -> `DataLoader(..., shuffle=True)` over a map-style dataset draws among all rows.
drawn with replacement
    -> `RandomSampler(dataset, replacement=False)`, which is `shuffle=True`.
rows twice in a pass
    -> take the last batch as short as it is; a `DistributedSampler` repeats rows unless `drop_last=True`,
    Accelerate unless `even_batches=False` (a `DataLoaderConfiguration`).
inference mode
    The gradient is taken in inference mode: dropout is off, and batch normalisation uses its running statistics.
    -> call `model.train()` at the beginning of each epoch: `model.eval()` stays in force after an evaluation.
inputs swapped
    -> name them: `model(a=a, b=b)`.
broadcast
    -> give all the same shape, sample weights too: `loss_fn(output.squeeze(-1), y)`, or
    `loss_fn(output, y.unsqueeze(-1))`.
from_logits
    -> `BCEWithLogitsLoss` takes logits, `BCELoss` the result of `torch.sigmoid`.
softmax twice
    -> give the loss the logits: `CrossEntropyLoss` takes the softmax itself, `BCEWithLogitsLoss` the sigmoid.
labels shifted
    -> cut inputs and labels by the same index, `x[rows], y[rows]`, and `roll` neither.
mean of means
    -> divide each microbatch's sum by the rows (or tokens) of the whole window: `loss.sum() / num_in_window`, with
    `reduction="none"`.
summed over microbatches
    -> divide by the rows of the window, or, if microbatches are even, `(loss / k).backward()`.
divided by a full window
    -> divide by the number of rows that are there, also in the last window of a pass.
divided by the full batch
    -> divide by the number of rows of this batch.
never divided
    -> `reduction="mean"`, or divide by the number of rows: `loss / len(x)`.
last window dropped
    The last microbatches of a pass train nothing: their gradients are thrown away before the optimizer makes a step.
    -> make a step of the rest at the end of each pass: `if (i + 1) % k == 0 or i + 1 == len(loader)`.
divided twice
    -> divide once: `reduction="mean"` has already divided by the rows.
only the last microbatch
    -> call `optimizer.zero_grad()` once per update, after `optimizer.step()`, and not before each `loss.backward()`.
only the first microbatch
    -> call `loss.backward()` for each microbatch.
first microbatch lost
    -> call `optimizer.zero_grad()` after the optimizer step, and not after the first microbatch.
last microbatch lost
    -> call `loss.backward()` before the optimizer step, also for the last microbatch.
mean of row means
    -> divide once by the number of all tokens that count.
divided by the rows
    -> divide by the sum of the weights: `reduction="mean"` of `CrossEntropyLoss(weight=...)` does so.
divided by the weights
    -> divide by the number of rows.
weights ignored
    -> multiply the rows' losses by their weights: `(loss_fn(output, y) * w).sum() / w.sum()`, with `reduction="none"`.
weights squared
    -> multiply once, in the loss or after it.
weights averaged apart
    -> multiply each row's loss by its weight before the mean: `reduction="none"`.
weights of other rows
    -> cut all by the same index: `x[rows], y[rows], w[rows]`.
padded places counted
    -> `ignore_index`, or divide by the sum of the mask, not by the number of places.
not reset
    The gradients of earlier updates are added to that of each update: `zero_grad()` is not called in between.
    -> call `optimizer.zero_grad()` once per update.
momentum by hand
    -> call `optimizer.zero_grad()` once per update, and leave momentum to the optimizer.
ascent
    -> call `backward()` on the loss, and not on `-loss`; `maximize=True` is for a quantity to maximise.
stale gradients
    -> call `loss.backward()` before `optimizer.step()`.
clip per microbatch
    -> clip once per update, after the last `loss.backward()` of the window.
clip before unscale
    -> call `scaler.unscale_(optimizer)` before the clip.
gradients swapped
    -> leave each gradient to the parameter that it was taken of.
loss not scaled
    -> `scaler.scale(loss).backward()`, then `scaler.step(optimizer)`.
loss scale left in
    -> `scaler.step(optimizer)` divides the gradients by the scale; `optimizer.step()` does not.
variable left out
    -> give all parameters to the optimizer, `Adam(model.parameters())`, once the model is whole; `detach()`, `.data`
    and `no_grad()` cut a gradient off; set `requires_grad_(False)` on frozen layers.
frozen variable trained
    The parameter has `requires_grad=False`, and is trained all the same.
    -> leave it out of the optimizer.
applied twice
    -> call `optimizer.step()` once per update.
variable updated twice
    -> give each optimizer the parameters that are its own, and no parameter to both.
optimizer state thrown away
    Every update begins with the optimizer's first state: moments and the count of updates never move.
    -> leave `optimizer.state` as it is from update to update.
steps of zeros
    -> call `optimizer.step()` only where the sum is whole.
accumulated twice
    -> sum up once.
schedule by microbatch
    -> call `scheduler.step()` where the optimizer makes its step.
schedule frozen
    -> call `scheduler.step()` after each `optimizer.step()`, or once per epoch.
schedule one ahead
    -> call `scheduler.step()` after `optimizer.step()`.
summed over replicas
    -> average the gradients: `p.grad /= dist.get_world_size()` after `dist.all_reduce(p.grad)`.
divided by the replicas twice
    -> divide once: `DistributedDataParallel` averages the gradients, and a loss that is divided by the rows of all
    processes is multiplied by `dist.get_world_size()`.
replicas drift apart
    Each process steps by its own gradient, and their weights differ from then on.
    -> call the `DistributedDataParallel` itself, not its `module`, and leave `no_sync()` before the last microbatch of
    a window; by hand, `dist.all_reduce(p.grad)` before the step.
update thrown away
    -> train the very parameters that the model has.
decay by microbatch
    -> decay once per update, or leave it to the optimizer's `weight_decay`.
weights moved inside a window
    -> write to the weights after the optimizer step.
statistics thrown away
    -> train the module itself: its running statistics are written in the forward pass.
seeds thrown away
    -> call `torch.manual_seed` once, before the loop.
state of one microbatch
    -> call the module itself for each microbatch.
statistics never written back
    -> save and load the whole `state_dict()`, buffers too.
second pass in training mode
    -> take metrics of the outputs that are there, or call `model.eval()` before and `model.train()` after.
printed: mean of means
    -> weigh by rows: `total += loss.item() * len(x)`, and divide by the number of rows.
printed: not reset
    -> `total, count = 0.0, 0` at the beginning of each pass.
"""


def _parts() -> Iterator[tuple[str, tuple[str, str]]]:
    lines = _TEXT.strip().splitlines()
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        explanation, fix = " ".join(line.strip() for line in lines[start + 1 : end]).split("-> ")
        yield lines[start], (explanation.strip(), fix)


_BY_NAME = dict(_parts())
_OF_PROCESSES = {fixes["torch"] for fixes in (OF_ROWS, OF_WEIGHTS, ADDED_UP_ONCE)}


def said(cause: Found) -> Found:
    """Return a cause with its explanation and fix for PyTorch."""
    explanation, fix = _BY_NAME.get(cause.name, ("", cause.fix))
    fix = cause.fix if cause.fix in _OF_PROCESSES else fix
    return replace(cause, explanation=explanation or cause.explanation, fix=fix)
