"""The pages on the command lines: made of their parsers, with examples that these take."""

import importlib.util
import shlex
from pathlib import Path

import pytest
from shares import on

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = "wholestep", "stepcheck"


@pytest.fixture(scope="module")
def commands():
    spec = importlib.util.spec_from_file_location("commands", DOCS / "commands.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on("jax")
@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_is_that_of_the_parser(commands, package):
    page = commands.path(package).read_text()
    assert page == commands.page(package)  # or run docs/commands.py
    assert len(page.split()) < 1200


@on("jax")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_command_has_an_example_that_it_takes(commands, package):
    parser = commands.PARSERS[package]()
    found = {each.prog: each for each in commands.leaves(parser)}
    assert {*found} == {each for each in commands.EXAMPLES if each.startswith(package)}
    for command in found:
        example = commands.EXAMPLES[command].partition(" -- ")[0]
        assert example.startswith(command)
        parser.parse_args(shlex.split(example)[1:])
