"""The checkout, an sdist and a wheel hold the same package, and nothing else gets in."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LINKED = ["backends", "launch"]
BUILT_FROM = [
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
    "LICENSE",
    "ulysses",
    "configs",
    *LINKED,
]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing in the real one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in BUILT_FROM:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, folder)
    (folder / "tests").mkdir()
    shutil.copy(__file__, folder / "tests")
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return wheel_names(checkout, tmp_path_factory.mktemp("wheel"))


def build(checkout: Path, kind: str, out: Path) -> Path:
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def wheel_names(checkout: Path, out: Path) -> list[str]:
    with zipfile.ZipFile(build(checkout, "wheel", out)) as archive:
        return sorted(archive.namelist())


def package_files() -> set[str]:
    """Every module and data file of the package, as the checkout has them."""
    suffixes = {".py", ".sh", ".yaml", ".typed"}
    return {
        (Path(folder) / name).relative_to(ROOT).as_posix()
        for folder, _, names in os.walk(ROOT / "ulysses", followlinks=True)
        for name in names
        if Path(name).suffix in suffixes
    }


@pytest.mark.parametrize("room", LINKED)
def test_the_links_are_committed_links_to_the_top_folders(room: str) -> None:
    link = ROOT / "ulysses" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert (link / "__init__.py").samefile(ROOT / room / "__init__.py")


def test_the_listed_packages_are_the_folders_that_are_packages(project: dict[str, Any]) -> None:
    found = {
        ".".join(Path(folder).relative_to(ROOT).parts)
        for folder, _, names in os.walk(ROOT / "ulysses", followlinks=True)
        if "__init__.py" in names
    }
    assert set(project["tool"]["setuptools"]["packages"]) == found


def test_the_mapping_sends_each_linked_package_to_its_folder(project: dict[str, Any]) -> None:
    packages = project["tool"]["setuptools"]["packages"]
    mapping = project["tool"]["setuptools"]["package-dir"]
    for room in LINKED:
        below = [p for p in packages if p == f"ulysses.{room}" or p.startswith(f"ulysses.{room}.")]
        for package in below:
            expected = package.removeprefix("ulysses.").replace(".", "/")
            # A parent's mapping covers its subpackages.
            assert mapping.get(package, expected) == expected
        assert mapping[f"ulysses.{room}"] == room


@pytest.mark.parametrize("room", LINKED)
def test_the_bare_name_is_refused(room: str) -> None:
    command = [sys.executable, "-c", f"import {room}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"ImportError: {room}: this package is named ulysses.{room}" in done.stderr


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel: list[str]) -> None:
    metadata = {name for name in wheel if name.partition("/")[0].endswith(".dist-info")}
    assert set(wheel) - metadata == package_files()
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)


def test_the_sdist_gives_the_same_wheel(
    checkout: Path, wheel: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(checkout, "sdist", out)) as archive:
        archive.extractall(out, filter="data")
    (unpacked,) = (path for path in out.iterdir() if path.is_dir())
    assert wheel_names(unpacked, tmp_path_factory.mktemp("wheel-of-sdist")) == wheel
    configs = {path.name for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {path.name for path in (unpacked / "configs").rglob("*") if path.is_file()} == configs
    assert (unpacked / "tests" / Path(__file__).name).exists()


def test_the_constraints_pin_every_requirement(project: dict[str, Any]) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.partition(";")[0].strip() for line in lines if not line.startswith("#")]
    assert all("==" in pin and "+" not in pin for pin in pins)
    pinned = {pin.partition("==")[0] for pin in pins}
    extras = project["project"]["optional-dependencies"]
    wanted = [*project["project"]["dependencies"]]
    wanted += [name for extra in ("dev", "hf", "diffusers") for name in extras[extra]]
    names = {requirement.partition(">")[0].lower() for requirement in wanted}
    assert names <= pinned
