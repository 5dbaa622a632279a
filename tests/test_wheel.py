"""The wheel: it holds the whole package and nothing else, and works where there is no clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
USE = """
import importlib, pkgutil, sys
import minillm
from minillm.cli import main

for module in pkgutil.walk_packages(minillm.__path__, "minillm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print("from", minillm.__file__)
statuses = [
    main(["tour", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "2", "--stages", "gqa,quantization_int4"]),
    main(["evaluate", "--model", "tiny", "--device", "cpu", "--tokens", "8", "--schemes", "fp32,int8"]),
    main(["grade"]),
]
print("statuses", statuses)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, since setuptools writes beside what it builds from."""
    copy, target = tmp_path_factory.mktemp("clone"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in ("minillm", "tests", "exercises", "chapters", "benchmarks"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "minillm" / "data" / "notes.md").write_text("not for the wheel")
    subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=copy, check=True, capture_output=True, timeout=120)
    [path] = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix() for kind in ("*.py", "data/*.txt") for path in (ROOT / "minillm").rglob(kind)
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert "minillm/data/prose.txt" in found
    assert found == wanted


def test_the_wheel_brings_the_command_the_licence_and_the_readme(wheel: zipfile.ZipFile) -> None:
    parts = {name.split(".dist-info/")[1]: name for name in wheel.namelist() if ".dist-info/" in name}
    assert "minillm = minillm.cli:main" in wheel.read(parts["entry_points.txt"]).decode()
    assert wheel.read(parts["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    assert "Learn LLM inference engineering by building it" in wheel.read(parts["METADATA"]).decode()


def test_the_wheel_works_where_there_is_no_clone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    away = tmp_path / "away"
    away.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(tmp_path / "installed"),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-c", USE]
    done = subprocess.run(command, cwd=away, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert f"from {tmp_path / 'installed' / 'minillm' / '__init__.py'}" in done.stdout
    assert "statuses [0, 0, 1]" in done.stdout
    assert done.stderr == (
        "minillm: No exercises here: run this inside a clone of the course, or name the folder (--exercises DIR).\n"
    )
    assert list(away.iterdir()) == []
