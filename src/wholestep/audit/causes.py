"""The known causes, as data, in the order of the stages in which an audit looks for them."""

from wholestep.audit.cause import NOWHERE, Cause
from wholestep.audit.causes_of_gradients import CAUSES_OF_GRADIENTS
from wholestep.audit.causes_of_handing import CAUSES_OF_HANDING
from wholestep.audit.causes_of_printing import CAUSES_OF_PRINTING
from wholestep.audit.causes_of_rows import CAUSES_OF_ROWS

STAGES = ("rows", "forward", "gradient", "apply", "between", "state", "report")

CAUSES = (
    *CAUSES_OF_ROWS,
    # ---- forward ----
    Cause(
        "inference mode",
        "forward",
        "the forward pass runs with training=False",
        "The gradient is taken in inference mode: dropout is off, and BatchNormalization uses its moving statistics.",
        "call `model(x, training=True)`.",
        "wkentaro/pytorch-fcn#56",
    ),
    Cause(
        "inputs swapped",
        "forward",
        "the inputs of the model in another order",
        "The model's inputs are given in another order than that of the data: each gets what is meant for another.",
        "name them: a dict of arrays by the names of the model's inputs.",
        NOWHERE,
    ),
    Cause(
        "labels among the inputs",
        "forward",
        "the labels in the place of an input",
        "The model is given the labels that it is to predict.",
        "give a decoder what comes before, `y[:, :-1]`, and let it predict what comes next, `y[:, 1:]`.",
        NOWHERE,
    ),
    *CAUSES_OF_GRADIENTS,
    *CAUSES_OF_HANDING,
    # ---- apply ----
    Cause(
        "applied twice",
        "apply",
        "the same gradient is applied once more",
        "The optimizer takes the same gradient twice.",
        "call `apply_gradients` (or `stateless_apply`) once per update.",
        "keras-team/keras#19990",
    ),
    Cause(
        "variable updated twice",
        "apply",
        "another optimizer applies the same gradient of a variable once more",
        "Two optimizers take the same gradient of a variable: it moves twice in every update.",
        "give each optimizer the variables that are its own, `zip(grads, variables)`, and no variable to both.",
        NOWHERE,
    ),
    Cause(
        "optimizer re-created",
        "apply",
        "another optimizer, which begins at 0",
        "The optimizer is made anew again and again: moments and the count of updates start at 0 each time.",
        "make the optimizer once, before the loop.",
        "keras-team/keras#13027",
    ),
    Cause(
        "optimizer state thrown away",
        "apply",
        "the optimizer's variables are those of the first update",
        "Every update begins with the optimizer's first state: moments and the count of updates never move.",
        "carry what `stateless_apply` returns to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
        NOWHERE,
    ),
    Cause(
        "steps of zeros",
        "apply",
        "the optimizer takes zeros where an update is still summed up",
        "The optimizer is called with gradients of zeros between two updates: its moments, its count and the weights "
        "move all the same.",
        "call `apply` only where the sum is whole.",
        NOWHERE,
    ),
    Cause(
        "accumulated twice",
        "apply",
        "an update is made of the microbatches of several sums",
        "The loop sums up the gradients of several microbatches, and the optimizer accumulates these sums once "
        "more: there are fewer updates than were meant.",
        "either hand each gradient to an optimizer with `gradient_accumulation_steps`, or sum up, and leave the option "
        "out.",
        NOWHERE,
    ),
    Cause(
        "schedule by microbatch",
        "apply",
        "the rate of update t is schedule(microbatches before t)",
        "The schedule of the learning rate moves with every microbatch: it ends too early.",
        "move it once per update (`step += 1`): leave `optimizer.iterations` to the optimizer, and stretch the "
        "schedule where Keras' `gradient_accumulation_steps` counts calls.",
        "huggingface/accelerate#963",
    ),
    Cause(
        "schedule frozen",
        "apply",
        "the rate of every update is schedule(0)",
        "The learning rate stays at its first value: the schedule was read once.",
        "give the schedule to the optimizer, or assign `schedule(step)` to `optimizer.learning_rate` before every "
        "update.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    Cause(
        "rate frozen in a trace",
        "apply",
        "the rate of an update is that of the first one with its batch size",
        "The learning rate was read while the step was traced: it moves only when another batch size traces anew.",
        "pass the rate in as a tensor, or assign `optimizer.learning_rate` outside of the traced step.",
        "the FAQ of jax-ml/jax on impure functions",
    ),
    Cause(
        "schedule one ahead",
        "apply",
        "the rate of update t is schedule(t + 1)",
        "The schedule of the learning rate is one update ahead.",
        "count updates from 0: `schedule(step)` first, then `step += 1`.",
        NOWHERE,
    ),
    # ---- between ----
    Cause(
        "update thrown away",
        "between",
        "the weights after an update are those before it",
        "What the optimizer step returns does not reach the next forward pass: the weights go back to what they were.",
        "carry the updated variables to the next update: `tv, ov = optimizer.stateless_apply(ov, grads, tv)`.",
        NOWHERE,
    ),
    Cause(
        "decay by microbatch",
        "between",
        "inside a window all moved weights shrink by one factor",
        "The weights shrink between the microbatches of one update.",
        "decay (`v * 0.99`) once per update, or leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    Cause(
        "decayed twice",
        "between",
        "after an update all moved weights shrink by one factor, and the optimizer decays them too",
        "The weights are decayed by hand, and by the optimizer once more.",
        "leave it to the optimizer's `weight_decay`.",
        "keras-team/keras#19990",
    ),
    Cause(
        "weights moved inside a window",
        "between",
        "the weights of a microbatch are not those of the one before",
        "The weights move between the microbatches of one update, by no optimizer step.",
        "write to the weights (`assign`, `assign_add`) after the optimizer step.",
        NOWHERE,
    ),
    Cause(
        "average by microbatch",
        "between",
        "the weights' moving average moves with every microbatch",
        "The moving average of the weights moves with every microbatch, and not once per update: it looks back over "
        "less.",
        "move the average where the optimizer makes its step.",
        NOWHERE,
    ),
    # ---- state ----
    Cause(
        "statistics thrown away",
        "state",
        "moving statistics before an update are those before the one before",
        "What the forward pass makes of the moving statistics is thrown away: they never move.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
        NOWHERE,
    ),
    Cause(
        "seeds thrown away",
        "state",
        "seeds before an update are those before the one before",
        "The seeds of the random draws are thrown away: every update has the same dropout masks.",
        "carry the non-trainable variables that `stateless_call` returns: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
        "jax-ml/jax#40232",
    ),
    Cause(
        "state of one microbatch",
        "state",
        "statistics or seeds before a microbatch are those before the one before",
        "The microbatches of an update all begin with the same statistics and seeds: only what the last one makes of "
        "them is kept.",
        "carry what `stateless_call` returns from microbatch to microbatch: `outputs, ntv = "
        "model.stateless_call(tv, ntv, x)`.",
        NOWHERE,
    ),
    Cause(
        "statistics never written back",
        "state",
        "the model has the moving statistics that it began with",
        "The trained weights come back to the model, and the moving statistics do not: it predicts with those of the "
        "beginning.",
        "assign them too: `for v, value in zip(model.non_trainable_variables, ntv): v.assign(value)`.",
        NOWHERE,
    ),
    Cause(
        "second pass in training mode",
        "state",
        "a forward pass without gradient, on the rows of an update, moves the statistics once more",
        "The rows of an update go through the model once more in training mode: the moving statistics move twice.",
        "take metrics of the outputs that are there, or call `model(x, training=False)`.",
        NOWHERE,
    ),
    *CAUSES_OF_PRINTING,
)

BY_NAME = {cause.name: cause for cause in CAUSES}
WEIGHTED = tuple(cause for cause in CAUSES if cause.weigh)


def table() -> str:
    """Return the causes as a table of docs/audit.md."""
    lines = ["| stage | cause | fault in the reference | fix | met in |", "|---|---|---|---|---|"]
    lines += [f"| {c.stage} | {c.name} | {c.change} | {c.fix} | {c.source} |" for c in CAUSES]
    return "\n".join(lines)
