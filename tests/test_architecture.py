"""The house rules that a machine can check; an exception is a line here, with its reason."""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("simcore", "agents", "calibration")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}

MAX_FILE_LINES = 400
MAX_BODY_LINES = 40
MAX_MEDIAN_BODY_LINES = 8

FILE_EXCEPTIONS: dict[str, int] = {
    "agents/ppo.py": 500,  # an agent is one file, read from its configuration to its loop
}
BODY_EXCEPTIONS: dict[tuple[str, str], int] = {}

MAY_PRINT = re.compile(
    r"simcore/cli\.py|(simcore|agents|calibration)/(cluster_)?commands\.py|calibration/\w+/command\.py"
)
MAY_IMPORT_NUMBA = re.compile(r"simcore/kernel/.*|.*/compiled_\w+\.py")
MAY_IMPORT_TORCH = re.compile(
    r"agents/.*|calibration/(collect|run)/.*|simcore/models/.*|simcore/frontends/torch_\w+\.py"
)
MAY_READ_ENVIRONMENT = ("simcore/profile_store.py",)  # where the user's own profiles lie
KERNEL_MAY_IMPORT = {"numpy", "numba", "simcore"} | sys.stdlib_module_names


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                yield name(path), node


def body_lines(function: ast.FunctionDef) -> int:
    """Counts lines from the first statement after the docstring to the end."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return function.end_lineno - body[0].lineno + 1 if body and function.end_lineno else 0


def imports(tree: ast.AST) -> Iterator[str]:
    """Yields dotted names of all imported modules, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield node.module or ""


def importers(package: str) -> list[str]:
    return [
        name(path)
        for path, tree in TREES.items()
        if any(module.split(".")[0] == package for module in imports(tree))
    ]


def test_files_stay_short() -> None:
    lines = {name(path): len(path.read_text().splitlines()) for path in FILES}
    assert {
        file: count
        for file, count in lines.items()
        if count > FILE_EXCEPTIONS.get(file, MAX_FILE_LINES)
    } == {}


def test_functions_stay_short() -> None:
    assert {
        (file, function.name): body_lines(function)
        for file, function in functions()
        if body_lines(function) > BODY_EXCEPTIONS.get((file, function.name), MAX_BODY_LINES)
    } == {}


def test_the_typical_function_is_tiny() -> None:
    bodies = [body_lines(function) for _, function in functions()]
    assert statistics.median(bodies) <= MAX_MEDIAN_BODY_LINES


def test_only_command_lines_print() -> None:
    assert [
        f"{name(path)}:{node.lineno}"
        for path, tree in TREES.items()
        if not MAY_PRINT.fullmatch(name(path))
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ] == []


def test_numba_is_imported_in_compiled_code_only() -> None:
    assert [file for file in importers("numba") if not MAY_IMPORT_NUMBA.fullmatch(file)] == []


def test_torch_is_imported_in_its_places_only() -> None:
    assert [file for file in importers("torch") if not MAY_IMPORT_TORCH.fullmatch(file)] == []


def test_the_kernel_imports_numpy_and_numba_only() -> None:
    kernel = {path: tree for path, tree in TREES.items() if "simcore/kernel/" in name(path)}
    for path, tree in kernel.items():
        for module in imports(tree):
            assert module.split(".")[0] in KERNEL_MAY_IMPORT, f"{name(path)} imports {module}"
            if module.startswith("simcore"):
                assert module.startswith("simcore.kernel"), f"{name(path)} imports {module}"


def test_no_package_imports_tests_or_bench() -> None:
    assert importers("tests") + importers("bench") == []


def test_rewards_and_environments_do_not_see_the_kernel() -> None:
    for path, tree in TREES.items():
        if name(path) in ("agents/reward.py", "agents/envs.py"):
            assert not [m for m in imports(tree) if m.startswith("simcore.kernel")]


@pytest.mark.parametrize("module", ["simcore", "simcore.errors", "simcore.cli", "simcore.commands"])
def test_a_light_module_loads_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    assert not {"numpy", "numba", "torch", "scipy", "networkx", "rich"}.intersection(loaded)


def test_simcore_never_loads_torch() -> None:
    modules = [
        name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in FILES
        if name(path).startswith("simcore/") and not MAY_IMPORT_TORCH.fullmatch(name(path))
    ]
    code = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    ).stdout.split()
    assert "torch" not in loaded


def test_nothing_reads_environment_variables() -> None:
    assert [
        f"{name(path)}:{node.lineno}"
        for path, tree in TREES.items()
        if name(path) not in MAY_READ_ENVIRONMENT
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    ] == []


def test_no_string_is_an_absolute_path() -> None:
    assert [
        f"{name(path)}:{node.lineno} {node.value!r}"
        for path, tree in [*TREES.items(), *((path, ast.parse(path.read_text())) for path in TESTS)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.match(r"/[a-z]+/\w", node.value)
    ] == []


def test_names_say_what_a_thing_is() -> None:
    assert [name(path) for path in FILES if path.stem in ("utils", "helpers", "misc")] == []
    assert [
        f"{name(path)}: {node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and re.search(r"Manager|Handler|^_?Base|Base$", node.name)
    ] == []


def test_every_array_field_shows_its_shape() -> None:
    assert [
        f"{name(path)}:{field.lineno}"
        for path, tree in TREES.items()
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        for field in owner.body
        if isinstance(field, ast.AnnAssign) and "NDArray" in ast.unparse(field.annotation)
        if "# [" not in "".join(path.read_text().splitlines()[field.lineno - 1 : field.end_lineno])
    ] == []


def test_text_files_end_in_one_newline_and_have_no_trailing_blanks() -> None:
    folders = [ROOT / folder for folder in (*PACKAGES, "tests", "bench", ".ci")]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    for path in files:
        if "__pycache__" in path.parts or path.suffix in (".pyc", ".pt") or path.name == "py.typed":
            continue
        text = path.read_text()
        assert text.endswith("\n"), f"{name(path)}: no newline at the end"
        assert not text.endswith("\n\n"), f"{name(path)}: blank lines at the end"
        assert not re.search(r"[ \t]\n", text), f"{name(path)}: blanks at the end of a line"
