"""The update that a Trainer of Transformers states."""

from typing import Any


def stated_by_trainer(trainer: Any, plain: Any) -> dict[str, Any]:
    """Return the update that a Trainer of Transformers states: that of the loss of its
    model.
    """
    has_other_loss = (
        trainer.compute_loss_func or trainer.args.label_smoothing_factor
    )
    if type(trainer).compute_loss is not plain.compute_loss or has_other_loss:
        return {}
    return {"model": trainer.model, "data": None, "loss": None}
