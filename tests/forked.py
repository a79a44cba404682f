"""Scripts that fork: what they share. A child and its parent talk over a link.

``forked(function)`` runs ``function(link)`` in a child. The child ``say(link, data)`` and
``hear(link)``; the parent has ``say``, ``hear`` and ``end`` of what ``forked`` returns.
"""

from __future__ import annotations

import textwrap

import fresh
import helpers

_FORKED = """
import multiprocessing, pickle, socket, subprocess, traceback, warnings
# Python's own, of any fork beside threads.
warnings.filterwarnings("ignore", message=".*fork.*", category=DeprecationWarning)
warnings.filterwarnings("ignore", message="unclosed <socket", category=ResourceWarning)
LIMIT = 10

class Child:
    def __init__(self, pid, link):
        self.pid, self.link = pid, link
    def say(self, data=b"."):
        self.link.sendall(len(data).to_bytes(4, "little") + data)
    def hear(self):
        return hear(self.link)
    def end(self, expected=0):
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        assert code == expected, f"the child ended with {code}"

def say(link, data=b"."):
    link.sendall(len(data).to_bytes(4, "little") + data)

def hear(link):
    def read(count):
        data = b""
        while len(data) < count:
            more = link.recv(count - len(data))
            assert more, "the other end has gone"
            data += more
        return data
    return read(int.from_bytes(read(4), "little"))

def forked(function, *args, leave=os._exit):
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT)
    theirs.settimeout(LIMIT)
    pid = os.fork()
    if pid == 0:
        ours.close()
        signal.alarm(LIMIT)
        code = 1
        try:
            function(theirs, *args)
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        leave(code)
    theirs.close()
    return Child(pid, ours)

def error_of(call):
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("expected an error")

def broken(future):
    error = error_of(lambda: future.wait(LIMIT * 1000))
    assert type(error) is dtorch_ops.BrokenPromiseError, repr(error)

def pending(cls=dtorch_ops.TensorPromise, *args):
    promise = cls(*args)
    return promise, promise.get_future()

def value_of(future):
    return future.wait(LIMIT * 1000)

def until(condition):
    limit = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < limit, "it does not come true"
        time.sleep(0.005)
"""

#: A child that fulfils what it is told to, with tensors that are large and each another one.
PRODUCER = """
def producer(link):
    number = 0
    while data := hear(link):
        if data == b"stats":
            say(link, pickle.dumps(dtorch_ops.stats()))
            continue
        number += 1
        pickle.loads(data).set_value(torch.full((50_000,), float(number)))
producer = forked(producer)

def receive():
    promise, future = pending()
    producer.say(pickle.dumps(promise))
    return value_of(future)

def producer_stats():
    producer.say(b"stats")
    return pickle.loads(producer.hear())
"""


def check(code: str, *, runs: int = 1, timeout: float = 40) -> None:
    """Run a script in a process of its own that was forked before any thread was started."""
    fresh.check(_FORKED + textwrap.dedent(code), runs=runs, timeout=timeout)


def check_python(code: str) -> None:
    """Run a script in an interpreter of its own, which finds the modules of the tests."""
    prelude = "import sys\nsys.path.insert(0, 'tests')\n" + helpers.PRELUDE + _FORKED
    helpers.check_python(code, prelude=prelude)
