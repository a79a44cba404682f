"""Workers on two hosts predict digits for a controller on a third, and one host is lost.

The job of ``worker_pool.py``, with promises that go through ``torch.distributed.rpc``. What is
different when the workers are far away:

* ``hosts/remote.py``: how jobs get to a worker, and how the controller learns that it is lost.
* ``hosts/serving.py``: how a worker is given jobs, and learns that the controller is lost.

As it is, the program makes the hosts itself, of network namespaces, which takes root; without, it
runs on the loopback (``hosts/demonstration.py``). On real hosts, on each of them::

    torchrun --nnodes=3 --node-rank=N --master-addr=HOST_0 --master-port=29500 examples/cluster.py

with N from 0, where the controller runs. Where a host has several networks, TP_SOCKET_IFNAME and
GLOO_SOCKET_IFNAME name the interface, for RPC and for its start; TORCH_CPP_LOG_LEVEL=ERROR silences
TensorPipe, which warns of every connection that ends. Pull a cable meanwhile, or have --cut do it.
torchrun itself waits up to five minutes for a host that is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time

import torch
from hosts.demonstration import demonstrate
from hosts.options import Options, parse_options
from hosts.remote import RemoteWorker
from hosts.serving import serve
from pool.asking import Answers, ask, report
from pool.job import Work, check, fail, prepare
from pool.pool import WorkerPool, WorkersEndedError, all_ready

import dtorch_ops


async def control(options: Options) -> tuple[Work, Answers]:
    async with contextlib.AsyncExitStack() as stack:
        start = time.perf_counter()
        workers: list[RemoteWorker] = []
        for rank in range(1, int(os.environ["WORLD_SIZE"])):
            workers.append(await RemoteWorker.reach(f"worker{rank}", options.mode, options.cut))
            stack.push_async_callback(workers[-1].close)
        print(f"workers:  on {len(workers)} hosts, met after {time.perf_counter() - start:.1f} s")

        work = await asyncio.to_thread(prepare, options.job)
        for worker in workers:
            worker.give(work.network, work.images)
        await all_ready(workers)
        batches, outstanding = work.batches * options.job.rounds, options.job.outstanding
        kill_one = options.cut is not None
        answers = await ask(WorkerPool(workers), batches, outstanding, kill_one=kill_one)
        return work, answers


def main() -> None:
    options = parse_options()
    if "RANK" not in os.environ:
        sys.exit(demonstrate(options, [__file__, *sys.argv[1:]]))

    if os.environ["WORLD_SIZE"] == "1":
        fail("expected workers besides the controller: --nnodes=2 or more")
    torch.set_num_threads(1)  # the images are so small that threads would only wait for each other
    is_controller = os.environ["RANK"] == "0"
    dtorch_ops.network.init("controller" if is_controller else None, lost_after=options.lost_after)
    try:
        if is_controller:
            work, answers = asyncio.run(control(options))
        else:
            serve()
    except (WorkersEndedError, dtorch_ops.BrokenPromiseError) as error:
        fail(error)
    finally:
        # Not graceful: that waits for all, and one may be lost.
        dtorch_ops.network.shutdown(graceful=False)
    if is_controller:
        report(answers, "lost")
        check(answers, work)


if __name__ == "__main__":
    main()
