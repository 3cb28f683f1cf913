"""The known causes in what of a gradient reaches the variables."""

from wholestep.audit.cause import NOWHERE, Cause

CAUSES_OF_HANDING = (
    Cause(
        "variable left out",
        "gradient",
        "a trainable variable never gets a gradient",
        "Trainable, but no gradient of it reaches the optimizer.",
        "take the gradient of `model.trainable_variables`, inside of the tape and up to the optimizer step, or set "
        "`layer.trainable = False` on what is frozen.",
        NOWHERE,
    ),
)
