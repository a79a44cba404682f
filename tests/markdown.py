"""The blocks of code in the Markdown files of the project."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT

_FENCE = re.compile(r"^(`{3,})([^\n`]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"(?:#|//) not run by the tests: (.+)")
_WHERE = [
    "*.md",
    "benchmarks/README.md",
    "csrc/README.md",
    "examples/cpp/README.md",
    "docs/**/*.md",
]


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    file: str
    line: int
    language: str
    """The first word behind the fence: of a program its language, ``{name}`` of a directive."""
    code: str
    says: str | None = None
    """What the block ``text`` right behind it says that it prints."""
    in_any_order: bool = False
    """Whether that is marked ``text any order``: only the set of its lines counts."""

    @property
    def reason(self) -> str | None:
        """Why it cannot be run, which its first line tells a reader, too."""
        mark = _MARK.fullmatch(self.code.partition("\n")[0])
        return mark and mark[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks_of(file: Path) -> list[Block]:
    """The blocks of one file, in their order."""
    text = file.read_text()
    found: list[Block] = []
    end = 0
    for fence in _FENCE.finditer(text):
        language, *flags = fence[2].split() or [""]
        if language == "text" and found and not text[end : fence.start()].strip():
            program = found.pop()
            found.append(
                Block(
                    program.file,
                    program.line,
                    program.language,
                    program.code,
                    says=fence[3],
                    in_any_order=flags == ["any", "order"],
                )
            )
        else:
            line = text.count("\n", 0, fence.start()) + 1
            found.append(Block(str(file.relative_to(ROOT)), line, language, fence[3]))
        end = fence.end()
    return found


def blocks() -> list[Block]:
    """Those of all documents that users and contributors read."""
    files = sorted({file for where in _WHERE for file in ROOT.glob(where)})
    return [block for file in files for block in blocks_of(file)]
