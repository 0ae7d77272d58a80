"""The gates of a change, as .ci/run and the workflows run them: `nox -l` lists them, `nox -s test` runs one.

PIP_CONSTRAINT names a file that pins PyTorch (`torch==2.13.0` in it) for all that a session installs.
With `--no-venv --no-install` the sessions run in the environment that calls them.
"""

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["lint", "types", "test", "docs", "wheel"]
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True

PROJECT = nox.project.load_toml("pyproject.toml")
# What an installed wheel is tried with: the rest of the suite is README's second command.
WHEEL_TESTS = [f"tests/test_{name}.py" for name in ("contract", "errors", "manifest", "selection", "cli")]
FIND_NVCC = """
from importlib.metadata import distribution
package = distribution("nvidia-cuda-nvcc")
print(next(package.locate_file(f) for f in package.files if f.parts[-2:] == ("bin", "nvcc")))
"""


def group(name):
    return nox.project.dependency_groups(PROJECT, name)


@nox.session
def lint(session):
    """Style, layers, workflows, and that version and changelog agree."""
    session.install(*group("lint"), "tomli")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports")
    session.run("python", "-m", "build_tools.release")
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("zizmor", "--offline", "--persona", "pedantic", ".github/workflows")


@nox.session
def types(session):
    """mypy, strict."""
    session.install(".[test]", *group("nvrtc"), *group("types"))
    session.run("mypy")


@nox.session
def test(session):
    """Install and run the tests; pytest's arguments after --."""
    session.install(".[test]", *group("nvrtc"))
    session.run("pytest", *session.posargs)


@nox.session
def docs(session):
    """The examples run, and the README says what the benchmark results say."""
    session.install(".[test]", *group("docs"))
    session.run("python", "benchmarks/report.py", "--check")
    for example in sorted(Path("examples").glob("*.py")):
        session.run("python", str(example))


@nox.session
def integrations(session):
    """TRL's trainers, verl's and OpenRLHF's code from PyPI, with and without the drop-ins."""
    session.install(".[test]", *group("integrations"))
    session.install("--no-deps", *group("integrations-alone"))
    session.run("pytest", "--require-integrations", *sorted(map(str, Path("tests").glob("test_integrations_*.py"))))


@nox.session
def cubins(session):
    """Compile every cubin with nvcc, PyPI's or the one named after --, and pass the gate. Needs g++."""
    session.install(*group("nvcc"), "tomli")
    compiler = session.posargs[0] if session.posargs else session.run("python", "-c", FIND_NVCC, silent=True).strip()
    with TemporaryDirectory() as folder:
        session.run("python", "-m", "build_tools", "--compiler", compiler, "--out", folder)


@nox.session
def wheel(session):
    """Build twice, compare and check the wheels, and test one as installed offline, the sources out of the way.

    After --: what of tests/ to run.
    """
    session.install(*group("wheel"), "tomli")
    with TemporaryDirectory() as folder:
        work = Path(folder)
        session.run("python", "-m", "build", "--outdir", str(work / "sdist"))  # the wheel from the sdist
        session.run("python", "-m", "build", "--wheel", "--outdir", str(work / "tree"))
        (built,) = (work / "tree").iterdir()
        if built.read_bytes() != (work / "sdist" / built.name).read_bytes():
            session.error(f"{built.name}: expected the same bytes from the checkout and from its sdist, got others.")
        session.run("python", "-m", "build_tools.repair", str(built), str(work / "dist"))
        session.run("twine", "check", "--strict", *map(str, (work / "sdist").iterdir()))
        session.run("check-wheel-contents", str(built))
        _test_offline(session, work, built)


def _test_offline(session, work, built):
    """As on a node of a cluster: a folder of wheels, no index, no compiler; and of this checkout only the tests."""
    wheels, python = str(work / "wheelhouse"), str(work / "venv" / "bin" / "python")
    wanted = ["pytest", "hypothesis", "numpy"]
    session.run("python", "-m", "pip", "download", "--quiet", "--dest", wheels, str(built), *wanted)
    session.run("python", "-m", "venv", str(work / "venv"))
    install = [python, "-m", "pip", "install", "--no-index", "--find-links", wheels, "fused-logp-hub", *wanted]
    session.run(*install, env={"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}, external=True)
    shutil.copytree("tests", work / "tests")
    shutil.copy("pyproject.toml", work)
    with session.chdir(work):
        session.run(python, "-m", "pytest", *(session.posargs or WHEEL_TESTS), external=True)


@nox.session(venv_backend="none")
def gpu(session):
    """The tests in the environment that calls, on its GPU, against the wheel that is installed there."""
    session.run("pytest", "--require-gpu", *session.posargs)


@nox.session(venv_backend="none")
def bench(session):
    """The benchmarks in the environment that calls, on its GPU; benchmarks/run.py's arguments after --."""
    session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session
def ranges(session):
    """Every row of .github/matrix.json resolves, by uv from metadata alone."""
    session.install(*group("ranges"))
    matrix = json.loads(Path(".github/matrix.json").read_text(encoding="utf-8"))
    for row in (row for rows in matrix.values() for row in rows):
        with TemporaryDirectory() as folder:
            pin = Path(folder, "constraints.txt")
            pin.write_text(f"torch=={row['torch']}", encoding="utf-8")
            options = ["--python-version", row["python"], "--python-platform", "x86_64-manylinux_2_28"]
            options += [f"--extra={name}" for name in row.get("extras", "").split(",") if name]
            options += ["--constraints", str(pin), "--output-file", str(Path(folder, "resolved.txt"))]
            session.run("uv", "pip", "compile", "--quiet", *options, "pyproject.toml")
