"""The house rules: who may import what, names equal everywhere, a wheel that runs, a start that loads no torch."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from models import write_rand

from tinyvllm_cli import gemm, ops, reference, reference_products
from tinyvllm_cli.memory import plan
from tinyvllm_cli.model import decode_share

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted([*ROOT.glob("tinyvllm_cli/**/*.py"), *ROOT.glob("cuda_ext/*.py")])
CUDA_SOURCES = sorted(path for path in ROOT.glob("cuda_ext/*") if path.suffix in {".cu", ".cuh", ".h", ".cpp"})

# Module or package -> what it may import: packages from outside, and rooms of the house. The first match counts.
# "lazy X" allows X inside functions and for types only. What stands under `if TYPE_CHECKING` is free within the house.
RULES: dict[str, str] = {
    "tinyvllm_cli.errors": "",
    "tinyvllm_cli.engine": "numpy errors engine",
    "tinyvllm_cli.memory": "errors memory",
    "tinyvllm_cli.checkpoint.weights": "torch numpy errors checkpoint",
    "tinyvllm_cli.checkpoint.data": "numpy errors checkpoint",
    "tinyvllm_cli.checkpoint": "errors checkpoint",
    "tinyvllm_cli.text": "tokenizers jinja2 errors text",
    "tinyvllm_cli.jobs": "errors jobs",
    "tinyvllm_cli.gemm": "torch",
    "tinyvllm_cli.schemas": "",
    "tinyvllm_cli.ops": "torch gemm schemas",
    "tinyvllm_cli.reference_products": "torch",
    "tinyvllm_cli.reference": "torch ops reference_products",
    "tinyvllm_cli.model": "torch numpy errors gemm ops reference memory checkpoint engine model",
    "tinyvllm_cli.generation": "errors engine text",
    "tinyvllm_cli.llm": "torch errors ops reference memory checkpoint engine text generation model lazy cuda_ext",
    "tinyvllm_cli.bench": "numpy errors memory checkpoint engine bench "
    "lazy torch lazy llm lazy gemm lazy ops lazy reference lazy model lazy cuda_ext",
    "tinyvllm_cli.commands": "errors memory checkpoint engine text generation jobs bench commands lazy llm lazy model",
    "tinyvllm_cli.render": "rich typer errors memory checkpoint jobs bench render lazy commands",
    "tinyvllm_cli.options": "typer errors",
    "tinyvllm_cli.cli": "rich typer errors options render lazy commands",
    "tinyvllm_cli.__main__": "cli",
    "tinyvllm_cli.demo.score": "engine llm demo",
    "tinyvllm_cli.demo": "torch numpy tokenizers safetensors demo",
    "tinyvllm_cli": "lazy engine lazy errors lazy generation lazy llm",
    "cuda_ext.check": "errors cuda_ext",
    "cuda_ext.toolchain": "errors cuda_ext",
    "cuda_ext": "torch errors cuda_ext",
}
ENVIRONMENT_READERS = (
    "tinyvllm_cli/__init__.py",  # before torch reads it
    "tinyvllm_cli/commands/model.py",
    "tinyvllm_cli/commands/settings.py",
    "tinyvllm_cli/render/console.py",
    "cuda_ext/",
)
TOP_LEVEL = {
    "tinyvllm_cli",
    "cuda_ext",
    "tests",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "LICENSE",
    ".ci",
    ".gitignore",
}
MAX_LINES = 350


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(module: str, tree: ast.Module) -> Iterator[tuple[str, int, bool, bool]]:
    """Every import as (module, line, inside a function, under TYPE_CHECKING)."""

    def walk(node: ast.AST, lazy: bool, typing: bool) -> Iterator[tuple[str, int, bool, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, child.lineno, lazy, typing) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                package = module.split(".")[: -child.level] if child.level else []
                source = ".".join([*package, *([child.module] if child.module else [])])
                parent = source in ("tinyvllm_cli", "cuda_ext")  # from tinyvllm_cli import ops
                names = [f"{source}.{alias.name}" for alias in child.names] if parent else [source]
                yield from ((name, child.lineno, lazy, typing) for name in names)
            else:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
                yield from walk(child, lazy or function, typing or guard)

    return walk(tree, False, False)


def rule_of(module: str) -> tuple[set[str], set[str]]:
    """What a module may import anywhere, and what inside functions only."""
    words = next(rule for name, rule in RULES.items() if module == name or module.startswith(name + ".")).split()
    lazy = {words[i + 1] for i, word in enumerate(words) if word == "lazy"}
    return {word for word in words if word != "lazy"} - lazy, lazy


def breaches(module: str, tree: ast.Module) -> Iterator[str]:
    always, lazily = rule_of(module)
    for name, line, lazy, typing in imports(module, tree):
        top, _, rest = name.partition(".")
        house = top in ("tinyvllm_cli", "cuda_ext")
        target = rest.split(".")[0] if top == "tinyvllm_cli" else top
        if top in sys.stdlib_module_names or (house and typing) or name == "tinyvllm_cli.__version__":
            continue
        if target not in always and not ((lazy or typing) and target in lazily):
            yield f"{module}, line {line}: may not import {name}{' at module level' if target in lazily else ''}"


def test_imports_keep_the_rules_of_the_rooms() -> None:
    found = [breach for path in SOURCES for breach in breaches(module_name(path), ast.parse(path.read_text()))]
    assert not found, "\n".join(found)


def test_the_import_check_finds_breaches() -> None:
    code = "import os, torch\ndef f():\n    from rich.table import Table\nfrom tinyvllm_cli import ops\n"
    found = list(breaches("tinyvllm_cli.engine.scheduler", ast.parse(code)))
    assert [re.sub(r".* ", "", breach) for breach in found] == ["torch", "rich.table", "tinyvllm_cli.ops"]
    eager = "from tinyvllm_cli.commands import inspect"
    assert list(breaches("tinyvllm_cli.cli", ast.parse(eager)))
    assert not list(breaches("tinyvllm_cli.cli", ast.parse(f"def f():\n    {eager}")))


def test_declared_dependencies_are_those_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=~! ]", item)[0].replace("-", "_") for item in project["dependencies"]}
    imported = {
        name.split(".")[0]
        for path in SOURCES
        for name, _, _, _ in imports(module_name(path), ast.parse(path.read_text()))
    } - sys.stdlib_module_names
    assert imported - {"tinyvllm_cli", "cuda_ext"} == declared


def test_no_global_state_and_no_hidden_settings() -> None:
    for path in SOURCES:
        text, place = path.read_text(), str(path.relative_to(ROOT))
        if not place.startswith("tinyvllm_cli/demo/"):  # a training program, not part of the engine
            assert not any(isinstance(node, ast.Global) for node in ast.walk(ast.parse(text))), f"{place}: `global`"
        if not place.startswith(ENVIRONMENT_READERS):
            assert not re.search(r"\bos\.(environ|getenv)\b", text), f"{place} reads the environment"
        if place != "tinyvllm_cli/ops.py":
            assert not re.search(r"torch\.ops\.tinyvllm", text), f"{place} goes past ops.py"


def test_cuda_sources_keep_their_headers() -> None:
    for path in CUDA_SOURCES:
        text = path.read_text()
        included = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)', text, re.MULTILINE)
        if path.name == "bindings.cpp":
            assert "__global__" not in text
            fat = {"torch/extension.h", "torch/torch.h", "torch/all.h", "ATen/ATen.h"} & set(included)
            assert not fat, f"{path.name} includes {fat}"
        else:
            wrong = [name for name in included if re.match(r"(torch|ATen|c10|pybind11)/", name)]
            assert not wrong, f"{path.name} includes {wrong}"
            noise = re.search(r"\b(printf|puts|exit|abort)\s*\(|std::c(out|err)", text)
            assert not noise, f"{path.name} prints or exits"


@pytest.mark.parametrize("op", ops.SCHEMAS)
def test_an_op_has_one_name_everywhere(op: str) -> None:
    for module in (ops, reference):
        assert callable(getattr(module, op, None)), f"{module.__name__} lacks {op}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"tinyvllm::{op}", "CPU")
    bindings = (ROOT / "cuda_ext/bindings.cpp").read_text()
    launchers = (ROOT / "cuda_ext/launch.h").read_text()
    kernels = "".join(path.read_text() for path in CUDA_SOURCES if path.suffix == ".cu")
    assert re.search(rf'\.impl\(\s*"{op}"', bindings), f"bindings.cpp does not register {op}"
    assert re.search(rf"^cudaError_t {op}\(", launchers, re.MULTILINE), f"launch.h does not declare {op}"
    assert re.search(rf"^cudaError_t {op}\(", kernels, re.MULTILINE), f"no .cu defines the launcher {op}"


@pytest.mark.parametrize(
    ("source", "constant", "number"),
    [
        ("matvec.cu", "kMaxRows", gemm.MATVEC_MAX_ROWS),
        ("linear_hopper.cuh", "kMaxRows", gemm.HOPPER_MAX_ROWS),
        ("add_linear_wide.cu", "kMinChunks", gemm.SPLIT_MIN_SIZE // 64),
        ("norm_sums.cuh", "kSumsOfOne", reference_products.UNITS_OF_ONE),
        ("decode_parts.cu", "kEven", decode_share.EVEN),
    ],
)
def test_a_number_of_both_languages_is_the_same(source: str, constant: str, number: float) -> None:
    (value,) = re.findall(rf"constexpr \w+ {constant} = ([\d.< ]+)f?;", (ROOT / "cuda_ext" / source).read_text())
    factor, _, shift = value.partition("<<")
    assert float(factor) * 2 ** int(shift or 0) == number


def test_there_is_room_for_all_rows_whose_norms_can_wait() -> None:
    assert plan.NORM_ROWS == gemm.FEW_MAX_ROWS >= gemm.HOPPER_MAX_ROWS


def test_the_bindings_register_no_more_than_the_table() -> None:
    bindings = (ROOT / "cuda_ext/bindings.cpp").read_text()
    assert set(re.findall(r'\.impl\(\s*"(\w+)"', bindings)) == set(ops.SCHEMAS)


def test_files_are_short_and_the_top_level_is_fixed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split("/")[0] for name in listed} <= TOP_LEVEL
    for path in [*SOURCES, *CUDA_SOURCES, *ROOT.glob("tests/*.py")]:
        lines = len(path.read_text().splitlines())
        assert lines <= MAX_LINES, f"{path.relative_to(ROOT)} has {lines} lines: split it by concern"


# --- start ------------------------------------------------------------------------------------------------------------


def start(*arguments: str) -> tuple[str, set[str], float]:
    """Runs the program in a fresh process; returns stdout, the packages imported, and the CPU seconds it took."""
    command = [sys.executable, "-X", "importtime", "-m", "tinyvllm_cli", *arguments]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    after = os.times()
    trace = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(line for line in done.stderr.splitlines() if line not in trace)
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return done.stdout, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in trace}, seconds


@pytest.mark.parametrize("command", ["--help", "inspect", "inspect --json"])
def test_help_and_inspect_load_no_torch_and_answer_at_once(command: str, tmp_path: Path) -> None:
    arguments = command.split()
    if "inspect" in arguments:
        arguments.append(str(write_rand(tmp_path / "model", num_shards=3)))
    runs = [start(*arguments) for _ in range(3)]
    output, loaded, _ = runs[0]
    assert output.strip()
    assert "tinyvllm_cli" in loaded
    assert not loaded & {"torch", "numpy", "transformers", "tokenizers", "safetensors", "jinja2"}
    assert min(seconds for _, _, seconds in runs) < 0.3  # CPU time, so that a busy machine does not fail the test


# --- wheel ------------------------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TINYVLLM"))}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_wheel_from_a_clean_clone_runs_in_an_empty_venv(tmp_path: Path) -> None:
    clone, venv = tmp_path / "clone", tmp_path / "venv"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone, cwd=tmp_path)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path / "dist", clone, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")

    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python, program = venv / "bin" / "python", venv / "bin" / "tinyvllm"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # The dependencies are lent by a path file: torch and its kin would take minutes to install once more.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parent.parent}\n")

    code = "import tinyvllm_cli, cuda_ext; print(tinyvllm_cli.__file__, cuda_ext.__file__)"
    places = run(python, "-c", code, cwd=tmp_path)
    assert all(Path(place).is_relative_to(site) for place in places.split()), places
    tracked = run("git", "ls-files", "cuda_ext", "tinyvllm_cli", cwd=clone).split()
    missing = [name for name in tracked if not (site / name).is_file()]
    assert not missing, f"not in the wheel: {missing}"
    assert any(name.endswith(".cu") for name in tracked)

    model = write_rand(tmp_path / "model")
    assert "inspect" in run(program, "--help", cwd=tmp_path)
    assert '"tensors"' in run(program, "inspect", model, "--json", cwd=tmp_path)
    options = ("--model", model, "--raw", "--device", "cpu", "--max-tokens", "4", "--ignore-eos", "--json", "A")
    assert '"token_ids"' in run(program, "generate", *options, cwd=tmp_path)
