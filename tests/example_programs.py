"""What the tests of the examples share."""

from __future__ import annotations

import re

from helpers import ROOT

EXAMPLES = ROOT / "examples"


def numbers_in(stdout: str, pattern: str) -> list[float]:
    """The groups of the line that begins with ``pattern``, which there must be."""
    found = re.search(rf"^{pattern}", stdout, re.MULTILINE)
    assert found, f"no {pattern!r} in\n{stdout}"
    return [float(number) for number in found.groups()]


def check_refusal(code: object, stdout: str, stderr: str) -> None:
    """Of wrong arguments: one line."""
    assert code == 2
    assert stdout == ""
    assert re.fullmatch(r".*: error: .* \(see --help\)\n", stderr)


def check_answers(stdout: str, how: str, *, rounds: int, batch_size: int, outstanding: int) -> None:
    """Of the job of ``examples/pool``: that all was answered, rightly.

    ``how`` is what a worker was in the middle, "killed" say; empty if nothing happened to any.
    """
    batches = rounds * -(-450 // batch_size)
    assert numbers_in(stdout, r"asking: +(\d+) batches, (\d+) outst") == [batches, outstanding]
    assert numbers_in(stdout, r"answered: (\d+) batches, (\d+) images") == [batches, rounds * 450]
    if how:
        assert re.search(rf"^{how}: +worker ?[12], in the middle of a job$", stdout, re.MULTILINE)
        broken, unread = numbers_in(stdout, r"broken: +(\d+) promises .*; (\d+) more")
        assert broken >= 1
        assert numbers_in(stdout, r"repeated: (\d+) jobs") == [broken + unread]
    else:
        assert "broken" not in stdout
    p50, p99, most = numbers_in(
        stdout, r"latency: +p50 ([\d.]+) ms, p99 ([\d.]+) ms, at most ([\d.]+) ms"
    )
    assert 0 < p50 <= p99 <= most
    assert numbers_in(stdout, r"throughput: (\d+) batches/s, (\d+) images/s")[0] > 0
    by_workers, here = numbers_in(stdout, r"test accuracy: ([\d.]+) %, .* ([\d.]+) %")
    assert by_workers == here
    assert 95 < here <= 100
