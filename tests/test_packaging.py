"""What a wheel holds, and that it works away from the checkout."""

import re
import shutil
import subprocess
import sys
import tomllib
from configparser import ConfigParser
from pathlib import Path

import pytest

import sglang_kvtc
from sglang_kvtc.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = ("sglang_kvtc", "kernels", "benchmarks")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which a wheel, built from a copy of the sources, was installed without its dependencies."""
    source = tmp_path_factory.mktemp("source")
    target = tmp_path_factory.mktemp("installed")
    for name in SOURCES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "wheel", *offline, "--wheel-dir", str(source / "dist"), str(source)], check=True)
    (wheel,) = (source / "dist").glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def run_installed(installed: Path, code: str) -> str:
    """Run `code` against the installed tree, from another directory."""
    preamble = f"import sys; sys.path.insert(0, {str(installed)!r}); "
    result = subprocess.run(
        [sys.executable, "-c", preamble + code], cwd=installed.parent, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    "module",
    [
        "sglang_kvtc",
        "sglang_kvtc.kernels",
        "sglang_kvtc.kernels.triton_ops",
        "sglang_kvtc.benchmarks.registry",
        "sglang_kvtc.benchmarks.routines",
    ],
)
def test_a_wheel_carries_every_part_of_the_package(installed: Path, module: str) -> None:
    printed = run_installed(installed, f"import {module} as module; print(module.__file__)")
    assert Path(printed).is_relative_to(installed / "sglang_kvtc")


def test_a_wheel_carries_the_format_specification_and_the_typing_marker(installed: Path) -> None:
    specification = installed / "sglang_kvtc/bitstream/FORMAT.md"
    assert specification.read_bytes() == (ROOT / "sglang_kvtc/bitstream/FORMAT.md").read_bytes()
    assert (installed / "sglang_kvtc/py.typed").is_file()


def test_a_wheel_puts_nothing_beside_the_package(installed: Path) -> None:
    """In particular no top-level `kernels`, which would shadow the package of that name."""
    names = {path.name for path in installed.iterdir()}
    assert names == {"sglang_kvtc", f"sglang_kvtc-{sglang_kvtc.__version__}.dist-info", "bin"}


def test_a_wheel_registers_the_plugin_and_the_command(installed: Path) -> None:
    parser = ConfigParser()
    parser.read(installed / f"sglang_kvtc-{sglang_kvtc.__version__}.dist-info/entry_points.txt")
    assert parser["sglang.srt.plugins"]["kvtc"] == "sglang_kvtc.integration.plugin:load"
    assert parser["console_scripts"]["sglang-kvtc"] == "sglang_kvtc.cli.main:main"


def test_every_folder_with_modules_is_listed_as_a_package() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    found = set()
    for name in SOURCES:
        for path in (ROOT / name).rglob("*.py"):
            parts = path.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "sglang_kvtc" else ("sglang_kvtc", *parts)))
    assert listed == found


def test_the_readme_names_the_commands_there_are() -> None:
    named = re.findall(r"(?:^|`)sglang-kvtc ([a-z][a-z-]*)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    assert set(named) == COMMANDS.keys()


def test_importing_the_package_loads_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_kvtc; sys.exit(bool({'torch', 'sglang'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", sglang_kvtc.__all__)
def test_every_public_name_of_the_package_can_be_imported(name: str) -> None:
    assert getattr(sglang_kvtc, name) is not None
