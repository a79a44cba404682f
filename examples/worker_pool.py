"""Two worker processes predict digits for a controller that awaits them, and one is killed.

The second example of dtorch_ops. Promises travel to other processes, and tensors come back through
shared memory. Four files show it:

* ``pool/worker.py``: what a worker does with the promises that it is sent.
* ``pool/contact.py``: what the controller awaits of a worker, and what ends that.
* ``pool/process.py``: how the controller learns that a worker is dead.
* ``pool/pool.py``: how the jobs of a dead worker get to another one.
"""

from __future__ import annotations

import asyncio
import time

import torch
from pool.asking import Answers, ask, report
from pool.job import Work, check, fail, prepare
from pool.options import Options, parse_options
from pool.pool import WorkersEndedError, open_pool

WORKERS = 2


async def ask_workers(work: Work, options: Options) -> Answers:
    start = time.perf_counter()
    async with open_pool(WORKERS, work.network, work.images) as pool:
        print(f"workers:  {WORKERS} processes, ready after {time.perf_counter() - start:.1f} s")
        return await ask(pool, work.batches * options.rounds, options.outstanding)


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the images are so small that threads would only wait for each other

    work = prepare(options)
    try:
        answers = asyncio.run(ask_workers(work, options))
    except WorkersEndedError as error:
        fail(error)
    report(answers, "killed")
    check(answers, work)


if __name__ == "__main__":
    main()
