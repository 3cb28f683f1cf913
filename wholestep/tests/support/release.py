"""`make release`: build both packages, and run their READMEs and examples in empty environments."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from scripts import program

TOP = Path(__file__).parents[3]
OUT = TOP / "build" / "release"
EXAMPLES = {
    "jax": ("batchnorm_by_hand", "accumulation"),
    "tensorflow": ("distributed_mnist", "accumulation"),
    "torch": ("audit_torch",),
}
CHECK = """
import sys, {0}
print({0}.__version__, {0}.__file__)
sys.exit(not {0}.__file__.startswith(sys.prefix))
"""
NONE_OF = "import sys; from importlib.util import find_spec; sys.exit(any(map(find_spec, {})))"
SHOWS = {"wholestep": "doctor", "stepcheck": "--version"}
UNSET = ("PYTHONPATH", "VIRTUAL_ENV", "KERAS_BACKEND")
BESIDE_TORCH = ("keras", "jax", "tensorflow", "wholestep")


@dataclass(frozen=True)
class Archives:
    """The archives of one package."""

    wheel: Path
    source: Path


def run(*command, **how):
    print("$", *command, flush=True)
    return subprocess.run([*map(str, command)], check=True, **how)


def build(package):
    """Return the archives of a package, after checks of their metadata and their files."""
    root = TOP / package
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    run(sys.executable, "-m", "build", "--outdir", OUT, root)
    wheel = OUT / f"{package}-{version}-py3-none-any.whl"
    source = OUT / f"{package}-{version}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if not name.startswith(f"{package}-{version}.dist-info/")}
    files = {path for path in (root / "src" / package).rglob("*") if path.is_file()}
    files = {path for path in files if path.suffix != ".pyc"}
    assert packaged == {str(path.relative_to(root / "src")) for path in files}
    return Archives(wheel, source)


def try_out(framework, requirements, packages):
    """Install archives into an empty environment; run the packages' READMEs and examples there."""
    home = OUT / f"with-{framework}"
    venv.create(home, with_pip=True)
    run(home / "bin" / "pip", "install", "--quiet", *requirements)
    work = home / "work"
    work.mkdir()
    known = {k: v for k, v in os.environ.items() if k not in UNSET}
    engine = {} if framework == "torch" else {"KERAS_BACKEND": framework}
    how = {"cwd": work, "env": known | engine}
    python = home / "bin" / "python"
    for package in packages:
        run(python, "-c", CHECK.format(package), **how)
        run(home / "bin" / package, SHOWS[package], **how)
        script = work / f"{package}_readme.py"
        script.write_text(program((TOP / package / "README.md").read_text(), framework))
        run(python, script.name, stdout=subprocess.DEVNULL, **how)
    for name in EXAMPLES[framework]:
        path = TOP / "examples" / f"{name}.py"
        quick = ["--quick"] if "--quick" in path.read_text() else []
        run(python, path, *quick, stdout=subprocess.DEVNULL, **how)
    return python


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    trainer = build("wholestep")
    check = build("stepcheck")
    try_out("jax", [f"{trainer.wheel}[jax,demo]"], ["wholestep"])
    both = [f"{trainer.source}[tensorflow,demo]", f"{check.source}[keras]"]
    try_out("tensorflow", both, ["wholestep", "stepcheck"])
    python = try_out("torch", [f"{check.wheel}[torch]"], ["stepcheck"])
    run(python, "-I", "-c", NONE_OF.format(BESIDE_TORCH))  # without the folder from which this runs
    names = [path.name for each in (trainer, check) for path in (each.wheel, each.source)]
    print(f"{', '.join(names)} in {OUT.relative_to(TOP)} are good.")


if __name__ == "__main__":
    main()
