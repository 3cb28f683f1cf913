"""The pages: their code runs, their links lead somewhere, and they are short."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import keras
import pytest
from scripts import program
from shares import on

import stepcheck

ROOT = Path(__file__).parents[1]
TOP = ROOT.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {path: path.read_text() for path in [*PAGES, ROOT / "README.md"]}
TO_READ = [path for path in TEXTS if path.parent.name != "notes"]
SITE = (ROOT / "mkdocs.yml").read_text()
BROADCAST = "Broadcast. Each output meets the labels of all rows"
REPOSITORY = re.search(r"^repo_url: (.*)$", SITE, re.M)[1]


def on_jax(framework):
    """Return a framework beside JAX, where it is installed."""
    is_here = (
        keras.backend.backend() == "jax"
        and importlib.util.find_spec(framework) is not None
    )
    return [framework] * is_here


def run(page, framework):
    names: dict = {}
    exec(compile(program(TEXTS[DOCS / page], framework), page, "exec"), names)
    return names["report"]


@pytest.mark.own
@pytest.mark.slow
def test_the_programs_of_the_first_page_run():
    report = run("index.md", keras.backend.backend())
    assert report.is_right


@pytest.mark.own
@pytest.mark.slow
def test_the_programs_of_the_page_on_stating_run():
    assert run("stating.md", keras.backend.backend()).is_right


@on("jax")
@pytest.mark.skipif(
    keras.backend.backend() != "jax", reason="the loop calls JAX"
)
@pytest.mark.slow
def test_the_loop_of_jax_is_a_broadcast():
    shown = "print(report.first_line)\n"
    text = TEXTS[DOCS / "index.md"].replace(shown, "found = report\n")
    names: dict = {}
    exec(compile(program(text, "jax"), "index.md", "exec"), names)
    assert names["found"].first_line.startswith(BROADCAST)


@on("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the loop calls TensorFlow"
)
@pytest.mark.slow
def test_the_program_of_the_reference_runs():
    assert [
        found.fault.id for found in run("api/watch.md", "tensorflow").findings
    ] == ["gradient.never-divided"]


@on("jax")
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_the_loop_of_torch_is_a_broadcast():
    pytest.importorskip("torch")
    report = run("pytorch.md", "torch")
    assert report.first_line.startswith(BROADCAST)


@on("tensorflow")
@pytest.mark.skipif(
    keras.backend.backend() != "tensorflow", reason="the loop calls TensorFlow"
)
def test_the_page_of_two_runs_says_the_truth(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, names = TEXTS[DOCS / "diff.md"], {}
    for code in re.findall(r"```python\n(.*?)```", text, re.S):
        exec(compile(code, "diff.md", "exec"), names)
    printed = " ".join(capsys.readouterr().out.split())
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.S)
    assert " ".join(shown.split()) in printed
    assert names["match"]("sequential/dense/kernel")[0] == "weight"


@pytest.mark.parametrize(
    "framework", [keras.backend.backend(), *on_jax("torch")]
)
def test_the_test_of_a_loop_passes_and_fails_with_a_wrong_loop(framework):
    names: dict = {}
    text = program(TEXTS[DOCS / "testing.md"], framework)
    exec(compile(text, "testing.md", "exec"), names)
    names["test_that_each_update_is_as_meant"]()
    wrong = text.replace("y[rows]", "y[rows - 1]")
    assert wrong != text
    exec(compile(wrong, "testing.md", "exec"), names)
    with pytest.raises(AssertionError, match="abels"):
        names["test_that_each_update_is_as_meant"]()


def test_the_table_of_contents_has_every_page():
    listed = re.findall(r": ([\w/-]+\.md)$", SITE.split("\nnav:")[1], re.M)
    assert sorted(listed) == sorted(
        str(path.relative_to(DOCS)) for path in PAGES
    )


def test_the_reference_has_every_public_name():
    shown = re.findall(
        r"^::: (stepcheck\.[\w.]+)$", "\n".join(TEXTS.values()), re.M
    )
    names = {name.rpartition(".")[2] for name in shown}
    assert {*stepcheck.__all__} - names == {"SpecificationError"}
    assert all(pkgutil.resolve_name(name).__doc__ for name in shown)


def anchors(path):
    """Return the names of a page's headings, as links spell them."""
    titles = re.findall(
        r"^#+ (.*)$",
        re.sub(r"```.*?```", "", path.read_text(), flags=re.S),
        re.M,
    )
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in titles
    }


def where(path, link):
    """Return the file and the heading that a link leads to; None if it leads elsewhere."""
    if link.startswith(f"{REPOSITORY}/"):
        link = re.sub(rf"^{REPOSITORY}/(blob|tree|raw)/main/", "", link)
        path = TOP / "x"
    if "://" in link:
        return None
    file, _, heading = link.partition("#")
    return (path.parent / file).resolve() if file else path, heading


@pytest.mark.parametrize(
    "path", TEXTS, ids=lambda path: str(path.relative_to(ROOT))
)
def test_the_links_of_a_page_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[path], flags=re.S)
    places = [
        where(path, link) for link in re.findall(r"\]\(([^)\s]+)\)", text)
    ]
    for file, heading in filter(None, places):
        assert file.exists(), file
        assert not heading or heading in anchors(file), (file, heading)


@pytest.mark.parametrize(
    "path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name
)
def test_a_page_is_short(path):
    is_table = path.name in ("findings.md", "limits.md")
    assert is_table or len(TEXTS[path].split()) <= 1200


@pytest.mark.parametrize(
    "path", TO_READ, ids=lambda path: str(path.relative_to(ROOT))
)
def test_a_page_has_short_paragraphs_and_lines_of_code(path):
    prose = re.sub(r"```.*?```", "", TEXTS[path], flags=re.S)
    parts = re.split(r"\n\s*\n|\n(?=- |\d\. |\|)", prose)
    paragraphs = [part for part in parts if not part.lstrip().startswith("|")]
    too_long = [
        paragraph for paragraph in paragraphs if len(paragraph.split()) > 80
    ]
    assert not too_long, too_long
    code = "".join(re.findall(r"```python\n(.*?)```", TEXTS[path], re.S))
    assert [line for line in code.splitlines() if len(line) > 88] == []


def test_the_findings_are_those_of_the_source():
    spec = importlib.util.spec_from_file_location(
        "findings", DOCS / "findings.py"
    )
    findings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(findings)
    assert (
        DOCS / "findings.md"
    ).read_text() == findings.page()  # or run docs/findings.py
