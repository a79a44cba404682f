"""Promises fulfilled through ``torch.distributed.rpc``, beside RPC's own calls and gloo."""

from __future__ import annotations

import time
from collections.abc import Callable

from .common import Figure, Sample, Series, Settings, Target, compare, in_a_row
from .common import measure as take
from .file_latency import key, repeat
from .network_sides import THREADS, Owner, pair

#: Bytes, by what they are called. A quick run leaves the last one out.
SIZES = {"4 B": 4, "1 MiB": 1 << 20, "64 MiB": 1 << 26}

#: The most that travels within a message, and a little more, which travels beside it.
WITHIN, BESIDE = 1 << 20, (1 << 20) + 4

#: Tensors of 4 B that are outstanding at a time.
OUTSTANDING = 1000

_BASELINES = {
    "result": "rpc_async: the function's end -> its result in wait()",
    "callee": "rpc_async: call -> the function that is called has it",
    "waiter": "rpc_async: the same -> a thread that waits for it",
    "gloo": "gloo: send -> recv",
}


def _sizes(settings: Settings) -> dict[str, int]:
    return dict(list(SIZES.items())[: settings.count(3, 2)])


class _Measuring(Owner):
    """The owner, which measures everything: only that is told to it from outside."""

    def latency(self, size: int, rounds: int, count: int) -> Series:
        samples: dict[str, Sample] = {
            "ours": lambda: self.ours(size).one_way,
            "result": lambda: self.rpc_result(size),
            "callee": lambda: self.rpc_async(size, to_waiter=False).one_way,
            "waiter": lambda: self.rpc_async(size, to_waiter=True).one_way,
            "gloo": lambda: self.gloo(size).one_way,
        }
        return take({name: in_a_row(each, count) for name, each in samples.items()}, rounds)

    def call(self, rounds: int, count: int) -> Series:
        """Until the call has returned; and what it consists of."""
        asks = 20 * count
        samples: dict[str, Sample] = {
            "ours": in_a_row(lambda: self.ours(4).call, count),
            "rpc": in_a_row(lambda: self.rpc_async(4, to_waiter=True).call, count),
            "warm": lambda: self._stream("fulfil", asks),
            "look": lambda: self._look(asks),
            "unpickle": lambda: self._unpickle(asks),
            "within": in_a_row(lambda: self.ours(WITHIN).call, count),
            "beside": in_a_row(lambda: self.ours(BESIDE).call, count),
        }
        return take(samples, rounds)

    def streams(self, rounds: int, count: int) -> Series:
        samples: dict[str, Sample] = {
            "one": lambda: self._stream("fulfil", count),
            "threads": lambda: self._stream("fulfil_by_threads", count),
            "rpc_sync": lambda: self._stream_of_rpc("rpc_sync_each", count),
            "rpc_async": lambda: self._stream_of_rpc("rpc_async_all", count),
        }
        return take(samples, rounds)

    def _stream(self, method: str, count: int) -> float:
        self.ready(count, 4)
        self.hand_out(count)
        took = self.stream(method)
        self.ask_worker("drop")
        return took

    def _stream_of_rpc(self, method: str, count: int) -> float:
        self.ready(count, 4)
        return self.stream_of_rpc(method)

    def _unpickle(self, count: int) -> float:
        took = self.hand_out(count)
        self.ask_worker("drop")
        return took

    def _look(self, count: int) -> float:
        self.hand_out(1)
        took = self.ask_worker("look", count)
        self.ask_worker("drop")
        return took

    def processor(self, rounds: int, count: int) -> Series:
        """Microseconds of processor time of both processes together, for each."""

        def of(what: Callable[[int], object]) -> Sample:
            def sample() -> float:
                self.ready(count, 4)
                before = self.processor_time()
                what(count)
                return (self.processor_time() - before) / count * 1e6

            return sample

        samples: dict[str, Sample] = {
            "promise": of(lambda count: self._stream("fulfil", count)),
            "hold": of(self._unpickle),
            "look": of(self._look),
            "rpc": of(lambda count: self._stream_of_rpc("rpc_sync_each", count)),
        }
        return take(samples, rounds)

    def idle(self, count: int, rounds: int, seconds: float) -> list[float]:
        """Per cent of one core that both processes use with as many promises outstanding."""
        if count:
            self.hand_out(count)
        taken = []
        for _ in range(rounds):
            time.sleep(seconds / 4)
            wall, cpu = time.perf_counter(), self.processor_time()
            time.sleep(seconds)
            cpu = self.processor_time() - cpu
            taken.append(100 * cpu / (time.perf_counter() - wall))
        return taken


def _latencies(name: str, size: int, series: Series) -> list[Figure]:
    small = size == SIZES["4 B"]
    targets = {
        "result": Target(1.1) if small else Target(1 / 0.95) if name == "64 MiB" else None,
        "callee": Target(1.1) if small else Target(1 / 0.95) if name == "64 MiB" else None,
        "gloo": None,
        "waiter": None,
    }
    return [
        compare(
            f"network.latency_{key(name)}_{baseline}",
            f"{name}: set_value -> TensorFuture.wait() goes on",
            title,
            subject=series["ours"],
            baseline=series[baseline],
            unit="µs",
            target=targets[baseline],
        )
        for baseline, title in _BASELINES.items()
    ]


def _parts(series: Series) -> list[Figure]:
    def figure(name: str, title: str, baseline: str, baseline_title: str) -> Figure:
        return compare(
            f"network.{name}",
            title,
            baseline_title,
            subject=series["ours" if name == "call" else name.removeprefix("part_")],
            baseline=series[baseline],
            unit="µs",
        )

    parts = {
        "look": "asking the owner whether a promise is pending",
        "unpickle": "unpickling a promise of another process",
    }
    warm = "set_value of 4 B, one after the other"
    return [
        figure("call", "set_value of 4 B: until it returns", "rpc", "rpc_sync with 4 B"),
        *(figure(f"part_{part}", title, "warm", warm) for part, title in parts.items()),
        figure(
            "part_within",
            "set_value of 1 MiB, within the message",
            "beside",
            "of 4 B more, beside it",
        ),
    ]


def _streams(series: Series, count: int) -> list[Figure]:
    rows = [
        ("one", "in one thread", "rpc_sync", "rpc_sync, one after the other"),
        ("one", "in one thread", "rpc_async", "rpc_async of all, then wait for all"),
        ("threads", f"in {THREADS} threads", "rpc_async", "rpc_async of all, then wait for all"),
    ]
    return [
        compare(
            f"network.stream_{ours}_{baseline}",
            f"{count:,} of 4 B outstanding, set {how}: each",
            title,
            subject=series[ours],
            baseline=series[baseline],
            unit="µs",
        )
        for ours, how, baseline, title in rows
    ]


def _processor(series: Series) -> list[Figure]:
    titles = {
        "promise": "a promise's life (make, pickle, hold, set, drop)",
        "hold": "a promise that is dropped (make, pickle, hold, look, drop)",
        "look": "asking whether a promise is pending",
    }
    return [
        compare(
            f"network.cpu_{what}",
            f"processor time of both sides: {title}",
            "rpc_sync with 4 B",
            subject=series[what],
            baseline=series["rpc"],
            unit="µs",
        )
        for what, title in titles.items()
    ]


def _idle(settings: Settings) -> list[Figure]:
    count = settings.count(OUTSTANDING, 20)
    seconds = 0.2 if settings.quick else 3.0
    rounds = min(settings.rounds, settings.count(3, 1))
    series: Series = {}
    for name, transports, outstanding in (
        ("ours", "init", count),
        ("nothing", "init", 0),
        ("default", "default", count),
    ):
        with pair(_Measuring, transports) as owner:
            series[name] = owner.call("idle", outstanding, rounds, seconds)
    title = f"{count:,} outstanding, idle, network.init: one core's time"
    return [
        compare(
            f"network.idle_{baseline}",
            title,
            baseline_title,
            subject=series["ours"],
            baseline=series[baseline],
            unit="%",
            target=Target(1.0, "subject"),
        )
        for baseline, baseline_title in (
            ("nothing", "with none"),
            ("default", "init_rpc's own transports"),
        )
    ]


def run(settings: Settings) -> list[Figure]:
    figures: list[Figure] = []
    rounds, few = settings.rounds, min(settings.rounds, 7)
    count = settings.count(OUTSTANDING, 20)
    with pair(_Measuring, "tcp") as owner:
        for name, size in _sizes(settings).items():
            row = max(repeat(size, settings), settings.count(3, 1))
            series = owner.call("latency", size, rounds, row)
            figures += _latencies(name, size, series)
        figures += _parts(owner.call("call", few, settings.count(20, 1)))
        figures += _streams(owner.call("streams", few, count), count)
        figures += _processor(owner.call("processor", few, count))
    return figures + _idle(settings)
