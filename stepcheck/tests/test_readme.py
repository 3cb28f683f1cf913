"""The first pages: their programs run with what they install, and print what they show."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import keras
import pytest
from scripts import FRAMEWORKS, imported, program
from shares import on

ROOT = Path(__file__).parents[1]
TOP = ROOT.parent
README = (ROOT / "README.md").read_text()
PATHS = (
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    ROOT / "docs" / "pytorch.md",
)
PAGES = {path.name: path.read_text() for path in PATHS}
ENGINE = keras.backend.backend()
OF_TENSORFLOW = pytest.mark.skipif(
    ENGINE != "tensorflow", reason="the loop calls TensorFlow"
)

LOOP = """
import torch
from torch import nn

x = torch.randn(64, 3)
y = x[:, 0] - x[:, 1]
model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters())


def train():
    for _ in range(2):
        for rows in torch.randperm(len(x)).split(16):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimizer.step()


"""


def without_numbers(text):
    return " ".join(re.sub(r"-?\d+(\.\d+)?(e-\d+)?", "0", text).split())


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page, re.S)


def run(code, path):
    path.write_text(code)
    names = {}
    exec(compile(code, str(path), "exec"), names)
    text = str(names["report"]).replace(f"{path.parent}/", "")
    return text, names["report"], names.get("difference")


@on("tensorflow")
@OF_TENSORFLOW
@pytest.mark.slow
def test_the_report_of_the_readme_is_that_of_its_loop(tmp_path):
    text, *_ = run(program(README, "tensorflow"), tmp_path / "train.py")
    assert without_numbers(text) == without_numbers(blocks(README, "text")[0])
    (line,) = re.findall(r"your code: .*", README)
    assert line in text


@on("tensorflow")
@OF_TENSORFLOW
@pytest.mark.slow
def test_the_picture_is_of_the_loop_of_the_readme(tmp_path):
    path = ROOT / "docs" / "picture.py"
    spec = importlib.util.spec_from_file_location("picture", path)
    picture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(picture)
    assert (
        picture.drawn_from(ROOT / "docs" / "loop.png") == picture.program()
    )  # or draw it again
    assert picture.FIX in README
    written, mended = picture.draw(tmp_path / "loop.png").values()
    assert written[-1] == pytest.approx(2, abs=0.1)
    assert mended[-1] == pytest.approx(0.04, abs=0.02)


@on("jax")
def test_the_loops_of_torch_have_the_certificate_and_the_difference_that_the_readme_shows(
    tmp_path,
):
    pytest.importorskip("torch")
    _, report, difference = run(program(README, "torch"), tmp_path / "train.py")
    _, certificate, differing = blocks(README, "text")
    assert without_numbers(report.first_line) == without_numbers(certificate)
    assert difference.first_line == differing.strip()


@on("jax")
@pytest.mark.filterwarnings(
    "ignore:Using a target size"
)  # PyTorch sees the broadcast, too
def test_the_report_of_the_first_page_is_that_of_a_loop_of_torch(tmp_path):
    pytest.importorskip("torch")
    page = (TOP / "README.md").read_text()
    (block,) = (each for each in blocks(page, "python") if "stepcheck" in each)
    text, *_ = run(LOOP.lstrip() + block, tmp_path / "train.py")
    (lines,) = (each for each in blocks(page, "text") if "your code" in each)
    for line in lines.splitlines():
        assert without_numbers(line) in without_numbers(text)
    (line,) = re.findall(r"your code: .*", lines)
    assert line in text


def installed(page, framework):
    """Return the distributions that a page installs for a framework."""
    lines = re.findall(r"^    (pip .*?)(?:  +#.*)?$", page, re.M)
    (line,) = (each for each in lines if f"[{framework}]" in each)
    asked = re.findall(r"'\./(\w+)\[(\w+)\]'", line)
    needed = []
    for name, extra in asked:
        project = tomllib.loads((TOP / name / "pyproject.toml").read_text())[
            "project"
        ]
        needed += (
            project["dependencies"] + project["optional-dependencies"][extra]
        )
    return {
        re.match(r"[\w-]+", each)[0].removesuffix("-cpu") for each in needed
    } | {"stepcheck"}


@on("jax")
@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_installs_what_it_imports(page, framework):
    is_of_torch = page == "pytorch.md"
    if is_of_torch and framework != "torch":
        pytest.skip("a page on PyTorch alone")
    text = PAGES["index.md" if is_of_torch else page]
    known = installed(text, framework) | sys.stdlib_module_names
    assert imported(program(PAGES[page], framework)) <= known


def test_the_readme_is_readable_elsewhere():
    assert not re.findall(r"\]\((?!https://)[^)]*\)", README)  # as on PyPI
    assert len(README.splitlines()) <= 170
