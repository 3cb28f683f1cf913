"""Walks along autograd's graph, from a loss back to the outputs of a module."""

from typing import Any

from torch import Tensor

VIEWS = (
    "Squeeze",
    "Unsqueeze",
    "Select",
    "View",
    "UnsafeView",
    "Reshape",
    "Transpose",
    "Permute",
    "ToCopy",
)  # for autograd
SCALES = "Div", "Mul"
MOST = 8  # losses since the last gradient that are kept, with their graphs


def roots_of(arguments: tuple, others: dict[str, Any]) -> tuple[list[Any], tuple, dict[str, Any]]:
    """Return the tensors of which `autograd.backward` or `grad` is asked for gradients, and its arguments with them.

    They may be given as a generator, which can be read once.
    """
    name = next((name for name in ("tensors", "outputs") if name in others), "")
    given: Any = arguments[0] if arguments else others.get(name, ())
    if isinstance(given, Tensor) or not hasattr(given, "__iter__"):
        return [given], arguments, others
    roots = [*given]
    if arguments:
        return roots, (tuple(roots), *arguments[1:]), others
    return roots, arguments, {**others, name: tuple(roots)} if name else others


def leads(node: Any, ends: list[Any], through: tuple[str, ...] = ()) -> bool:
    """Whether the graph leads from a node to one of the ends, by views and such operations alone."""
    while node is not None and not any(node is end for end in ends):
        before = [each for each, _ in node.next_functions if each is not None]
        if len(before) != 1 or not node.name().startswith((*VIEWS, *through)):
            return False
        (node,) = before
    return node is not None


def made_of(node: Any, known: dict[Any, float]) -> tuple[float, float] | None:
    """Return (the losses that make a number, the factor of numbers without a gradient); None if they are not known."""
    if node is None or node in known:
        return (0.0, 1.0) if node is None else (known[node], 0.0)
    name, children = node.name(), [child for child, _ in node.next_functions]
    if name.startswith(("Add", "Sub")):
        factors = [1.0, (-1.0 if name.startswith("Sub") else 1.0) * float(node._saved_alpha)]
    elif name.startswith(("Mul", "Div")) and children[1:] in ([], [None]) and isinstance(node._saved_other, Tensor):
        other = float(node._saved_other)
        factors, children = [other if name.startswith("Mul") else 1 / other], children[:1]
    else:
        return None
    total, factor = 0.0, 0.0
    for child, own in zip(children, factors, strict=True):
        part = made_of(child, known)
        if part is None:
            return None
        total, factor = total + own * part[0], factor + own * part[1]
    return total, factor


def scale_of(node: Any) -> float:
    """Return the number by which a loss is multiplied last; 1.0 for none."""
    other = getattr(node, "_saved_other", None) if node is not None and node.name().startswith("Mul") else None
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 else 1.0


def made_by(node: Any, operation: str) -> bool:
    """Whether a tensor is the result of an operation, perhaps in another shape."""
    while node is not None and node.name().startswith(VIEWS):
        node = node.next_functions[0][0]
    return node is not None and node.name().startswith(operation)
