"""The pages: their code runs, their links and the table of contents lead somewhere."""

import importlib.util
import pkgutil
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from exact import spread_over
from shares import share

ROOT = Path(__file__).parents[2]
TOP = ROOT.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = {
    path: path.read_text()
    for path in [*PAGES, ROOT / "README.md", TOP / "README.md", TOP / "CONTRIBUTING.md"]
}
SITE = (ROOT / "mkdocs.yml").read_text()
REPOSITORY = re.search(r"^repo_url: (.*)$", SITE, re.M)[1]
WITH_PROGRAMS = "index", "from-fit", "accumulation", "sequences", "finetune", "faq"
RUN_HERE = [DOCS / f"{name}.md" for name in WITH_PROGRAMS] + sorted(DOCS.glob("api/*.md"))
OWN_LOOP = DOCS / "own-loop-on-devices.md"
OF_ENGINE = {"tensorflow": "tf.function", "jax": "jax.jit"}


def run(path):
    names: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", TEXTS[path], re.S)
    assert blocks
    for block in blocks:
        exec(compile(block, path.name, "exec"), names)


@pytest.mark.parametrize("path", share(RUN_HERE), ids=lambda path: path.stem)
@pytest.mark.slow
def test_the_programs_of_a_page_run(path):
    run(path)


@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.slow
def test_the_loops_of_the_page_on_several_devices_are_right_with_a_short_batch(is_wrong):
    random = np.random.default_rng(0)
    engine = keras.backend.backend()
    x = random.normal(size=(158, 6)).astype("float32")
    y = (x[:, :1] > 0) + x[:, 1:2]
    batches = [(x[i : i + 32], y[i : i + 32]) for i in range(0, len(x), 32)] * 2
    names = {"keras": keras, "np": np, "batches": batches}

    def network():
        keras.utils.set_random_seed(0)
        layers = [
            keras.layers.Dense(5, "tanh", kernel_regularizer=keras.regularizers.L2(1e-2)),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
        return model

    with spread_over(4):
        names["model"] = model = network()
        if engine == "tensorflow":
            names["tf"] = tf = importlib.import_module("tensorflow")
            names["strategy"] = tf.distribute.get_strategy()
            kinds = [tf.TensorSpec((None, *each.shape[1:]), each.dtype) for each in (x, y)]
            names["batches"] = tf.data.Dataset.from_generator(
                lambda: batches, output_signature=tuple(kinds)
            )
        else:
            names["jax"] = importlib.import_module("jax")
    names["optimizer"] = model.optimizer
    (block,) = (
        each
        for each in re.findall(r"```python\n(.*?)```", TEXTS[OWN_LOOP], re.S)
        if f"@{OF_ENGINE[engine]}" in each
    )
    assert " / count + penalty" in block
    block = block.replace(" / count + penalty", " / 32.0 + penalty") if is_wrong else block
    exec(compile(block, OWN_LOOP.name, "exec"), names)

    by_keras = network()
    for batch in batches:
        by_keras.train_on_batch(*batch)
    pairs = zip(model.get_weights(), by_keras.get_weights(), strict=True)
    apart = max(np.abs(one - other).max() for one, other in pairs)
    assert apart > 1e-3 if is_wrong else apart < 1e-6


def test_the_drawings_are_those_of_the_page_on_architecture():
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    drawings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawings)
    for name, draw in drawings.DRAWINGS.items():
        assert (DOCS / name).read_text() == draw()  # or run docs/drawings.py
    listed = [row[0] for row in drawings.table("Every function that a batch crosses")]
    assert {*listed} == {*drawings.WHERE}
    assert {other for *_, others in drawings.OWNERS.values() for other in others} <= {
        *drawings.OWNERS
    }


def test_the_table_of_contents_has_every_page():
    listed = re.findall(r": ([\w/-]+\.md)$", SITE.split("\nnav:")[1], re.M)
    assert sorted(listed) == sorted(str(path.relative_to(DOCS)) for path in PAGES)


def test_the_reference_has_every_public_name():
    import wholestep as ws

    shown = re.findall(
        r"^::: (wholestep\.[\w.]+)$", "\n".join(TEXTS[path] for path in DOCS.glob("api/*.md")), re.M
    )
    names = {name.rpartition(".")[2] for name in shown}
    assert {*ws.__all__} - names == {"audit"}
    assert all(pkgutil.resolve_name(name).__doc__ for name in shown)


def anchors(path):
    """Return the names of a page's headings, as links spell them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.S), re.M)
    titles = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def where(path, link):
    """Return the file that a link of a page leads to, and the heading in it; None if it leads
    elsewhere.
    """
    if link.startswith(f"{REPOSITORY}/"):
        link = re.sub(rf"^{REPOSITORY}/(blob|tree|raw)/main/", "", link)
        path = TOP / "x"
    if "://" in link:
        return None
    file, _, heading = link.partition("#")
    return (path.parent / file).resolve() if file else path, heading


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(TOP)))
def test_the_links_of_a_page_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXTS[path], flags=re.S)
    found = [
        place
        for link in re.findall(r"\]\(([^)\s]+)\)", text)
        if (place := where(path, link)) is not None
    ]
    for file, heading in found:
        assert file.exists(), file
        if heading:
            assert heading in anchors(file), (file, heading)


def test_the_readme_is_readable_elsewhere():
    assert not re.findall(r"\]\((?!https://)[^)]*\)", TEXTS[ROOT / "README.md"])  # as on PyPI
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 110
