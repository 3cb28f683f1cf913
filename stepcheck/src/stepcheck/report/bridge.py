"""Findings of the gradient as the report still has them."""

from dataclasses import replace

from stepcheck import values
from stepcheck.port import Port
from stepcheck.report.causes import (
    ACCUMULATING,
    ADDED_UP_ONCE,
    BY_NAME,
    OF_ROWS,
    OF_WEIGHTS,
    ON_REPLICAS,
    TWICE,
)
from stepcheck.report.changes import sentence
from stepcheck.report.found import Found, Number, Proof, many, not_known
from stepcheck.values import Detail, Fault, Part, Reason, Shown, Unit

_NAMES = {Fault.FROM_LOGITS: "from_logits"}
_COUNTED = (
    "sum up what the rows give, and divide once by all weights; weights that you mean are the third part of `data`."
)
_FIXES = {
    Fault.ROWS_COUNTED_OTHERWISE: _COUNTED,
    Fault.PENALTY_COUNTED_OTHERWISE: "add the model's losses once per update.",
    Fault.GRADIENT_CHANGED: "hand over the gradient as it is taken, each variable's in its place.",
    Fault.OTHER_LABELS: "give the loss the labels of the rows that the model got, as the data have them.",
    Fault.OTHER_WEIGHTS: "give the loss the weights of the rows that the model got, once.",
    Fault.OTHER_OUTPUTS: "give the loss the outputs as the model returns them.",
    Fault.ANOTHER_LOSS: "take the loss that was meant, with its arguments.",
}
_SHOWN = {
    Shown.GRADIENT_LENGTH: "length of the gradient",
    Shown.GRADIENT: "gradient of {}",
    Shown.WEIGHT_AFTER: "{} afterwards",
    Shown.DERIVATIVE: "derivative of the loss by the output of row {}",
}
_IN_THE_LOSS = "The model and the variables are right, so it is in the loss."
_NO_PART = "It has no part in it, as if it were added after the step, or never."


def name_of(fault: Fault) -> str:
    """Return the name of a fault."""
    return _NAMES.get(fault, fault.name.lower().replace("_", " "))


def found_of(finding: values.Finding, port: type[Port]) -> Found:
    """Return a finding as the report has it."""
    change, where, told = finding.change, finding.where, sentence(finding.change)
    proof = None if finding.proof is None else _proof(finding.proof)
    if not change.is_known:
        more = {Fault.LOSS_UNLIKE: _IN_THE_LOSS, Fault.PASSES_LEFT_OUT: _NO_PART}.get(change.fault, "")
        parameters = f"The variables that differ: {', '.join(where.parameters)}." if where.parameters else ""
        of = "It is" if change.fault is Fault.LOSS_UNLIKE else "No gradient of the loop comes from that"
        outputs = f"{of} of output {', '.join(where.outputs)}." if where.outputs else ""
        explanation = " ".join(part for part in (told, more, outputs, parameters) if part)
        unlike = not_known("gradient", explanation, finding.apart, where.line, where.updates, proof)
        return replace(unlike, finding=finding)
    name = name_of(change.fault)
    fix, explanation = _FIXES.get(change.fault, ""), told
    if name in BY_NAME:
        *_, accumulating = BY_NAME[name].fix.partition(ACCUMULATING)
        fix = accumulating if accumulating and change.setting.part is Part.CALL else BY_NAME[name].fix
    twins = tuple(name_of(twin) for twin in change.twins)
    detail = f"These updates cannot tell it from: {', '.join(twins)}." if twins else ""
    numbers = finding.apart, finding.with_error, where.line, where.updates
    found = Found(name, "gradient", explanation, fix, *numbers, detail, proof, twins, finding.is_beside, finding)
    is_of_lanes = change.setting.part is Part.REPLICA and name in ON_REPLICAS
    return _on_replicas(found, change, port.engine()) if is_of_lanes else found


def _on_replicas(found: Found, change: values.Change, engine: str) -> Found:
    is_weighed = change.setting.unit is not Unit.ROWS
    of_all = (OF_WEIGHTS if is_weighed else OF_ROWS).get(engine, found.fix)
    fix, told = of_all, ON_REPLICAS[found.name].format("weights" if is_weighed else "rows")
    once = ADDED_UP_ONCE.get(engine, of_all)
    if change.detail in (Detail.ADDED_UP_TWICE, Detail.PERHAPS_ADDED_UP_TWICE):
        if engine == "torch":
            fix = once
        elif change.detail is Detail.ADDED_UP_TWICE:
            fix, told = once, TWICE.format(f"{change.numbers[0]:.0f}")
        elif engine != "jax":  # whose own fix says it
            fix = f"{of_all} If it is divided so, {once}"
    detail = f"{found.explanation} {found.detail}".strip() if told else found.detail
    return replace(found, fix=fix, explanation=told or found.explanation, detail=detail)


def _proof(proof: values.Proof) -> Proof:
    lines = [Number(_SHOWN[n.what].format(n.of), *n[2:]) for n in proof.numbers]
    return Proof(f"update {proof.update}", tuple(lines), proof.step, proof.parameters)


def unjudged_of(unjudged: values.Unjudged) -> str:
    """Return what was not judged in words."""
    if unjudged.reason is Reason.OUT_OF_TIME:
        return "the search for what makes the gradients differ was ended: more was not tried"
    return f"the gradient of {many(unjudged.updates, 'update')}: it is not finite"
