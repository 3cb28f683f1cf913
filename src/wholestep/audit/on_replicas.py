"""What is said of a cause where the parts of an update are those of replicas, each of which sees its own rows alone."""

from dataclasses import replace

import numpy as np

from wholestep.audit.evidence import Evidence
from wholestep.audit.found import Found
from wholestep.audit.source import line_of_loss

_TOTAL = '`total = tf.distribute.get_replica_context().all_reduce("SUM", {})`'
_OF_ROWS = f"divide by the rows of all replicas: {_TOTAL.format('tf.shape(labels)[0]')}, then " + (
    "`tf.reduce_sum(losses) / tf.cast(total, losses.dtype)`."
)
_OF_WEIGHTS = (
    f"divide by the sum of the weights (the mask) of all replicas: {_TOTAL.format('tf.reduce_sum(weights)')}, then "
    "`tf.reduce_sum(losses * weights) / total`, and not by `num_replicas_in_sync`."
)
_SUMMED, _OF_MEANS, _FULL = "summed over replicas", "mean of means", "divided by the full batch"
_TOLD = {
    _SUMMED: "Each replica divides by its own {}, and the optimizer adds up the gradients: replicas times too much.",
    _OF_MEANS: "Each replica divides by its own {}, and the means are averaged: rows of a replica with fewer of them "
    "count more.",
}


def on_replicas(causes: list[Found], evidence: list[Evidence]) -> list[Found]:
    """Return causes with the explanation, the fix and the line that a loop under a strategy needs."""
    by_number = {e.update.number: e for e in evidence}
    return [_suited(c, [by_number[n] for n in c.updates if n in by_number]) for c in causes]


def _suited(cause: Found, evidence: list[Evidence]) -> Found:
    pieces = [piece for e in evidence for piece in e.update.pieces]
    if cause.name not in (_SUMMED, _OF_MEANS, _FULL) or not pieces or not all(map(_is_of_replicas, evidence)):
        return cause
    weights = np.concatenate([each[:, p.rows >= 0].ravel() for e in evidence for each, p in _pairs(e)])
    is_weighed = len(np.unique(weights)) > 1
    fix = _OF_WEIGHTS if is_weighed else cause.fix if cause.name == _SUMMED else _OF_ROWS
    told = _TOLD.get(cause.name, cause.explanation).format("weights" if is_weighed else "rows")
    return replace(cause, fix=fix, explanation=told, line=line_of_loss(pieces[-1].called.line) or cause.line)


def _pairs(e: Evidence) -> list:
    return [*zip(e.weights, e.update.pieces, strict=True)]


def _is_of_replicas(e: Evidence) -> bool:
    replicas = [piece.called.replica for piece in e.update.pieces]
    return len(set(replicas)) == len(replicas) > 1
