"""The programs of README.md run as shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SAYS = [
    "['3.00', '1.92', '1.23', '0.79', '0.50']\n",
    "tensor([0., 0.])\ntensor([2., 2.])\ntensor([4., 4.])\ntensor([1.])\n",
    "tensor([0., 1., 2.])\n",
]


@pytest.mark.parametrize(("program", "says"), list(zip(PROGRAMS, SAYS, strict=True)))
def test_a_program_says_what_it_should(tmp_path: Path, program: str, says: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(program)
    ended = subprocess.run(
        [sys.executable, "-W", "error", file], capture_output=True, text=True, timeout=90, cwd=ROOT
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, says, "")
