"""The known causes, as data, in the order of the stages in which an audit looks for them."""

from functools import partial

from wholestep.audit.cause import Cause
from wholestep.audit.causes_of_gradients import CAUSES_OF_GRADIENTS
from wholestep.audit.causes_of_printing import CAUSES_OF_PRINTING
from wholestep.audit.causes_of_rows import CAUSES_OF_ROWS

_forward, _apply, _between, _state = (partial(Cause, stage) for stage in ("forward", "apply", "between", "state"))
STAGES = ("rows", "forward", "gradient", "apply", "between", "state", "report")

CAUSES = (
    *CAUSES_OF_ROWS,
    _forward(
        "inference mode",
        "The gradient is taken in inference mode: dropout is off, and BatchNormalization uses its moving statistics.",
        "call `model(x, training=True)`.",
        "wkentaro/pytorch-fcn#56",
    ),
    _forward(
        "inputs swapped",
        "The model's inputs are given in another order than that of the data: each gets what is meant for another.",
        "name them: a dict of arrays by the names of the model's inputs.",
    ),
    _forward(
        "labels among the inputs",
        "The model is given the labels that it is to predict.",
        "give a decoder what comes before, `y[:, :-1]`, and let it predict what comes next, `y[:, 1:]`.",
    ),
    *CAUSES_OF_GRADIENTS,
    _apply(
        "applied twice",
        "The optimizer takes the same gradient twice.",
        "call `apply_gradients` (or `stateless_apply`) once per update.",
        "keras-team/keras#19990",
    ),
    _apply(
        "variable updated twice",
        "Two optimizers take the same gradient of a variable: it moves twice in every update.",
        "give each optimizer the variables that are its own, `zip(grads, variables)`, and no variable to both.",
    ),
    _apply(
        "optimizer re-created",
        "The optimizer is made anew again and again: moments and the count of updates start at 0 each time.",
        "make the optimizer once, before the loop.",
        "keras-team/keras#13027",
    ),
    _apply(
        "optimizer state thrown away",
        "Every update begins with the optimizer's first state: moments and the count of updates never move.",
        "carry what `stateless_apply` returns to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
    ),
    _apply(
        "steps of zeros",
        "The optimizer is called with gradients of zeros between two updates: its moments, its count and the weights "
        "move all the same.",
        "call `apply` only where the sum is whole.",
    ),
    _apply(
        "accumulated twice",
        "The loop sums up the gradients of several microbatches, and the optimizer accumulates these sums once "
        "more: there are fewer updates than were meant.",
        "either hand each gradient to an optimizer with `gradient_accumulation_steps`, or sum up, and leave the option "
        "out.",
    ),
    _apply(
        "schedule by microbatch",
        "The schedule of the learning rate moves with every microbatch: it ends too early.",
        "move it once per update (`step += 1`): leave `optimizer.iterations` to the optimizer, and stretch the "
        "schedule where Keras' `gradient_accumulation_steps` counts calls.",
        "huggingface/accelerate#963",
    ),
    _apply(
        "schedule frozen",
        "The learning rate stays at its first value: the schedule was read once.",
        "give the schedule to the optimizer, or assign `schedule(step)` to `optimizer.learning_rate` before every "
        "update.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    _apply(
        "rate frozen in a trace",
        "The learning rate was read while the step was traced: it moves only when another batch size traces anew.",
        "pass the rate in as a tensor, or assign `optimizer.learning_rate` outside of the traced step.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    _apply(
        "schedule one ahead",
        "The schedule of the learning rate is one update ahead.",
        "count updates from 0: `schedule(step)` first, then `step += 1`.",
    ),
    _between(
        "update thrown away",
        "What the optimizer step returns does not reach the next forward pass: the weights go back to what they were.",
        "carry the updated variables to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
    ),
    _between(
        "decay by microbatch",
        "The weights shrink between the microbatches of one update.",
        "decay (`v * 0.99`) once per update, or leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    _between(
        "decayed twice",
        "The weights are decayed by hand, and by the optimizer once more.",
        "leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    _between(
        "weights moved inside a window",
        "The weights move between the microbatches of one update, by no optimizer step.",
        "write to the weights (`assign`, `assign_add`) after the optimizer step.",
    ),
    _between(
        "average by microbatch",
        "The moving average of the weights moves with every microbatch, and not once per update: it looks back over "
        "less.",
        "move the average where the optimizer makes its step.",
    ),
    _state(
        "statistics thrown away",
        "What the forward pass makes of the moving statistics is thrown away: they never move.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
    ),
    _state(
        "seeds thrown away",
        "The seeds of the random draws are thrown away: every update has the same dropout masks.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
        "jax-ml/jax#40232",
    ),
    _state(
        "state of one microbatch",
        "The microbatches of an update all begin with the same statistics and seeds: only what the last one makes of "
        "them is kept.",
        "carry what `stateless_call` returns from microbatch to microbatch: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
    ),
    _state(
        "statistics never written back",
        "The trained weights come back to the model, and the moving statistics do not: it predicts with those of the "
        "beginning.",
        "assign them too: `for v, value in zip(model.non_trainable_variables, ntv): v.assign(value)`.",
    ),
    _state(
        "second pass in training mode",
        "The rows of an update go through the model once more in training mode: the moving statistics move twice.",
        "take metrics of the outputs that are there, or call `model(x, training=False)`.",
    ),
    *CAUSES_OF_PRINTING,
)

BY_NAME = {cause.name: cause for cause in CAUSES}


def table() -> str:
    """Return the causes as a table of docs/audit.md."""
    lines = ["| stage | cause | explanation | fix | met in |", "|---|---|---|---|---|"]
    lines += [f"| {c.stage} | {c.name} | {c.explanation} | {c.fix} | {c.source} |" for c in CAUSES]
    return "\n".join(lines)
