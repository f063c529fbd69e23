"""The repository's own promises: what its files say, and which package may import which."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("profiler", "planner", "executor")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path, *, top_level_only: bool) -> set[str]:
    """First parts of the names of the modules that a file imports."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(("package", "forbidden"), [
    ("profiler", {"planner", "executor"}), ("planner", {"executor"})])
def test_imports_run_one_way(package: str, forbidden: set[str]) -> None:
    for path in sources(package):
        assert not imported(path, top_level_only=False) & forbidden, path


def test_planner_never_imports_torch_by_itself() -> None:
    for path in sources("planner"):
        assert not imported(path, top_level_only=True) & {"torch", "transformers"}, path


def test_only_the_programs_know_the_solver() -> None:
    for package in PACKAGES:
        for path in sources(package):
            if path.name not in ("formulation.py", "linear.py"):
                assert "ortools" not in imported(path, top_level_only=False), path


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert re.search(r"^make test$", script.read_text(), flags=re.MULTILINE)
    readme = (ROOT / "README.md").read_text()
    assert "make test" in readme
    assert "make demo" in readme


@pytest.mark.parametrize("target", ["demo", "test", "lint", "help"])
def test_make_knows_the_target(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    assert done.returncode == 0, done.stderr


def test_make_refuses_an_old_python(tmp_path: Path) -> None:
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo Python 3.10.0 && exit 0\nexit 1\n")
    old.chmod(0o755)
    done = subprocess.run(["make", "demo", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "Python 3.11, 3.12 or 3.13 is needed" in done.stderr
    assert "Python 3.10.0" in done.stderr


def test_license_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.count("\n") > 190
    for part in ("Version 2.0, January 2004", "END OF TERMS AND CONDITIONS"):
        assert part in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


def test_version_has_an_entry_in_the_changelog() -> None:
    import planner

    assert f"## {planner.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_data_files_are_packaged() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.json"):
            inside = path.relative_to(ROOT / package).as_posix()
            assert any(fnmatch.fnmatch(inside, p) for p in patterns[package]), path


def test_every_import_is_a_dependency() -> None:
    named = {re.split(r"[><=]", text)[0].replace("-", "_").lower()
             for text in [*PROJECT["project"]["dependencies"],
                          *PROJECT["project"]["optional-dependencies"]["reports"]]}
    named = {"yaml" if name == "pyyaml" else name for name in named} | {"pydantic_core"}
    known = named | set(sys.stdlib_module_names) | set(PACKAGES)
    for package in PACKAGES:
        for path in sources(package):
            assert not imported(path, top_level_only=False) - known, path


def test_public_names_exist_and_load() -> None:
    import planner

    for name in planner.__all__:
        assert getattr(planner, name) is not None
    assert set(planner.__all__) <= set(dir(planner))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        planner.nothing  # noqa: B018


def test_importing_the_planner_is_cheap() -> None:
    code = "import sys, planner; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    heavy = {"torch", "ortools", "networkx", "numpy", "pydantic", "rich", "transformers"}
    assert not heavy & set(done.stdout.split())
