"""The rules of layout that a linter cannot express, checked on the syntax trees of all files."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("sglang_kvtc", "kernels", "benchmarks", "patches", "examples", "tests")
MAX_LINES = 600

# Imports point to the same layer or a lower one.
LAYERS = {
    "errors": 0,
    "types": 0,
    "config": 0,
    "metrics": 0,
    "bitstream": 1,
    "artifact": 1,
    "codec": 2,
    "gates": 2,
    "eviction": 2,
    "kernels": 3,
    "calibrate": 3,
    "distill": 3,
    "tier": 4,
    "integration": 5,
    "cli": 6,
    "benchmarks": 6,
}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts)


def module_name(path: Path) -> str:
    """Dotted name in the installed package: top-level `kernels` and `benchmarks` become subpackages."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("kernels", "benchmarks"):
        parts = ("sglang_kvtc", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Every module a file imports, wherever the statement stands; `from a import b` yields both `a` and `a.b`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package.pop()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call of a file with the dotted text of what is called."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def layer(module: str) -> int | None:
    """Layer of a module of ours; None for `sglang_kvtc` itself and for other packages."""
    top, _, rest = module.partition(".")
    return LAYERS[rest.partition(".")[0]] if top == "sglang_kvtc" and rest else None


PACKAGE_FILES = [
    path for path in python_files("sglang_kvtc", "kernels", "benchmarks") if module_name(path) != "sglang_kvtc"
]
by_module = pytest.mark.parametrize("path", PACKAGE_FILES, ids=module_name)


def test_every_subpackage_has_a_layer() -> None:
    found = {module_name(path).split(".")[1] for path in PACKAGE_FILES}
    assert found <= LAYERS.keys()


@by_module
def test_imports_point_only_to_the_same_or_a_lower_layer(path: Path) -> None:
    own = layer(module_name(path))
    assert own is not None
    for name in imported_names(path):
        if re.match(r"sglang_kvtc\.[a-z_]+$", name) and name.rpartition(".")[2] not in LAYERS:
            continue  # an attribute of the package, such as its version
        other = layer(name)
        assert other is None or other <= own, f"{module_name(path)} imports {name}"


@by_module
def test_outside_packages_stay_in_the_folders_that_own_them(path: Path) -> None:
    name = module_name(path)
    outside = {imported.partition(".")[0] for imported in imported_names(path)}
    if not name.startswith("sglang_kvtc.integration"):
        assert "sglang" not in outside
    if not name.startswith(("sglang_kvtc.calibrate", "sglang_kvtc.distill")):
        assert "transformers" not in outside
    if name.startswith("sglang_kvtc.bitstream"):
        assert "torch" not in outside


def test_the_decoder_does_not_import_the_encoder() -> None:
    assert "sglang_kvtc.codec.encode" not in set(imported_names(ROOT / "sglang_kvtc/codec/decode.py"))


@by_module
def test_only_the_command_line_prints(path: Path) -> None:
    if not module_name(path).startswith("sglang_kvtc.cli"):
        assert "print" not in {name for name, _ in calls(path)}


@by_module
def test_a_sec_01_nothing_is_loaded_in_a_way_that_can_run_code(path: Path) -> None:
    unsafe = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
    assert not unsafe & {name.partition(".")[0] for name in imported_names(path)}
    for name, call in calls(path):
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load":
            assert arguments.get("weights_only") == "True"
        assert arguments.get("allow_pickle", "False") == "False"


@by_module
def test_a_sec_04_nothing_listens_on_a_socket(path: Path) -> None:
    servers = {"http.server", "socketserver", "xmlrpc.server", "multiprocessing.managers", "zmq", "uvicorn", "grpc"}
    assert not servers & set(imported_names(path))
    listeners = {"listen", "create_server", "start_server", "start_unix_server", "serve_forever", "Listener"}
    assert not listeners & {name.rpartition(".")[2] for name, _ in calls(path)}


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short_and_named_for_what_they_hold(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert path.stem not in ("utils", "util", "common", "helpers", "misc")
    assert not path.stem.endswith(("_fast", "_v2", "_new", "_old"))


def test_top_level_kernels_and_benchmarks_are_not_packages() -> None:
    """Run from a checkout, `import kernels` has to find the package of that name which SGLang imports."""
    assert not (ROOT / "kernels/__init__.py").exists()
    assert not (ROOT / "benchmarks/__init__.py").exists()


def test_no_file_names_a_path_of_one_machine_or_a_package_registry() -> None:
    local = re.compile(r"(?:^|[^\w.])/(?:wor[k]|roo[t]|hom[e]|User[s])/|\bpypi\.or[g]|pythonhosted\.or[g]")
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listing.stdout.decode().split("\0")):
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # a binary fixture, or a file deleted but not yet committed
        assert not local.search(text), name
