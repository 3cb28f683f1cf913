"""The pages: their code runs, their links and the table of contents lead somewhere."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import keras
import pytest
from shares import share

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {path: path.read_text() for path in [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]}
SITE = (ROOT / "mkdocs.yml").read_text()
REPOSITORY = re.search(r"^repo_url: (.*)$", SITE, re.M)[1]
RUN_HERE = [DOCS / name for name in ("index.md", "accumulation.md", "sequences.md", "finetune.md")] + sorted(
    DOCS.glob("api/*.md")
)
OF_TENSORFLOW = DOCS / "api" / "audit.md"


def run(path):
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[path], re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, path.name, "exec"), names)


@pytest.mark.parametrize("path", share(path for path in RUN_HERE if path != OF_TENSORFLOW), ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_programs_of_a_page_run(path):
    run(path)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="the page has a loop of TensorFlow's")
def test_the_loop_of_the_page_on_audits_runs():
    run(OF_TENSORFLOW)


def test_the_drawings_are_those_of_the_page_on_architecture():
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name, draw in drawings.DRAWINGS.items():
        assert (DOCS / name).read_text() == draw()  # or run docs/drawings.py
    listed = [row[0] for row in drawings.table("Every function that a batch crosses")]
    assert {*listed} == {*drawings.WHERE}
    assert {other for *_, others in drawings.OWNERS.values() for other in others} <= {*drawings.OWNERS}


def test_the_table_of_contents_has_every_page():
    listed = re.findall(r": ([\w/-]+\.md)$", SITE.split("\nnav:")[1], re.M)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_reference_has_every_public_name():
    import wholestep as ws

    shown = re.findall(r"^::: (wholestep\.[\w.]+)$", "\n".join(TEXTS[path] for path in DOCS.glob("api/*.md")), re.M)
    names = {name.rpartition(".")[2] for name in shown}
    assert {*ws.__all__} - names == {"audit"}
    assert "wholestep.audit.watch.Audit.__call__" in shown
    assert all(pkgutil.resolve_name(name).__doc__ for name in shown)


def anchors(path):
    """Return the names of a page's headings, as links spell them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", TEXTS[path], flags=re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def where(path, link):
    """Return the file that a link of a page leads to, and the heading in it; None if it leads elsewhere."""
    if link.startswith(f"{REPOSITORY}/"):
        link = re.sub(rf"^{REPOSITORY}/(blob|tree|raw)/main/", "", link)
        path = ROOT / "x"
    if "://" in link:
        return None
    file, _, heading = link.partition("#")
    return (path.parent / file).resolve() if file else path, heading


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_links_of_a_page_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[path], flags=re.S)
    found = [place for link in re.findall(r"\]\(([^)\s]+)\)", text) if (place := where(path, link)) is not None]
    for file, heading in found:
        assert file.exists(), file
        if heading:
            assert heading in anchors(file), (file, heading)


def test_the_readme_is_readable_elsewhere():
    assert not re.findall(r"\]\((?!https://)[^)]*\)", TEXTS[ROOT / "README.md"])  # as on PyPI
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 110
