"""A report as one page of HTML: no scripts, pictures inside, and every word of the user's escaped."""

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from wholestep.audit import text
from wholestep.audit.found import Found
from wholestep.audit.judge import Verdict
from wholestep.audit.pictures import Picture

_STYLE = """
.ws-audit {font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 52rem; padding: 0.5rem 1rem;}
.ws-audit h1 {font-size: 1.35rem; line-height: 1.35; margin: 0.4rem 0;}
.ws-audit h2 {font-size: 1.1rem; margin: 1.6rem 0 0.3rem;}
.ws-audit table {border-collapse: collapse; margin: 0.6rem 0; font-variant-numeric: tabular-nums;}
.ws-audit th, .ws-audit td {padding: 0.15rem 0.9rem 0.15rem 0; text-align: right; border-bottom: 1px solid #ddd;
  background: #fff; color: #222; font-weight: normal;}
.ws-audit th:first-child, .ws-audit td:first-child {text-align: left;}
.ws-audit thead th {font-weight: bold;}
.ws-audit dl {display: grid; grid-template-columns: max-content auto; gap: 0.1rem 1rem; margin: 0.6rem 0;}
.ws-audit dt {color: #666;} .ws-audit dd {margin: 0; overflow-wrap: anywhere;}
.ws-audit code {background: #f3f3f3; padding: 0 0.2rem;}
.ws-audit figure {margin: 0 0 0.5rem;} .ws-audit img {max-width: 100%;}
.ws-audit figcaption, .ws-audit footer {color: #666;}
"""


def page(body: str) -> str:
    """Return a whole page of what `report` returns."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    title = "<title>Audit of a training loop</title>"
    return f'<!doctype html>\n<html lang="en"><head>{head}{title}</head>\n<body>{body}</body></html>\n'


def report(verdict: Verdict, taken: list[str], footer: str, drawn: Iterable[Picture], missing: str = "") -> str:
    """Return the report as a part of a page.

    Args:
        taken: what was taken for meant.
        footer: what was looked at.
        missing: why there are no pictures, if there are none.
    """
    parts = [f"<style>{_STYLE}</style>", f"<h1>{escape(text.first(verdict))}</h1>"]
    parts += [_cause(i, cause) for i, cause in enumerate(verdict.causes, start=1)]
    parts += [_picture(picture) for picture in drawn]
    lists = ("Taken as meant", taken), ("Notes", verdict.notes), ("Not looked at", verdict.unseen)
    for title, lines in lists:
        if lines:
            parts.append(f"<h2>{title}</h2><ul>{''.join(f'<li>{_words(line)}</li>' for line in lines)}</ul>")
    parts.append(f"<footer><p>{escape(' '.join(filter(None, [footer, missing])))}</p></footer>")
    return f'<div class="ws-audit">{"".join(parts)}</div>'


def _cause(number: int, cause: Found) -> str:
    parts = [f"<h2>{number}. {escape(cause.stage)}: {escape(cause.name)}</h2>"]
    parts += [f"<p>{_words(each)}</p>" for each in ([cause.explanation] if number > 1 else []) if each]
    if cause.detail:
        parts.append(f"<p>{_words(cause.detail)}</p>")
    if cause.proof is not None:
        columns = ["yours", "reference", *([text.WITH_FAULT] if cause.is_known else [])]
        head = "".join(f"<th>{name}</th>" for name in [escape(cause.proof.where), *columns])
        rows = []
        for line in cause.proof.lines:
            cells = [line.what, *map(text.number, (line.yours, line.reference, line.changed))][: len(columns) + 1]
            rows.append(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    parts.append(f"<p>{escape(text.apart(cause)).capitalize()}.</p>")
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{_fact(name, value)}</dd>" for name, value in text.facts(cause))
    return f"{''.join(parts)}<dl>{facts}</dl>"


def _fact(name: str, value: str) -> str:
    return f"<code>{escape(value)}</code>" if name == "your code" else _words(value)


def _words(line: str) -> str:
    """Escape a line, and set what stands between backticks as code."""
    parts = escape(line).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 and len(parts) % 2 else part for i, part in enumerate(parts))


def _picture(picture: Picture) -> str:
    source = f"data:image/png;base64,{b64encode(picture.png).decode()}"
    caption = escape(picture.caption)
    return (
        f'<h2>{escape(picture.title)}</h2><figure><img alt="{escape(picture.title)}. {caption}" src="{source}">'
        f"<figcaption>{caption}</figcaption></figure>"
    )
