"""What the documents show is run as shown, and the pages build without a warning."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import fresh
import helpers
import markdown
import pytest
import torch
from expecttest import assert_expected_inline
from helpers import ROOT
from markdown import Block
from packaging.requirements import Requirement

import dtorch_ops

BLOCKS = markdown.blocks()

# Whose programs and builds are run by another file, with what they need.
ELSEWHERE = {
    "docs/installing.md": "test_wheel.py",
    "examples/cpp/README.md": "test_cpp_user.py",
}


def of_language(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language and not block.reason]


def run_here(language: str) -> list[Block]:
    return [block for block in of_language(language) if block.file not in ELSEWHERE]


# ---- Which blocks there are ---------------------------------------------------------------------


def test_what_is_not_run_is_marked_and_listed_here() -> None:
    """A block that is added to this list needs a good reason: nothing checks that it is true."""
    marked = [f"{block.file}: {block.language}, {block.reason}" for block in BLOCKS if block.reason]
    assert_expected_inline(
        "\n".join(marked),
        """\
docs/coming_from.md: python, needs a GPU
docs/coming_from.md: python, it starts a cluster
docs/coming_from.md: python, DTorch is not installed there
docs/scale.md: python, it starts a cluster
docs/scale.md: python, Monarch is not installed there""",
    )


def test_every_block_is_of_a_language_that_is_checked() -> None:
    """Python and C++ are run or compiled, commands checked, what a directive includes is code."""
    directives = {"{toctree}", "{include}", "{literalinclude}", "{eval-rst}"}
    for block in BLOCKS:
        assert block.language in {"python", "cpp", "sh", "cmake", "text", ""} | directives, block
        assert block.language != "cmake" or block.file in ELSEWHERE, block
        if block.language in ("text", ""):
            first = (block.code.split() or [""])[0]
            assert first not in COMMANDS, f"{block}: these are commands: call the block sh"


@pytest.mark.parametrize("file", ELSEWHERE)
def test_what_is_run_elsewhere_is(file: str) -> None:
    source = (ROOT / "tests" / ELSEWHERE[file]).read_text()
    assert f'"{Path(file).name}"' in source and "blocks" in source


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.reason and b.language == "python"], ids=str
)
def test_a_program_that_is_not_run_is_python(block: Block) -> None:
    ast.parse(block.code)


# ---- Python -------------------------------------------------------------------------------------


# Torch's own: that TorchScript is being retired; of its way to set up RPC.
TORCH_WARNS = ["`torch.jit", "You are using a Backend"]

HARNESS = """
import os, runpy, sys, warnings
os.chdir({folder!r})
for message in {ignored!r}:
    warnings.filterwarnings("ignore", message)
    sys.warnoptions.append("ignore:" + message)  # for processes that are started
runpy.run_path({program!r}, run_name="__main__")
"""


@pytest.mark.parametrize("block", run_here("python"), ids=str)
def test_a_program_says_what_it_should(tmp_path: Path, block: Block) -> None:
    program = tmp_path / "program.py"
    program.write_text(block.code)
    harness = HARNESS.format(folder=str(tmp_path), program=str(program), ignored=TORCH_WARNS)
    # Torch looks at that when it is imported, which the quick way has done before.
    check = helpers.check_python if "TORCH_CPP_LOG_LEVEL" in block.code else fresh.check
    said = check(harness, prelude="", timeout=90)
    if block.says is None:
        return
    lines, expected = said.splitlines(), block.says.splitlines()
    assert (sorted(lines) if block.in_any_order else lines) == expected


# ---- Commands -----------------------------------------------------------------------------------

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):.*##", MAKEFILE, re.MULTILINE))


def check_make(words: list[str], file: str) -> None:
    targets = [word for word in words if "=" not in word and not word.startswith("-")]
    assert targets and set(targets) <= TARGETS, f"make has no target {set(targets) - TARGETS}"


def check_pip(words: list[str], file: str) -> None:
    assert words[0] == "install"
    for word in words[1:]:
        if word == ".":
            assert (ROOT / "pyproject.toml").exists()
        elif not word.startswith("-"):
            Requirement(word)


def check_python(words: list[str], file: str) -> None:
    if words[:2] == ["-m", "pip"]:
        check_pip(words[2:], file)
    elif words[0] == "-m":
        assert importlib.util.find_spec(words[1]), f"there is no module {words[1]}"
    else:
        program = (ROOT / file).parent / words[0]
        assert program.exists() or (ROOT / words[0]).exists(), words[0]


def check_torchrun(words: list[str], file: str) -> None:
    from torch.distributed.run import parse_args

    assert (ROOT / parse_args(words).training_script).exists(), words


def check_cmake(words: list[str], file: str) -> None:
    assert file in ELSEWHERE, "nothing builds this"


COMMANDS = {
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
    "torchrun": check_torchrun,
    "cmake": check_cmake,
}


@pytest.mark.parametrize("block", of_language("sh"), ids=str)
def test_a_command_can_be_given(block: Block) -> None:
    """Most would take minutes, or install something: what they name is there."""
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        if words:
            assert words[0] in COMMANDS, f"{line}: nothing tests this: mark the block"
            COMMANDS[words[0]](words[1:], block.file)


# ---- C++ ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", run_here("cpp"), ids=str)
def test_a_cpp_block_compiles(tmp_path: Path, block: Block) -> None:
    from torch.utils.cpp_extension import include_paths

    (tmp_path / "block.cpp").write_text(block.code)
    includes = [*include_paths(), str(Path(dtorch_ops.__file__).parent / "include")]
    compiler = shutil.which("c++")
    assert compiler, "c++ was not found"
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", *(f"-I{i}" for i in includes), "block.cpp"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr


# ---- The pages ----------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    """As ``make docs`` does it: a link that leads nowhere, or a page that nobody finds, is one."""
    command = re.search(r"\$\(BIN\)/python (-m sphinx .*) docs build/docs", MAKEFILE)
    assert command
    done = subprocess.run(
        [sys.executable, *command[1].split(), str(ROOT / "docs"), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert (tmp_path / "index.html").exists()


def reference(page: str) -> set[str]:
    text = (ROOT / "docs" / "reference" / page).read_text()
    return set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))


def test_the_reference_has_every_public_name() -> None:
    assert reference("python.md") | reference("errors.md") == set(dtorch_ops.__all__)
    assert reference("functional.md") == set(dtorch_ops.functional.__all__)


def test_the_reference_has_every_operator() -> None:
    table = (ROOT / "docs" / "reference" / "operators.md").read_text()
    named = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|(.+?)\|", table, re.MULTILINE))))
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    assert named == {name[8:] for name in names if name.startswith("dtorch::")}


LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)|<img [^>]*src=\"([^\":]+)\"")


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "csrc/README.md"])
def test_a_link_leads_somewhere(name: str) -> None:
    """Sphinx sees to those of the pages."""
    file = ROOT / name
    for link in LINK.findall(file.read_text()):
        assert (file.parent / "".join(link)).exists(), link
