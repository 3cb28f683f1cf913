"""The update that a call of `fit` states."""

from typing import Any


def stated_by_fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *_: Any,
    validation_split: float | None = None,
    sample_weight: Any = None,
    **__: Any,
) -> dict[str, Any]:
    """Return the update that `fit` states of a compiled model, if it is given arrays."""
    data = (x, y) if sample_weight is None else (x, y, sample_weight)
    are_arrays = all(hasattr(part, "__array__") for part in data)
    if not getattr(model, "compiled", False) or not are_arrays:
        return {}
    num_rows = int(len(x) * (1.0 - (validation_split or 0.0)))
    return {"model": model, "data": tuple(part[:num_rows] for part in data)}
