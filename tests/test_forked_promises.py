"""Promises, and tensors that were received, in forked children; and in children of other kinds."""

from __future__ import annotations

import textwrap

import pytest
from forked import PRODUCER, check, check_python

# ---- A child fulfils what it inherited ----------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "file"])
@pytest.mark.parametrize("leave", ["os._exit", "sys.exit"])
def test_a_child_fulfils_an_inherited_promise(mode: str, leave: str) -> None:
    check(
        f"""
        promise, future = pending(dtorch_ops.TensorPromise, {mode!r})
        other, failed = pending(dtorch_ops.TensorPromise, {mode!r})
        third, lent = pending(dtorch_ops.TensorPromise, {mode!r})
        void, done = pending(dtorch_ops.VoidPromise, {mode!r})
        small, operator = pending(dtorch_ops.TensorPromise, {mode!r})
        def child(link):
            assert promise.is_pending()
            promise.set_value(torch.arange(100_000.0))
            assert not promise.is_pending()
            late = error_of(lambda: promise.set_value(torch.ones(1)))
            assert type(late) is dtorch_ops.PromiseAlreadySatisfiedError
            other.set_exception(KeyError("of the child"))
            third.set_value(torch.ones(1000, out=third.empty(1000)))
            void.set_value()
            torch.ops.dtorch.get_tensor(torch.tensor(2.0), small)
        child = forked(child, leave={leave})
        assert torch.equal(value_of(future), torch.arange(100_000.0))
        assert error_of(lambda: value_of(failed)).args == ("of the child",)
        assert torch.equal(value_of(lent), torch.ones(1000))
        assert value_of(done) is None
        assert value_of(operator).item() == 2.0
        child.end()
        late = error_of(lambda: promise.set_value(torch.ones(1)))
        assert type(late) is dtorch_ops.PromiseAlreadySatisfiedError
        """
    )


def test_a_child_is_told_that_a_memory_promise_cannot_be_fulfilled_there() -> None:
    check(
        """
        promise, future = pending(dtorch_ops.TensorPromise, "memory")
        void, done = pending(dtorch_ops.VoidPromise, "memory")
        def child(link):
            for call in (
                lambda: promise.set_value(torch.ones(1)),
                lambda: promise.set_exception(KeyError()),
                lambda: torch.ops.dtorch.get_tensor(torch.ones(1), promise),
                lambda: promise.empty(3),
                lambda: pickle.dumps(promise),
                lambda: void.set_value(),
                lambda: torch.ops.dtorch.sync(void),
            ):
                for _ in range(2):
                    error = error_of(call)
                    assert isinstance(error, dtorch_ops.DTorchError), repr(error)
                    assert "memory" in str(error) and "fork" in str(error), error
        forked(child).end()
        assert promise.is_pending() and not future.is_ready()
        promise.set_value(torch.ones(1))
        void.set_value()
        value_of(future), value_of(done)
        """
    )


def test_the_first_of_parent_and_child_wins() -> None:
    check(
        """
        promises = [pending() for _ in range(200)]
        def race(winner):
            won = 0
            for promise, _ in promises:
                try:
                    promise.set_value(torch.tensor(winner))
                    won += 1
                except dtorch_ops.PromiseAlreadySatisfiedError:
                    pass
            return won
        def child(link):
            hear(link)
            say(link, str(race(1.0)).encode())
        children = [forked(child), forked(child)]
        for c in children:
            c.say()
        won = race(0.0) + sum(int(c.hear()) for c in children)
        for _, future in promises:
            assert value_of(future).item() in (0.0, 1.0)
        assert won == 200
        for c in children:
            c.end()
        """
    )


def test_a_thousand_pending_promises() -> None:
    check(
        """
        promises = [pending() for _ in range(1000)]
        def child(link):
            for index, (promise, _) in enumerate(promises):
                promise.set_value(torch.tensor(float(index)))
        child = forked(child)
        values = dtorch_ops.wait_all([future for _, future in promises], LIMIT * 1000)
        assert [v.item() for v in values] == [float(i) for i in range(1000)]
        child.end()
        assert dtorch_ops.stats()["outstanding"] == 0
        """
    )


def test_a_grandchild_fulfils_a_promise_whose_own_parent_has_gone() -> None:
    check(
        """
        promise, future = pending()
        def grandchild(link, above):
            hear(above)
            promise.set_value(torch.arange(1000.0))
        def child(link):
            forked(grandchild, link)
        child = forked(child)
        child.end()
        del promise
        child.say()
        assert torch.equal(value_of(future), torch.arange(1000.0))
        """
    )


@pytest.mark.parametrize("end", ["kill", "exit", "drop"])
def test_a_child_of_a_producer_inherits_what_that_has_unpickled(end: str) -> None:
    """From the fork on: it need not have touched it when its parent ends, or drops it."""
    check(
        f"""
        def grandchild(link, above, promise):
            hear(above)
            promise.set_value(torch.arange(1000.0))
        def child(link):
            promise = pickle.loads(hear(link))
            forked(grandchild, link, promise)
            if {end!r} == "kill":
                os.kill(os.getpid(), signal.SIGKILL)  # no destructor tells of what was handed on
            if {end!r} == "drop":
                del promise
                say(link)
                os.wait()
        child = forked(child)
        promise, future = pending()
        child.say(pickle.dumps(promise))
        if {end!r} == "drop":
            child.hear()
        else:
            child.end(-signal.SIGKILL if {end!r} == "kill" else 0)
            until(lambda: dtorch_ops.stats()["producers"] == 1)
        assert not future.is_ready()
        child.say()
        assert torch.equal(value_of(future), torch.arange(1000.0))
        if {end!r} == "drop":
            child.end()
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        """
    )


@pytest.mark.parametrize("end", ["kill", "exit", "drop", "exec"])
def test_it_breaks_with_the_last_child_of_its_producer(end: str) -> None:
    check(
        f"""
        def grandchild(link, above, held):
            hear(above)
            if {end!r} == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if {end!r} == "exec":
                above.setblocking(True)
                os.dup2(above.fileno(), 0)  # what tells it to end
                os.execv("/bin/cat", ["cat"])
            if {end!r} == "drop":
                held.clear()
                say(above)
                hear(above)
        def child(link):
            held = [pickle.loads(hear(link)) for _ in range(2)]
            held.append(held[0])
            forked(grandchild, link, held)
        child = forked(child)
        futures = []
        for cls in (dtorch_ops.TensorPromise, dtorch_ops.VoidPromise):
            promise, future = pending(cls)
            child.say(pickle.dumps(promise))
            futures.append(future)
        child.end()
        assert not any(f.is_ready() for f in futures)
        child.say()
        for future in futures:
            broken(future)
        if {end!r} == "drop":
            child.hear()
            child.say()
        else:
            until(lambda: dtorch_ops.stats()["producers"] == 0)
        """
    )


def test_a_producer_that_calls_exec_has_dropped_its_promises() -> None:
    """Its process lives on as something else, which knows nothing of them."""
    check(
        """
        def child(link):
            promise = pickle.loads(hear(link))
            say(link)
            hear(link)
            link.setblocking(True)
            os.dup2(link.fileno(), 0)
            os.execv("/bin/cat", ["cat"])  # until the link is closed
        child = forked(child)
        promise, future = pending()
        child.say(pickle.dumps(promise))
        child.hear()
        assert not future.is_ready()
        child.say()
        broken(future)
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        assert os.waitpid(child.pid, os.WNOHANG) == (0, 0), "exec has failed"
        child.link.close()
        child.end()
        """
    )


def test_a_producer_that_starts_programs_stays_the_only_one() -> None:
    check(
        """
        def child(link):
            promise = pickle.loads(hear(link))
            # One by vfork, one by a fork proper.
            programs = [subprocess.Popen(["cat"], stdin=subprocess.PIPE),
                        subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=lambda: None)]
            say(link)
            hear(link)
            del promise
            say(link)
            hear(link)
            for program in programs:
                program.communicate()
        child = forked(child)
        promise, future = pending()
        child.say(pickle.dumps(promise))
        child.hear()
        until(lambda: dtorch_ops.stats()["producers"] == 1)
        child.say()
        child.hear()
        broken(future)
        child.say()
        child.end()
        """
    )


def test_generations_of_producers() -> None:
    """Each forks the next, with a value of its own on the way, and ends."""
    check(
        """
        DEPTH = 5
        def descend(link, above, promises, lent, depth):
            if depth == DEPTH:
                hear(above)
                assert lent.sum().item() == 7 * 1000
                for promise in promises:
                    promise.set_value(torch.full((1000,), float(depth)))
                return
            if depth:
                promises.pop(0).set_value(torch.full((1000,), float(depth)))
            forked(descend, above, promises, lent, depth + 1)
        def child(link):
            promises = [pickle.loads(hear(link)) for _ in range(DEPTH + 1)]
            lent = promises[0].empty((1000,))
            lent.fill_(7)
            descend(link, link, promises, lent, 0)
        child = forked(child)
        futures = []
        for _ in range(DEPTH + 1):
            promise, future = pending()
            child.say(pickle.dumps(promise))
            futures.append(future)
        child.end()
        for depth in range(1, DEPTH):
            assert value_of(futures[depth - 1]).tolist() == [float(depth)] * 1000
        assert not futures[-1].is_ready() and not futures[-2].is_ready()
        child.say()
        for future in futures[DEPTH - 1:]:
            assert value_of(future).tolist() == [float(DEPTH)] * 1000
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        """
    )


def test_a_large_value_that_is_not_contiguous() -> None:
    """Torch's own threads for such a copy do not exist in the child."""
    check_python(
        """
        torch.set_num_threads(2)
        torch.ones(1000, 1000).t().contiguous()
        promise, future = pending()
        def child(link):
            signal.alarm(5)
            promise.set_value(torch.tensor(2.0).expand(1000, 1000))
            link.close()
        child = forked(child)
        child.end()
        child.link.close()
        assert value_of(future).sum().item() == 2_000_000
        """
    )


# ---- Both go on ---------------------------------------------------------------------------------


def test_parent_and_child_go_on_and_serve_each_other() -> None:
    check(
        """
        promise, future = pending()
        def child(link):
            for round in range(20):
                mine, its_future = pending()
                say(link, pickle.dumps(mine))          # the parent fulfils it
                assert value_of(its_future).item() == round
                given = pickle.loads(hear(link))       # one that the parent has made since
                given.set_value(torch.full((5000,), float(round)))
                own, own_future = pending()            # one that stays here
                own.set_value(torch.ones(1))
                own_future.get()
                inherited, its_future = pending()      # one for a child of its own
                def grandchild(link):
                    inherited.set_value(torch.tensor(7.0))
                forked(grandchild).end()
                assert value_of(its_future).item() == 7.0
            promise.set_value(torch.tensor(3.0))
        child = forked(child)
        for round in range(20):
            pickle.loads(child.hear()).set_value(torch.tensor(float(round)))
            mine, its_future = pending()
            child.say(pickle.dumps(mine))
            assert torch.equal(value_of(its_future), torch.full((5000,), float(round)))
        assert value_of(future).item() == 3.0
        child.end()
        """
    )


def test_a_child_that_drops_what_it_inherited_harms_nobody() -> None:
    check(
        """
        def producer(link):
            while data := hear(link):
                pickle.loads(data).set_value(torch.ones(100_000))
        producer = forked(producer)
        received = []
        for _ in range(3):
            promise, future = pending()
            producer.say(pickle.dumps(promise))
            received.append(value_of(future))
        inherited, its_future = pending()
        handed, handed_future = pending()
        token = pickle.dumps(handed)
        box = [promise, inherited, handed, its_future, handed_future, received]
        def child(link):
            global promise, inherited, handed, its_future, handed_future, received, future
            del promise, inherited, handed, its_future, handed_future, received, future
            box.clear()
            gc.collect()
        for leave in (os._exit, sys.exit):
            forked(child, leave=leave).end()
        for _ in range(20):
            again, future = pending()
            producer.say(pickle.dumps(again))
            assert value_of(future).sum().item() == 100_000
        assert all(torch.equal(tensor, torch.ones(100_000)) for tensor in received)
        assert not its_future.is_ready() and not handed_future.is_ready()
        inherited.set_value(torch.ones(1))
        value_of(its_future)
        producer.say(token)
        value_of(handed_future)
        producer.say(b"")
        producer.end()
        """
    )


def test_fork_in_a_thread_while_others_set_promises() -> None:
    check(
        """
        # What torch sets up at an operator's first use, in one thread, is never set up in a child
        # that is forked by another meanwhile: that child hangs at its own first use.
        assert torch.equal(torch.arange(1000.0), torch.arange(1000.0))
        assert torch.ones(1000).sum().item() == 1000
        stop = threading.Event()
        errors = []
        sys.setswitchinterval(1e-5)
        def producer(link):
            while data := hear(link):
                pickle.loads(data).set_value(torch.ones(1000))
        lock = threading.Lock()
        producer = forked(producer)
        def hammer():
            try:
                while not stop.is_set():
                    local, local_future = pending()
                    remote, remote_future = pending()
                    with lock:
                        producer.say(pickle.dumps(remote))
                    local.set_value(torch.ones(1))
                    local_future.get()
                    assert value_of(remote_future).sum().item() == 1000
            except BaseException as error:
                errors.append(error)
        threads = [threading.Thread(target=hammer) for _ in range(2)]
        def fork_often():
            try:
                for _ in range(30):
                    promise, future = pending()
                    def child(link):
                        promise.set_value(torch.arange(1000.0))
                        mine, its_future = pending()
                        pickle.dumps(mine)
                        mine.set_value(torch.ones(1))
                        its_future.get()
                    child = forked(child)
                    assert torch.equal(value_of(future), torch.arange(1000.0))
                    child.end()
            except BaseException as error:
                errors.append(error)
        forker = threading.Thread(target=fork_often)
        for thread in [*threads, forker]:
            thread.start()
        forker.join(30)
        assert not forker.is_alive(), "the forks hang"
        stop.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert not errors, errors
        producer.say(b"")
        producer.end()
        """
    )


def test_a_fork_gives_no_warning() -> None:
    """Every warning is an error in these scripts, but for Python's own of forks beside threads."""
    check(
        """
        assert any(action == "error" for action, *_ in warnings.filters)
        promise, future = pending()
        pickle.dumps(promise)
        def child(link):
            promise.set_value(torch.ones(1))
        forked(child).end()
        value_of(future)
        process = multiprocessing.get_context("fork").Process(target=print, args=(promise,))
        process.start()
        process.join()
        assert process.exitcode == 0
        """
    )


# ---- A child that ends without a value ----------------------------------------------------------

ENDS = {
    "return": "leave=sys.exit",
    "os._exit": "leave=os._exit",
    "kill": "leave=lambda _: os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("dropped", ["before", "after"])
def test_the_last_child_that_ends_breaks_what_its_parent_has_dropped(
    end: str, dropped: str
) -> None:
    check(
        f"""
        promise, future = pending()
        void, done = pending(dtorch_ops.VoidPromise)
        def child(link):
            hear(link)
        first, second = forked(child, {ENDS[end]}), forked(child, {ENDS[end]})
        code = -signal.SIGKILL if {end!r} == "kill" else 0
        if {dropped!r} == "before":
            del promise, void
        first.say()
        first.end(code)
        assert not future.is_ready() and not done.is_ready()
        second.say()
        second.end(code)
        if {dropped!r} == "after":
            del promise, void
        broken(future)
        broken(done)
        assert dtorch_ops.stats()["outstanding"] == 0
        """
    )


@pytest.mark.parametrize("touched", [False, True], ids=["untouched", "touched"])
@pytest.mark.parametrize("end", ENDS)
def test_what_the_parent_still_holds_stays_pending(end: str, touched: bool) -> None:
    """To have it at hand, or to look at it, is not to have been given it."""
    check(
        f"""
        promise, future = pending()
        dropped, told = pending()
        def child(link):
            assert dropped.is_pending()
            if {touched}:
                assert promise.is_pending()
            say(link)
            hear(link)
        child = forked(child, {ENDS[end]})
        child.hear()
        del dropped
        child.say()
        child.end(-signal.SIGKILL if {end!r} == "kill" else 0)
        # The end of the child has been noticed, as inheritor and as producer.
        broken(told)
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        assert promise.is_pending() and not future.is_ready()
        promise.set_value(torch.ones(1))
        assert value_of(future).item() == 1.0
        """
    )


@pytest.mark.parametrize("end", ["return", "raise SystemExit(3)", "os._exit(0)", "os.kill"])
def test_a_process_that_was_given_a_promise_breaks_it(end: str) -> None:
    """Though the parent still has it, and the child has never touched it."""
    statement = "os.kill(os.getpid(), signal.SIGKILL)" if end == "os.kill" else end
    check(
        f"""
        def child(promise, link):
            hear(link)
            {statement}
        given, future = pending()
        mine, its_future = pending()
        ours, theirs = socket.socketpair()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=child, args=(given, theirs))
        process.start()
        ours.sendall((1).to_bytes(4, "little") + b".")
        broken(future)
        process.join()
        late = error_of(lambda: given.set_value(torch.ones(1)))
        assert type(late) is dtorch_ops.PromiseAlreadySatisfiedError
        assert not its_future.is_ready()
        mine.set_value(torch.ones(1))
        value_of(its_future)
        """
    )


ARGUMENTS = {
    "positional": "dict(args=(promise,))",
    "keyword": "dict(kwargs={'promise': promise})",
    "list": "dict(args=([1, promise],))",
    "tuple in a list": "dict(args=([(promise, 2)],))",
    "dict": "dict(args=({'p': promise},))",
    "dict in kwargs": "dict(kwargs={'promise': {'p': [promise]}})",
    "set": "dict(args=({promise},))",
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS.keys())
def test_promises_within_the_arguments_of_a_process(arguments: str) -> None:
    check(
        f"""
        context = multiprocessing.get_context("fork")
        def nothing(promise):
            pass
        def find(value):
            if isinstance(value, dtorch_ops.TensorPromise):
                return value
            return find([v for v in (value.values() if isinstance(value, dict) else value)
                         if not isinstance(v, int)][0])
        def fulfil(promise):
            find(promise).set_value(torch.ones(1))
        for target in (nothing, fulfil):
            promise, future = pending()
            process = context.Process(target=target, **{arguments})
            process.start()
            process.join()
            assert process.exitcode == 0
            if target is fulfil:
                assert value_of(future).item() == 1.0
            else:
                broken(future)
        """
    )


def test_pools_and_queues_of_forked_processes() -> None:
    check(
        """
        context = multiprocessing.get_context("fork")
        def work(promise, value):
            promise.set_value(torch.full((2000,), value))
        promises = [pending() for _ in range(50)]
        with context.Pool(2) as pool:
            pool.starmap(work, [(p, float(i)) for i, (p, _) in enumerate(promises)])
            for index, (_, future) in enumerate(promises):
                assert torch.equal(value_of(future), torch.full((2000,), float(index)))
        queue = context.SimpleQueue()
        def take():
            while (promise := queue.get()) is not None:
                work(promise, 5.0)
        process = context.Process(target=take)
        process.start()
        promises = [pending() for _ in range(50)]
        for promise, _ in promises:
            queue.put(promise)
        queue.put(None)
        for _, future in promises:
            assert value_of(future)[0].item() == 5.0
        process.join()
        """
    )


# ---- Tensors that were received -----------------------------------------------------------------


def test_a_tensor_that_a_child_has_inherited_keeps_its_value() -> None:
    """Its memory is used again when the child has ended, and no sooner."""
    check(
        PRODUCER
        + textwrap.dedent("""
        kept = [receive() for _ in range(4)]
        def child(link):
            hear(link)
            for index, tensor in enumerate(kept):
                assert torch.equal(tensor, torch.full((50_000,), index + 1.0))
            say(link)
            hear(link)
            for index, tensor in enumerate(kept):
                assert torch.equal(tensor, torch.full((50_000,), index + 1.0))
        child = forked(child)
        kept.clear()
        gc.collect()
        for _ in range(300):
            receive()
        child.say()
        child.hear()
        for _ in range(100):
            receive()
        # What came after the fork is used again all the while.
        assert producer_stats()["live_bytes"] < 10 * 50_000 * 4
        assert producer_stats()["live_bytes"] >= 4 * 50_000 * 4
        before = dtorch_ops.stats()["memory_bytes"]
        child.say()
        child.end()
        until(lambda: producer_stats()["live_bytes"] == 0)
        for _ in range(100):
            receive()
        assert dtorch_ops.stats()["memory_bytes"] <= before
        producer.say(b"")
        producer.end()
        """)
    )


def test_children_of_children_keep_the_memory_of_tensors_too() -> None:
    check(
        PRODUCER
        + textwrap.dedent("""
        kept = receive()
        def grandchild(link, above):
            hear(above)
            assert torch.equal(kept, torch.ones(50_000))
            say(above)
        def child(link):
            forked(grandchild, link)
        child = forked(child)
        child.end()
        del kept
        for _ in range(100):
            receive()
        child.say()
        child.hear()
        until(lambda: producer_stats()["live_bytes"] == 0)
        producer.say(b"")
        producer.end()
        """)
    )


def test_a_tensor_outlives_its_producer_in_a_child() -> None:
    check(
        PRODUCER
        + textwrap.dedent("""
        kept = receive()
        def child(link):
            hear(link)
            assert torch.equal(kept, torch.ones(50_000))
        child = forked(child)
        producer.say(b"")
        producer.end()
        del kept
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        child.say()
        child.end()
        """)
    )


# ---- Children of other kinds --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_of_a_process_with_outstanding_promises(method: str) -> None:
    """They are producers of what they are given, and of nothing else."""
    check_python(
        f"""
        import producers
        promise, future = pending()
        given, its_future = pending()
        handed, never = pending()
        context = multiprocessing.get_context({method!r})
        process = context.Process(target=producers.set_first_drop_second, args=(given, handed))
        process.start()
        assert value_of(its_future).item() == 1.0
        broken(never)
        process.join()
        assert not future.is_ready()
        del promise
        broken(future)
        """
    )


@pytest.mark.parametrize("start", ["plain", "preexec_fn", "exec in a forked child"])
def test_a_program_that_a_child_has_started_keeps_nothing_alive(start: str) -> None:
    check(
        f"""
        promise, future = pending()
        exported, its_future = pending()
        def none(link):
            pass
        forked(none).end()  # all are outstanding elsewhere now
        if {start!r} == "exec in a forked child":
            read, write = os.pipe()
            def execute(link):
                os.dup2(read, 0)
                os.execvp("cat", ["cat"])
            cat = forked(execute)
        else:
            hook = (lambda: None) if {start!r} == "preexec_fn" else None
            cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=hook)
        def child(link):
            hear(link)
        sibling = forked(child)
        del promise, exported
        sibling.say()
        sibling.end()
        broken(future)
        broken(its_future)
        assert os.waitpid(cat.pid, os.WNOHANG) == (0, 0), "the program still runs"
        os.kill(cat.pid, signal.SIGKILL)
        if {start!r} == "exec in a forked child":
            cat.end(-signal.SIGKILL)
        else:
            cat.stdin.close()
            cat.wait()
        """
    )


def test_two_thousand_short_lived_workers_cost_no_more_than_one() -> None:
    check(
        """
        def counts():
            gc.collect()
            with open("/proc/self/maps") as maps:
                mappings = sum("memfd:dtorch_ops" in line for line in maps)
            with open("/proc/self/status") as status:
                resident = next(int(line.split()[1]) for line in status if line[:6] == "VmRSS:")
            return len(os.listdir("/proc/self/fd")), mappings, resident
        value = torch.ones(10_000)
        def worker(link, data, number):
            pickle.loads(data).set_value(value + number)
        def one(number):
            promise, future = pending()
            child = forked(worker, pickle.dumps(promise), number)
            assert value_of(future)[-1].item() == number + 1
            child.end()
            child.link.close()
        for number in range(50):
            one(number)
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        stats, (descriptors, mappings, resident) = dtorch_ops.stats(), counts()
        for number in range(2000):
            one(number)
        until(lambda: dtorch_ops.stats()["producers"] == 0)
        assert dtorch_ops.stats() == stats
        after = counts()
        assert after[:2] == (descriptors, mappings)
        assert after[2] <= resident + 4096, (resident, after[2])
        """,
        timeout=110,
    )


def test_memory_that_was_lent_keeps_its_value_in_a_child() -> None:
    check(
        """
        def grandchild(link, tensor):
            say(link)
            hear(link)
            assert tensor.unique().tolist() == [1.0]
        def child(link):
            first, second = pickle.loads(hear(link)), pickle.loads(hear(link))
            tensor = first.empty((1000,)).fill_(1)
            heir = forked(grandchild, tensor)
            heir.hear()
            del tensor
            second.set_value(torch.full((1250,), 7.0))  # of about that size
            heir.say()
            heir.end()
        child = forked(child)
        (first, _), (second, future) = pending(), pending()
        for promise in (first, second):
            child.say(pickle.dumps(promise))
        assert value_of(future)[0].item() == 7
        child.end()
        """
    )
