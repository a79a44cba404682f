"""What ``torch.distributed`` and this plugin make of each other's futures and promises.

Promises that go through RPC are in test_network.py: the two processes here are of one machine.
"""

from __future__ import annotations

import textwrap

import pytest
import torch.distributed
from helpers import check_python

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.rpc.is_available(),
    reason="this torch has no distributed package, or no RPC",
)

# ---- RPC ----------------------------------------------------------------------------------------

# Workers 0 and 1; what a call runs must be found by its name, in a module.
_PRELUDE = """
import asyncio, os, subprocess, sys, tempfile, threading, warnings
import torch
import torch.distributed.rpc as rpc
import dtorch_ops

warnings.filterwarnings("ignore", message="You are using a Backend")

def begin(rank, size, file):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method="file://" + file, rpc_timeout=20, _transports=["uv"], _channels=["basic"]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
"""
_CALLED = """
import io, sys, threading, torch, dtorch_ops
import torch.distributed.rpc as rpc

def doubled(x):
    return x * 2

def fails(x):
    sys.stderr = io.StringIO()  # where torch tells of it as well
    raise KeyError("of the callee")

@rpc.functions.async_execution
def later(x):
    promise = dtorch_ops.TensorPromise()
    threading.Timer(0.05, lambda: promise.set_value(x * 3)).start()
    return promise.get_future()

@rpc.functions.async_execution
def later_chained(x):
    promise = dtorch_ops.TensorPromise()
    threading.Timer(0.05, lambda: promise.set_value(x)).start()
    return promise.get_future().then(lambda f: f.value() + 1)

@rpc.functions.async_execution
def fails_later(x):
    promise = dtorch_ops.TensorPromise()
    threading.Timer(0.05, lambda: promise.set_exception(ValueError("of the promise"))).start()
    return promise.get_future()

def fulfil(promise, value):
    promise.set_value(torch.full((1000,), value))

def fulfil_through_operator(promise, value):
    torch.ops.dtorch.get_tensor(torch.full((1000,), value), promise)

def drop(promise):
    assert promise.is_pending()
"""

_ALONE = """
with tempfile.TemporaryDirectory() as folder:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with open(folder + "/called.py", "w") as file:
        file.write(called_source)
    sys.path.insert(0, folder)
    import called
    begin(0, 1, folder + "/store")
    body()
    rpc.shutdown()
"""
_TWO = """
with tempfile.TemporaryDirectory() as folder:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    with open(folder + "/called.py", "w") as file:
        file.write(called_source)
    sys.path.insert(0, folder)
    import called
    other = subprocess.Popen([sys.executable, "-c", prelude + f'''
sys.path.insert(0, {folder!r})
import called
begin(1, 2, {folder!r} + "/store")
rpc.shutdown()
'''])
    begin(0, 2, folder + "/store")
    body()
    rpc.shutdown()
    assert other.wait(20) == 0
"""


def run(body: str, *, two: bool = False) -> None:
    """Run ``body`` in a process that is worker 0, of one or of two."""
    source = (
        f"prelude = {_PRELUDE!r}\ncalled_source = {_CALLED!r}\n"
        + "def body():\n"
        + textwrap.indent(textwrap.dedent(body), "    ")
        + (_TWO if two else _ALONE)
    )
    check_python(source, prelude=_PRELUDE, timeout=60)


def test_the_future_of_a_call_can_be_awaited() -> None:
    run(
        """
        x = torch.ones(2)
        call = lambda function: rpc.rpc_async("worker0", function, args=(x,))
        async def main():
            assert (await call(called.doubled)).tolist() == [2, 2]
            both = await asyncio.gather(call(called.doubled), call(called.doubled))
            assert [t.tolist() for t in both] == [[2, 2], [2, 2]]
            assert (await asyncio.wait_for(call(called.later), 10)).tolist() == [3, 3]
            try:
                await call(called.fails)
            except RuntimeError as error:  # which torch's own wait makes of every error
                assert "KeyError" in str(error) and "of the callee" in str(error)
            else:
                raise AssertionError("an error became a value")
            chained = call(called.doubled).then(lambda f: f.wait() + 1)
            assert (await chained).tolist() == [3, 3]
        asyncio.run(main())
        """
    )


def test_the_future_of_a_call_in_groups_and_handles() -> None:
    run(
        """
        x = torch.ones(2)
        call = lambda function: rpc.rpc_async("worker0", function, args=(x,))
        promise = dtorch_ops.TensorPromise()
        ours = promise.get_future()
        futures = [call(called.later), ours, call(called.doubled)]
        group = dtorch_ops.collect_all(futures)
        promise.set_value(x)
        values = dtorch_ops.wait_all(futures, 10_000)
        assert [t.tolist() for t in values] == [[3, 3], [1, 1], [2, 2]]
        assert group.wait(10_000) == futures
        assert set(dtorch_ops.as_completed(futures, 10_000)) == set(futures)
        assert torch.ops.dtorch.wait_for(call(called.doubled), 10_000).tolist() == [2, 2]
        assert dtorch_ops.TensorFuture(call(called.later)).get().tolist() == [3, 3]
        assert [t.tolist() for t in torch.futures.wait_all(futures)] == [[3, 3], [1, 1], [2, 2]]
        for wait in (
            lambda f: dtorch_ops.Future(f).get(),
            lambda f: dtorch_ops.wait_all([f, dtorch_ops.TensorPromise().get_future()][:1]),
            lambda f: dtorch_ops.collect_all([f]).get(),
            lambda f: dtorch_ops.collect_any([f]).get(),
        ):
            try:
                wait(call(called.fails))
            except RuntimeError as error:
                assert "KeyError" in str(error) and "of the callee" in str(error)
            else:
                raise AssertionError("an error became a value")
        """
    )


def test_a_callee_returns_a_future_of_ours() -> None:
    """``rpc.functions.async_execution`` answers when it completes."""
    run(
        """
        x = torch.ones(2)
        assert rpc.rpc_sync("worker0", called.later, args=(x,)).tolist() == [3, 3]
        assert rpc.rpc_sync("worker0", called.later_chained, args=(x,)).tolist() == [2, 2]
        assert rpc.remote("worker0", called.later, args=(x,)).to_here().tolist() == [3, 3]
        try:
            rpc.rpc_sync("worker0", called.fails_later, args=(x,))
        except Exception as error:
            assert "of the promise" in str(error), error
        else:
            raise AssertionError("an error became a value")
        """
    )


def test_a_promise_is_an_argument_of_a_call() -> None:
    run(
        """
        for number, function in enumerate((called.fulfil, called.fulfil_through_operator)):
            promises = [dtorch_ops.TensorPromise() for _ in range(20)]
            futures = [promise.get_future() for promise in promises]
            calls = [
                rpc.rpc_async("worker1", function, args=(promise, float(number)))
                for promise in promises
            ]
            del promises
            for value in dtorch_ops.wait_all(futures, 10_000):
                assert value.unique().tolist() == [number]
            dtorch_ops.wait_all(calls, 10_000)
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        rpc.rpc_sync("worker1", called.drop, args=(promise,))
        try:
            future.wait(10_000)
        except dtorch_ops.BrokenPromiseError:
            pass
        else:
            raise AssertionError("it was dropped")
        # To the caller's own process.
        promise = dtorch_ops.TensorPromise()
        future = promise.get_future()
        rpc.rpc_async("worker0", called.fulfil, args=(promise, 5.0))
        assert future.wait(10_000).unique().tolist() == [5]
        """,
        two=True,
    )


# ---- Collectives --------------------------------------------------------------------------------

_GROUP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""


def test_the_future_of_a_collective() -> None:
    check_python(
        _GROUP
        + textwrap.dedent("""
        t = torch.ones(3)
        start = lambda: dist.all_reduce(t, async_op=True).get_future()
        async def main():
            return await asyncio.wait_for(start(), 20)
        assert asyncio.run(main())[0].tolist() == [1, 1, 1]
        assert dtorch_ops.wait_all([start(), start()], 20_000)[1][0].tolist() == [1, 1, 1]
        assert dtorch_ops.Future(start()).then(lambda f: f.value()[0] + 1).get().tolist() == [2] * 3
        dist.destroy_process_group()
        """)
    )


def test_a_hook_of_data_parallel_training_returns_a_chain_of_ours() -> None:
    check_python(
        _GROUP
        + textwrap.dedent("""
        def trained(hook):
            layer = torch.nn.Linear(3, 1, bias=False)
            model = torch.nn.parallel.DistributedDataParallel(layer)
            model.register_comm_hook(None, hook)
            model(torch.ones(2, 3)).sum().backward()
            return layer.weight.grad.tolist()

        def later(state, bucket):
            promise = dtorch_ops.TensorPromise()
            threading.Timer(0.05, promise.set_value, (bucket.buffer() * 3,)).start()
            return promise.get_future().then(lambda f: f.value())

        def fails(state, bucket):
            promise = dtorch_ops.TensorPromise()
            promise.set_exception(KeyError("of the hook"))
            return promise.get_future().then(lambda f: f.value())

        assert trained(later) == [[6, 6, 6]]
        try:
            trained(fails)
        except Exception as error:
            assert "of the hook" in str(error), error
        else:
            raise AssertionError("an error became a gradient")
        dist.destroy_process_group()
        """)
    )
