"""Findings are values: no branch of the program hangs on a sentence."""

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import stepcheck
from stepcheck.faults import Fault, Stage
from stepcheck.judge import Verdict
from stepcheck.report.changes import sentence
from stepcheck.values import (
    MEANT,
    Change,
    Count,
    Detail,
    Known,
    Part,
    Reason,
    Setting,
    Unit,
    Unjudged,
)

SOURCE = Path(stepcheck.__file__).parent
METHODS = {
    "startswith",
    "endswith",
    "get",
    "index",
    "find",
    "partition",
    "replace",
    "split",
    "removeprefix",
}


def strings(nodes: Iterator[ast.AST | None]) -> Iterator[ast.Constant]:
    """Yield the constants with a blank inside, also those of f-strings and of tuples or sets."""
    for node in nodes:
        for each in (
            ast.walk(node)
            if isinstance(
                node,
                ast.Constant | ast.JoinedStr | ast.Tuple | ast.Set | ast.List,
            )
            else ()
        ):
            text = each.value if isinstance(each, ast.Constant) else None
            if (
                isinstance(text, str)
                and " " in text
                and any(map(str.isalpha, text))
            ):
                yield each


def branched(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings that a program looks up, compares or matches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            yield from strings(iter(node.keys))
        elif isinstance(node, ast.Compare):
            yield from strings(iter([node.left, *node.comparators]))
        elif isinstance(node, ast.MatchValue):
            yield from strings(iter([node.value]))
        elif isinstance(node, ast.Subscript):
            yield from strings(iter([node.slice]))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
        ):
            yield from strings(iter(node.args[:1]))


def of_file(path: Path) -> list[str]:
    found = branched(ast.parse(path.read_text()))
    return [f"{path.name}:{each.lineno}: {each.value}" for each in found]


FILES = sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


@pytest.mark.parametrize("name", FILES)
def test_no_branch_on_a_sentence(name):
    assert of_file(SOURCE / name) == []


@pytest.mark.parametrize(
    "text",
    [
        "{'mean of means': 1}",
        "name == 'mean of means'",
        "'of the row' in told",
        "told.startswith(('each row', 'x'))",
        "told.replace(f'the {name} of', 'its')",
        "counts['the loss']",
        "match a:\n    case 'not reset': pass",
    ],
)
def test_a_branch_on_a_sentence_is_seen(text):
    assert [*branched(ast.parse(text))]


def test_an_id_is_of_one_fault():
    assert len({fault.id for fault in Fault}) == len(Fault)
    assert all(" " not in fault.id for fault in Fault)


WHOLE, EACH = Known.WEIGHT_OF_UPDATE, Known.WEIGHT_OF_MICROBATCH
OF_MEANS = Count(
    below=(Known.MICROBATCHES, EACH), instead=Count(below=(WHOLE,))
)
OF_WEIGHTS, OF_REPLICAS = (
    Setting(unit=Unit.SAMPLE_WEIGHTS),
    Setting(Part.REPLICA, Unit.ROWS),
)
SENTENCES = [
    (
        Change(Fault.MEAN_OF_MEANS, count=OF_MEANS, setting=OF_WEIGHTS),
        "Each row's gradient counts 1 / (the number of microbatches x the sum of the sample weights of its microbatch) "
        "instead of 1 / the sum of the sample weights of the update.",
    ),
    (
        Change(Fault.MEAN_OF_MEANS, count=OF_MEANS, setting=OF_REPLICAS),
        "Each row's gradient counts 1 / (the number of replicas x the number of rows of its replica) instead of "
        "1 / the number of rows of the update.",
    ),
    (
        Change(Fault.PASSES_LEFT_OUT, numbers=(1.0, 2.0, 3.0)),
        "Each row's gradient has no part of forward pass 1, 2 of its 3.",
    ),
    (
        Change(Fault.PENALTY_ADDED_TWICE, count=Count(2.0, MEANT.above)),
        "The penalty counts 2 times what it should instead of once.",
    ),
    (
        Change(Fault.OTHER_LABELS, Detail.SMOOTHED, (0.3, 0.0)),
        "The labels are smoothed by 0.3 instead of 0.",
    ),
    (
        Change(Fault.FROM_LOGITS, outputs=("a", "b")),
        "The loss (of a, b) takes from_logits the other way.",
    ),
]


@pytest.mark.parametrize(("change", "told"), SENTENCES)
def test_a_change_is_told_in_a_sentence(change, told):
    assert sentence(change) == told


def test_a_stage_that_was_judged_of_no_update_is_not_judged():
    piece = SimpleNamespace(is_known=True, called=SimpleNamespace(replica=0))
    seen = SimpleNamespace(updates=[1, 2, 3], pieces=[piece])

    def judged(reason, updates):
        left = Unjudged(reason, Stage.GRADIENT, updates)
        return Stage.GRADIENT in Verdict(seen=seen, unjudged=[left]).judged

    assert judged(Reason.EQUAL_ROWS, 2)
    assert not judged(Reason.EQUAL_ROWS, 3)
    assert judged(Reason.CLIPPED_BY_HAND, 3)
    assert not judged(Reason.PENALTY_BY_HAND, 3)
