"""`make release`: build the archives, install each into an empty environment, and run the README and examples there."""

import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

from scripts import program

ROOT = Path(__file__).parents[1]
TOP = ROOT.parent
OUT = ROOT / "build" / "release"
EXAMPLES = {"jax": ("batchnorm_by_hand", "accumulation"), "tensorflow": ("distributed_mnist", "accumulation")}
CHECK = (
    "import sys, wholestep as ws; print(ws.__version__, ws.__file__); sys.exit(not ws.__file__.startswith(sys.prefix))"
)


def run(*command, **how):
    print("$", *command, flush=True)
    return subprocess.run([*map(str, command)], check=True, **how)


def build(version):
    """Return the wheel and the source archive, after checks of their metadata and their files."""
    shutil.rmtree(OUT, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", OUT, ROOT)
    wheel, source = OUT / f"wholestep-{version}-py3-none-any.whl", OUT / f"wholestep-{version}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    names = zipfile.ZipFile(wheel).namelist()
    packaged = {name for name in names if not name.startswith(f"wholestep-{version}.dist-info/")}
    paths = {path for suffix in ("*.py", "py.typed") for path in (ROOT / "src").rglob(suffix)}
    assert packaged == {str(path.relative_to(ROOT / "src")) for path in paths}
    return wheel, source


def try_out(archive, engine):
    """Install an archive into an empty environment with one engine, and run the README and two examples there."""
    home = OUT / f"with-{engine}"
    venv.create(home, with_pip=True)
    run(home / "bin" / "pip", "install", "--quiet", f"{archive}[{engine},demo]")
    (home / "work").mkdir()
    (home / "work" / "train.py").write_text(program((ROOT / "README.md").read_text(), engine))
    known = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    how = {"cwd": home / "work", "env": known | {"KERAS_BACKEND": engine}}
    python, names = home / "bin" / "python", EXAMPLES[engine]
    run(python, "-c", CHECK, **how)
    run(home / "bin" / "wholestep", "doctor", **how)
    run(python, "train.py", stdout=subprocess.DEVNULL, **how)
    for name in names:
        quick = ["--quick"] if "--quick" in (path := TOP / "examples" / f"{name}.py").read_text() else []
        run(python, path, *quick, stdout=subprocess.DEVNULL, **how)


def main():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wheel, source = build(version)
    try_out(wheel, "jax")
    try_out(source, "tensorflow")
    print(f"wholestep {version}: {wheel.name} and {source.name} in {OUT.relative_to(ROOT)} are good.")


if __name__ == "__main__":
    main()
