"""Settings that are refused for a custom train step, checked before anything runs."""

import keras

from wholestep.errors import SpecificationError, message
from wholestep.model.compiled import is_overridden


def check_choices(model: keras.Model, **choices: object) -> None:
    """Refuse settings that have no meaning for a custom train step.

    Raises:
        SpecificationError: such a setting is given.
    """
    own = [name for name in ("train_step", "compute_metrics") if is_overridden(model, name)]
    given = [f"{name}={value!r}" for name, value in choices.items() if value not in (None, "auto", 1, [])]
    if own and given:
        must = f"An update by the model's own `{own[0]}` is run whole, on one device, and feeds its own metrics."
        attempt = (
            "leave them out; or write the loss as a wholestep.Objective, as docs/recipes.md shows, and pass "
            "Trainer(model, MyObjective(), optimizer=...), which may be cut and spread."
        )
        raise SpecificationError(message(must, ", ".join(given), attempt))


def check_replicas(num_replicas: int) -> None:
    """Refuse several replicas for a custom train step.

    Raises:
        SpecificationError: there are several replicas; nothing has been computed.
    """
    if num_replicas > 1:
        must = "An update by the model's own `train_step` is run whole, on one device."
        attempt = "leave the distribution out, or write the loss as a wholestep.Objective, which may be spread."
        raise SpecificationError(message(must, f"{num_replicas} replicas", attempt))
