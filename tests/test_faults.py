"""Processes that are stopped or killed at every step of the protocol of the shared memory.

Whatever becomes of one, the others come to an end with all that they wait for: a value that is
whole, or a broken promise. Then nothing is left of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from shm_programs import Peer, peers, program

# The programs are built first.
pytestmark = pytest.mark.timeout(300)

INLINE, BLOCK, LARGE = 100, 100_000, 64 << 20

# Where a producer is stopped or killed: while it does what, at which of its steps. If it is killed
# there, the promise is as if "nobody" had ever held it, or "broken", or the "value" is safe.
STEPS = {
    ("hold", "opening"): "nobody",
    ("hold", "opened"): "nobody",
    ("hold", "lane claimed"): "nobody",
    ("hold", "lane announced"): "nobody",
    ("hold", "ringing"): "nobody",
    ("hold", "rung"): "nobody",
    ("hold", "holding"): "nobody",
    ("hold", "hold stored"): "broken",
    ("hold", "held"): "broken",
    ("set", "claimed"): "broken",
    ("set", "block taken"): "broken",
    ("set", "prepared"): "broken",
    ("set", "half written"): "broken",
    ("set", "written"): "broken",
    ("set", "published"): "value",
    ("set", "bit set"): "value",
    ("set", "ringing"): "value",
    ("set", "rung"): "value",
    ("set", "bell increased"): "value",
    ("drop", "dropping"): "broken",
    ("drop", "hold dropped"): "broken",
    ("drop", "ringing"): "broken",
    ("drop", "rung"): "broken",
    ("pass", "handing over"): "nobody",
}
# If it does not fit into the slot; if a thread waits for the promise, or if none does.
NOT_ALWAYS = {
    ("set", "block taken"),
    ("set", "bell increased"),
    ("set", "ringing"),
    ("set", "rung"),
}

# Who waits: the listening thread, a thread for this promise, or one with a time limit.
WAITERS = ("listener", "thread", "limited thread")
LIMIT_MS = 30

steps = pytest.mark.parametrize(
    ("doing", "point"), STEPS, ids=[f"{doing}-{point}" for doing, point in STEPS]
)
ends = pytest.mark.parametrize("how", ["kill", "stop", "stop and kill"])


class Round:
    """One promise of a consumer."""

    def __init__(self, consumer: Peer, waiter: str) -> None:
        self.consumer = consumer
        _, self.id, self.token = consumer.ask("make", "made").split()
        self._outcome: str | None = None
        self.is_limited = waiter == "limited thread"
        if waiter != "listener":
            consumer.tell(f"wait {self.id} {LIMIT_MS if self.is_limited else -1}")
            consumer.hear(f"waiting {self.id}")

    def outcome(self) -> str:
        """What the promise came to in the end: "broken", or "value BYTES SEED"."""
        if self._outcome is None:
            self._outcome = self._hear("value", "broken", "torn")
        return self._outcome

    def wait_until_late(self) -> bool:
        """Whether the waiter's time is over before there is an outcome."""
        heard = self._hear("late", "value", "broken", "torn")
        if heard != "late":
            self._outcome = heard
        return heard == "late"

    def _hear(self, *kinds: str) -> str:
        kind, _, *rest = self.consumer.hear(*(f"{kind} {self.id}" for kind in kinds)).split()
        assert kind != "torn", rest
        return " ".join([kind, *rest])

    def set_by(self, producer: Peer, size: int, seed: int) -> str:
        answers = ("set", "refused", "given up", "orphaned")
        return producer.ask(f"set {self.token} {size} {seed}", *answers)


def check_that_nothing_is_left(consumer: Peer, start: dict[str, int]) -> None:
    """No producer lives."""
    assert consumer.ask("forget", "spoiled") == "spoiled 0"
    left = consumer.numbers("settle 0")
    assert left.pop("memory") <= start["memory"] + (64 << 10)
    assert left == {name: value for name, value in start.items() if name != "memory"}


@pytest.fixture(autouse=True)
def nothing_is_left_in_dev_shm() -> Iterator[None]:
    yield
    assert [name for name in os.listdir("/dev/shm") if "dtorch" in name] == []


@pytest.fixture
def consumer() -> Iterator[Peer]:
    with peers("consumer") as [consumer]:
        yield consumer


def settled(consumer: Peer) -> dict[str, int]:
    """What a consumer has when it has had a producer."""
    with peers("producer") as [producer]:
        round = Round(consumer, "listener")
        producer.ask(f"hold {round.token}", "holds")
        round.set_by(producer, BLOCK, 1)
        round.outcome()
    consumer.ask("forget", "spoiled")
    return consumer.numbers("settle 0")


# ---- One producer -------------------------------------------------------------------------------


def command(doing: str, token: str, size: int) -> str:
    return f"{doing} {token}" + (f" {size} 7" if doing == "set" else "")


ANSWERS = {"hold": "holds", "set": "set", "drop": "dropped", "pass": "passed"}


def check_the_whole(doing: str, producer: Peer, round: Round, size: int) -> None:
    """What was to be done has been done: it ends as if nothing had happened."""
    if doing in ("hold", "pass"):
        assert round.set_by(producer, size, 7) == "set"
    assert round.outcome() == ("broken" if doing == "drop" else f"value {size} 7")


def fail_once(consumer: Peer, doing: str, point: str, how: str, waiter: str, size: int) -> bool:
    """One round. Whether the producer has come to `point`."""
    then = STEPS[doing, point]
    with peers("producer", "producer") as [producer, heir]:
        round = Round(consumer, waiter)
        if doing != "hold":
            producer.ask(f"hold {round.token}", "holds")
        producer.arm(how.split()[0], point)
        consumer.ask("idle", "idle")
        producer.tell(command(doing, round.token, size))
        caught = producer.until_caught()
        if caught == ANSWERS[doing]:
            assert (doing, point) in NOT_ALWAYS, f"{point} was not passed"
            check_the_whole(doing, producer, round, size)
            return False
        assert caught == ("killed" if how == "kill" else "stopped")
        if caught == "stopped":
            # It counts as alive, and the waiter's time ends nevertheless.
            if round.is_limited and round.wait_until_late():
                assert then != "value", "it was there to be seen"
            if how == "stop":
                producer.go_on()
                producer.hear(ANSWERS[doing])
                check_the_whole(doing, producer, round, size)
                return True
            producer.kill()
        if then == "nobody":
            # Whoever gets the token is in time.
            heir.ask(f"hold {round.token}", "holds")
            assert round.set_by(heir, size, 8) == "set"
            assert round.outcome() == f"value {size} 8"
        else:
            assert round.outcome() == (f"value {size} 7" if then == "value" else "broken")
    return True


@ends
@steps
def test_a_producer_that_fails_at_any_step(consumer, doing, point, how):
    start = settled(consumer)
    passed = 0
    for waiter, size in itertools.product(WAITERS, (INLINE, BLOCK)):
        passed += fail_once(consumer, doing, point, how, waiter, size)
        check_that_nothing_is_left(consumer, start)
    assert passed


# ---- Two producers ------------------------------------------------------------------------------


@ends
@steps
def test_another_producer_holds_the_promise_meanwhile(consumer, doing, point, how):
    start = settled(consumer)
    then = STEPS[doing, point]
    for waiter, end in itertools.product(WAITERS, ("set", "drop", "kill")):
        with peers("producer", "producer") as [producer, other]:
            round = Round(consumer, waiter)
            other.ask(f"hold {round.token}", "holds")
            if doing != "hold":
                producer.ask(f"hold {round.token}", "holds")
            producer.arm(how.split()[0], point)
            consumer.ask("idle", "idle")
            producer.tell(command(doing, round.token, BLOCK))
            caught = producer.until_caught()
            if caught == "stopped" and how == "stop and kill":
                producer.kill()
                caught = "killed"
            if caught == "stopped":
                # Whoever has claimed it is in time; else the other one is.
                claims = doing == "set"
                assert round.set_by(other, INLINE, 8) == ("refused" if claims else "set")
                producer.go_on()
                producer.hear(ANSWERS[doing])
                assert round.outcome() == (f"value {BLOCK} 7" if claims else f"value {INLINE} 8")
                if not claims and doing != "drop":
                    assert round.set_by(producer, BLOCK, 7) == "refused"
            elif then == "value" or caught == "set":
                assert round.set_by(other, INLINE, 8) == "refused"
                assert round.outcome() == f"value {BLOCK} 7"
            else:
                # As if there had never been another one, once it is known to be dead.
                if caught == "killed":
                    consumer.numbers("settle 1")
                if end == "set":
                    assert round.set_by(other, INLINE, 8) == "set"
                    assert round.outcome() == f"value {INLINE} 8"
                elif end == "drop":
                    other.ask(f"drop {round.token}", "dropped")
                else:
                    other.kill()
                if end != "set" and (doing, point) == ("pass", "handing over"):
                    # On its way: nobody knows whether to a third one.
                    assert consumer.ask(f"unwant {round.id}", "unwanted") == "unwanted 1"
                elif end != "set":
                    assert round.outcome() == "broken"
        check_that_nothing_is_left(consumer, start)


# ---- A producer that forks ----------------------------------------------------------------------

child_steps = pytest.mark.parametrize(
    "point", ["lane claimed", "lane announced", "holds taken over"]
)


def stopped_child_of(producer: Peer) -> int:
    """Its number, once it is: nobody can wait for another one's child."""
    children = Path(f"/proc/{producer.pid}/task/{producer.pid}/children").read_text().split()
    limit = time.monotonic() + 20
    while Path(f"/proc/{children[0]}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        assert time.monotonic() < limit, "it does not stop"
        time.sleep(0.001)
    return int(children[0])


@pytest.mark.parametrize("size", [INLINE, BLOCK])
@pytest.mark.parametrize("waiter", ["listener", "thread"])
def test_a_producer_is_killed_in_the_middle_of_a_fork(consumer, waiter, size):
    start = settled(consumer)
    with peers("producer") as [producer]:
        round = Round(consumer, waiter)
        producer.ask(f"hold {round.token}", "holds")
        producer.arm("kill", "forked")
        producer.tell(f"fork {round.token} {size} 7")
        assert producer.hear("child") == "child set"
        assert round.outcome() == f"value {size} 7"
    check_that_nothing_is_left(consumer, start)


@child_steps
@pytest.mark.parametrize("then", ["set", "drop"])
def test_the_child_of_a_producer_is_killed_as_it_takes_over(consumer, point, then):
    start = settled(consumer)
    with peers("producer") as [producer]:
        round = Round(consumer, "listener")
        producer.ask(f"hold {round.token}", "holds")
        producer.arm("kill", point)
        producer.ask(f"fork {round.token} {BLOCK} 7", "forked")
        producer.ask(command(then, round.token, BLOCK), ANSWERS[then])
        assert round.outcome() == ("broken" if then == "drop" else f"value {BLOCK} 7")
    check_that_nothing_is_left(consumer, start)


def child_stopped_at(point: str, producer: Peer, round: Round) -> int:
    """Of a fork of a producer that holds the promise, which waits for it meanwhile."""
    producer.ask(f"hold {round.token}", "holds")
    producer.arm("stop", point)
    producer.tell(f"fork {round.token} {BLOCK} 7")
    producer.hear("stopping")
    return stopped_child_of(producer)


@child_steps
def test_a_producer_is_killed_while_its_child_is_stopped(consumer, point):
    """It is its parent's heir from the fork on, and lives: when it goes on it takes over."""
    start = settled(consumer)
    with peers("producer") as [producer]:
        round = Round(consumer, "listener")
        child = child_stopped_at(point, producer, round)
        os.kill(producer.pid, signal.SIGKILL)
        time.sleep(0.1)  # longer than the death of one that forks is doubted without a sign of life
        os.kill(child, signal.SIGCONT)
        assert producer.hear("child") == "child set"
        assert round.outcome() == f"value {BLOCK} 7"
    check_that_nothing_is_left(consumer, start)


@child_steps
def test_a_producer_and_its_stopped_child_are_killed(consumer, point):
    """Nobody is left who could take over, and nobody waits."""
    start = settled(consumer)
    with peers("producer") as [producer]:
        round = Round(consumer, "listener")
        child = child_stopped_at(point, producer, round)
        os.kill(producer.pid, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        assert round.outcome() == "broken"
    check_that_nothing_is_left(consumer, start)


# ---- The consumer -------------------------------------------------------------------------------

# Where it is stopped or killed: what makes it come there.
CONSUMER_STEPS = {
    "taken": "set",
    "armed": "drop",
    "waiter gone": "set",
    "breaking": "drop",
    "death seen": "kill",
    "claim given back": "kill",
    "freeing lane": "kill",
}
consumer_steps = pytest.mark.parametrize("point", CONSUMER_STEPS)


def provoke(producer: Peer, round: Round, doing: str, size: int, *others: str) -> None:
    if doing == "set":
        assert round.set_by(producer, size, 7) in ("set", *others)
    elif doing == "drop":
        producer.ask(f"drop {round.token}", "dropped")
    else:
        producer.arm("kill", "half written")
        producer.tell(command("set", round.token, size))
        assert producer.until_caught() == "killed"


@consumer_steps
def test_a_consumer_that_is_stopped_at_any_step(consumer, point):
    start = settled(consumer)
    doing = CONSUMER_STEPS[point]
    for waiter, size in itertools.product(WAITERS, (INLINE, BLOCK)):
        if point == "waiter gone" and waiter == "listener":
            continue
        with peers("producer", "producer", "producer") as [producer, second, third]:
            round, others = Round(consumer, waiter), [Round(consumer, waiter) for _ in "123"]
            for each in (round, others[0]):
                producer.ask(f"hold {each.token}", "holds")
            for each in others[1:]:
                second.ask(f"hold {each.token}", "holds")
            consumer.ask("idle", "idle")
            consumer.arm("stop", point)
            provoke(producer, round, doing, size)
            consumer.hear("stopping")
            consumer.until_stopped()
            # While it is stopped: a value, a death, and a newcomer.
            assert others[1].set_by(second, size, 8) == "set"
            second.arm("kill", "published")
            second.tell(command("set", others[2].token, size))
            assert second.until_caught() == "killed"
            third.ask(f"hold {others[0].token}", "holds")
            consumer.go_on()
            assert round.outcome() == (f"value {size} 7" if doing == "set" else "broken")
            assert others[1].outcome() == f"value {size} 8"
            assert others[2].outcome() == f"value {size} 7"
            producer.kill()
            third.kill()
            assert others[0].outcome() == "broken"
        check_that_nothing_is_left(consumer, start)


@pytest.mark.parametrize("point", ["waiter going", "waiter gone"])
def test_a_value_comes_while_a_waiter_leaves(consumer, point):
    start = settled(consumer)
    with peers("producer") as [producer]:
        # Attached before: nothing but the value is news.
        another = Round(consumer, "listener")
        producer.ask(f"hold {another.token}", "holds")
        for size in (INLINE, BLOCK):
            consumer.ask("idle", "idle")
            consumer.arm("pause", point)
            round = Round(consumer, "limited thread")
            consumer.hear("pausing")
            producer.ask(f"hold {round.token}", "holds")
            assert round.set_by(producer, size, 7) == "set"
            consumer.tell("resume")
            consumer.hear(f"late {round.id}")
            assert round.outcome() == f"value {size} 7"
        producer.kill()
        assert another.outcome() == "broken"
    check_that_nothing_is_left(consumer, start)


@pytest.mark.parametrize("stopped_at", ["hold stored", "half written", "bit set", "hold dropped"])
@consumer_steps
def test_both_are_stopped(consumer, point, stopped_at):
    start = settled(consumer)
    doing = next(doing for doing, step in STEPS if step == stopped_at)
    for waiter, first in itertools.product(WAITERS, ("producer", "consumer", "death")):
        if point == "waiter gone" and waiter == "listener":
            continue
        with peers("producer", "producer") as [producer, other]:
            round, another = Round(consumer, waiter), Round(consumer, waiter)
            other.ask(f"hold {another.token}", "holds")
            if doing != "hold":
                producer.ask(f"hold {round.token}", "holds")
            consumer.ask("idle", "idle")
            producer.arm("stop", stopped_at)
            producer.tell(command(doing, round.token, BLOCK))
            assert producer.until_caught() == "stopped"
            consumer.arm("stop", point)
            provoke(other, another, CONSUMER_STEPS[point], BLOCK)
            consumer.hear("stopping")
            consumer.until_stopped()
            if first == "death":
                producer.kill()
                consumer.go_on()
                then = STEPS[doing, stopped_at]
                assert round.outcome() == (f"value {BLOCK} 7" if then == "value" else then)
                continue
            for each in (producer, consumer) if first == "producer" else (consumer, producer):
                each.go_on()
            producer.hear(ANSWERS[doing])
            check_the_whole(doing, producer, round, BLOCK)
            assert another.outcome().startswith(
                "value" if CONSUMER_STEPS[point] == "set" else "broken"
            )
        check_that_nothing_is_left(consumer, start)


@pytest.mark.parametrize("stopped_at", [None, "hold stored", "half written", "published"])
@consumer_steps
def test_the_consumer_is_killed(point, stopped_at):
    for waiter in WAITERS:
        if point == "waiter gone" and waiter == "listener":
            continue
        with peers("consumer", "producer", "producer") as [consumer, producer, other]:
            before = producer.numbers("stats")
            rounds = [Round(consumer, waiter) for _ in range(3)]
            producer.ask(f"hold {rounds[1].token}", "holds")
            other.ask(f"hold {rounds[0].token}", "holds")
            consumer.ask("idle", "idle")
            if stopped_at:
                doing = next(doing for doing, step in STEPS if step == stopped_at)
                if doing != "hold":
                    producer.ask(f"hold {rounds[2].token}", "holds")
                producer.arm("stop", stopped_at)
                producer.tell(command(doing, rounds[2].token, BLOCK))
                assert producer.until_caught() == "stopped"
            consumer.arm("kill", point)
            # A waiter whose time is over meets the trap as it leaves, before anything is set.
            others = ["orphaned"] if waiter == "limited thread" and "waiter" in point else []
            provoke(other, rounds[0], CONSUMER_STEPS[point], BLOCK, *others)
            while consumer.until_caught() != "killed":
                pass
            if stopped_at:
                producer.go_on()
                producer.hear(ANSWERS[doing])
                producer.ask(f"drop {rounds[2].token}", "dropped")
            assert producer.ask(f"set {rounds[1].token} 100 1", "set", "orphaned") == "orphaned"
            producer.ask(f"drop {rounds[1].token}", "dropped")
            # Its memory, and all that led to it, goes with the last promise. A descriptor stays,
            # by which the producer is told of such ends.
            limit = time.monotonic() + 10
            while producer.numbers("stats") != before | {"fds": before["fds"] + 1}:
                assert time.monotonic() < limit, (before, producer.numbers("stats"))


# ---- Large values -------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_large_copy_is_interrupted(consumer, how):
    start = settled(consumer)
    with peers("producer", "producer") as [producer, other]:
        # Into fresh memory; then into memory that was used before.
        for number in range(2):
            round = Round(consumer, "thread")
            for each in (producer, other):
                each.ask(f"hold {round.token}", "holds")
            producer.arm("kill" if how == "kill" and number else "stop", "half written")
            producer.tell(command("set", round.token, LARGE))
            if producer.until_caught() == "stopped":
                assert round.set_by(other, INLINE, 8) == "refused"
                producer.go_on()
                producer.hear("set")
                assert round.outcome() == f"value {LARGE} 7"
            else:
                consumer.numbers("settle 1")
                assert round.set_by(other, LARGE, 8) == "set"
                assert round.outcome() == f"value {LARGE} 8"
            if number == 0:
                assert consumer.ask("forget", "spoiled") == "spoiled 0"
    # What came is safe after the death of all that have sent it.
    kept = consumer.numbers("settle 0")
    assert kept["received"] == LARGE
    check_that_nothing_is_left(consumer, start)


# ---- No descriptors -----------------------------------------------------------------------------


@pytest.mark.parametrize("spare", range(6))
def test_a_consumer_without_descriptors_takes_nobody_for_dead(consumer, spare):
    start = settled(consumer)
    with peers("producer", "producer") as [producer, other]:
        round, another = Round(consumer, "listener"), Round(consumer, "listener")
        consumer.ask("idle", "idle")
        consumer.ask(f"leave {spare}", "left")
        producer.ask(f"hold {round.token}", "holds")
        other.ask(f"hold {another.token}", "holds")
        producer.stop()
        assert another.set_by(other, BLOCK, 8) == "set"
        assert another.outcome() == f"value {BLOCK} 8"
        producer.go_on()
        assert round.set_by(producer, BLOCK, 7) == "set"
        assert round.outcome() == f"value {BLOCK} 7"
        consumer.ask("leave -1", "left")
    check_that_nothing_is_left(consumer, start)


@pytest.mark.parametrize("spare", range(8))
def test_a_producer_without_descriptors_is_told_so_or_works(consumer, spare):
    start = settled(consumer)
    with peers("producer") as [producer]:
        round = Round(consumer, "listener")
        producer.ask(f"leave {spare}", "left")
        producer.tell(f"hold {round.token}")
        answer = producer.hear("holds", "error")
        assert "Too many open files" in answer or answer == "holds"
        if answer == "holds":
            assert round.set_by(producer, BLOCK, 7) == "set"
            assert round.outcome() == f"value {BLOCK} 7"
        else:
            assert consumer.ask(f"unwant {round.id}", "unwanted") == "unwanted 1"
    check_that_nothing_is_left(consumer, start)


# ---- Passing on ---------------------------------------------------------------------------------


def test_what_comes_back_to_the_process_that_passed_it_on_is_not_on_its_way(consumer):
    start = settled(consumer)
    for waiter in WAITERS:
        with peers("producer") as [producer]:
            round = Round(consumer, waiter)
            for doing in ("hold", "pass", "hold", "drop", "drop"):
                producer.ask(f"{doing} {round.token}", ANSWERS[doing])
            assert round.outcome() == "broken"
        check_that_nothing_is_left(consumer, start)


# ---- All at once --------------------------------------------------------------------------------


def run(*command: object) -> dict[str, int]:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stderr}"
    return {name: int(value) for name, value in (word.split("=") for word in done.stdout.split())}


def test_no_content_of_the_memory_harms_either_end():
    counted = run(program("corruption"), 20000, 1)
    # Each kind of end is among them; "thrown" needs a lane that is full.
    assert all(number > 0 for name, number in counted.items() if name != "thrown"), counted


def test_a_claim_that_seems_to_be_answered_for_ever_is_abandoned():
    assert run(program("corruption"), 100_000, 1, 552)["mutations"] > 0


@pytest.mark.parametrize("doing", ["abandon", "drop", "wait"])
def test_a_consumer_is_stopped_in_the_middle_of_an_answer(doing):
    run(program("asking"), doing)


def test_many_threads_and_a_process_that_is_killed_again_and_again():
    counted = run(program("stress"), 3, 1)
    assert all(number > 0 for number in counted.values()), counted
