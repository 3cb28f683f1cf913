"""The known causes in what of a gradient reaches the variables."""

from wholestep.audit.cause import NOWHERE, Cause

CAUSES_OF_HANDING = (
    Cause(
        "variable left out",
        "gradient",
        "a trainable variable never gets a gradient",
        "Trainable, but no gradient of it reaches the optimizer.",
        "take the gradient of `model.trainable_variables` with the whole model inside of the tape, and hand over all: "
        "`zip(grads, model.trainable_variables)`, or `stateless_apply(ov, grads, tv)`; or set `layer.trainable = "
        "False` on what is frozen.",
        NOWHERE,
    ),
    Cause(
        "frozen variable trained",
        "gradient",
        "a variable of a layer with trainable=False moves against its gradient",
        "The layer is set to `trainable = False`, and its variables are trained all the same.",
        "take the gradient of `model.trainable_variables` (`trainable_weights`), and not of `model.variables` or "
        "`model.weights`.",
        NOWHERE,
    ),
    Cause(
        "clip forgotten",
        "gradient",
        "the gradient is not clipped",
        "The optimizer that was meant clips the gradient; nothing clips it here.",
        "give the loop's optimizer the same `clipnorm`, `global_clipnorm` or `clipvalue`, or hand it the gradients "
        "that were clipped: `clipped, _ = tf.clip_by_global_norm(grads, bound)`, then `zip(clipped, variables)`.",
        NOWHERE,
    ),
    Cause(
        "clipped otherwise",
        "gradient",
        "the gradient is clipped by another bound, or another part of it",
        "The gradient is clipped, but not as the optimizer that was meant does it.",
        "leave it to the optimizer's own `clipnorm` (each variable), `global_clipnorm` (all together) or `clipvalue`; "
        "`tf.clip_by_global_norm(grads, bound)` once is all together.",
        NOWHERE,
    ),
)
