"""Other ways to get a tensor from another process of the machine, each as fast as it is used.

All have the interface of :class:`Peer`. A value that was taken stays what it was, whatever the
producer goes on to do: where a peer hands over the producer's own memory, it sends a copy.
"""

from __future__ import annotations

import collections
import ctypes
import importlib.util
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .partner import CONTEXT


class Request(NamedTuple):
    """One tensor to produce."""

    size: int  # bytes
    number: int  # of its contents
    pause: bool  # whether the producer first waits until the consumer sleeps


Produce = Callable[[Request], torch.Tensor]

_FORMAT = struct.Struct("qq?")


def _pack(requests: Sequence[Request]) -> bytes:
    return b"".join(_FORMAT.pack(*request) for request in requests)


def _unpack(packed: bytes) -> list[Request]:
    return [Request(*fields) for fields in _FORMAT.iter_unpack(packed)]


class Peer:
    """One end of one way; an object in each of the two processes.

    Args:
        end: what :meth:`ends` has made for this side.
    """

    title: str
    #: The package to be installed, if torch and Python do not bring it.
    needs: str | None = None

    @staticmethod
    def ends(folder: str) -> tuple[Any, Any]:
        """What the consumer and the producer are made with. ``folder`` is empty, and theirs."""
        return (folder, "consumer"), (folder, "producer")

    def __init__(self, end: Any) -> None:
        raise NotImplementedError

    def ask(self, requests: Sequence[Request]) -> None:
        """Asks for tensors, all at once. None at all ends :meth:`serve`."""
        raise NotImplementedError

    def take(self, size: int) -> torch.Tensor:
        """The next one, in order."""
        raise NotImplementedError

    def serve(self, produce: Produce) -> None:
        """In the producer: answers until there is nothing more to answer."""
        raise NotImplementedError

    def close(self) -> None:
        """In the consumer, after the last request."""


class Pipe(Peer):
    title = "multiprocessing.Pipe, bytes"

    @staticmethod
    def ends(folder: str) -> tuple[Any, Any]:
        return CONTEXT.Pipe()

    def __init__(self, end: Any) -> None:
        self._pipe = end

    def ask(self, requests: Sequence[Request]) -> None:
        self._pipe.send_bytes(_pack(requests))

    def take(self, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        self._pipe.recv_bytes_into(tensor.numpy())
        return tensor

    def serve(self, produce: Produce) -> None:
        while requests := _unpack(self._pipe.recv_bytes()):
            for request in requests:
                self._pipe.send_bytes(produce(request).numpy())


class _Queue(Peer):
    strategy: str

    @staticmethod
    def ends(folder: str) -> tuple[Any, Any]:
        queues = CONTEXT.SimpleQueue(), CONTEXT.SimpleQueue()  # without a thread, unlike a Queue
        return queues, queues

    def __init__(self, end: Any) -> None:
        import torch.multiprocessing

        torch.multiprocessing.set_sharing_strategy(self.strategy)
        self._requests, self._tensors = end

    def ask(self, requests: Sequence[Request]) -> None:
        self._requests.put(list(requests))

    def take(self, size: int) -> torch.Tensor:
        tensor: torch.Tensor = self._tensors.get()
        return tensor

    def serve(self, produce: Produce) -> None:
        while requests := self._requests.get():
            for request in requests:
                self._tensors.put(produce(request).clone())


class FileSystemQueue(_Queue):
    title = "torch.multiprocessing queue, file_system"
    strategy = "file_system"


class DescriptorQueue(_Queue):
    title = "torch.multiprocessing queue, file_descriptor"
    strategy = "file_descriptor"


class Gloo(Peer):
    title = "gloo send and recv"

    def __init__(self, end: Any) -> None:
        import torch.distributed

        folder, side = end
        self._distributed = torch.distributed
        self._other = 1 if side == "consumer" else 0
        self._sent: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=1 - self._other, world_size=2
        )

    def ask(self, requests: Sequence[Request]) -> None:
        self._send(torch.tensor([len(requests)]))
        if requests:
            self._send(torch.tensor(requests, dtype=torch.int64))

    def _send(self, tensor: torch.Tensor) -> None:
        # A send that waits would wait for the other side, which may be waiting in one, too.
        self._sent.append((self._distributed.isend(tensor, self._other), tensor))

    def take(self, size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=torch.uint8)
        self._distributed.recv(tensor, self._other)
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        return tensor

    def close(self) -> None:
        for work, _ in self._sent:
            work.wait()

    def serve(self, produce: Produce) -> None:
        while count := self._receive(1).item():
            for size, number, pause in self._receive(int(count), 3).tolist():
                self._distributed.send(produce(Request(size, number, bool(pause))), self._other)

    def _receive(self, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=torch.int64)
        self._distributed.recv(tensor, self._other)
        return tensor


class Rpc(Peer):
    title = "torch.distributed.rpc"
    produce: Produce  # of the process, which others call

    def __init__(self, end: Any) -> None:
        import torch.distributed.rpc

        folder, side = end
        self._rpc = torch.distributed.rpc
        self._futures: collections.deque[torch.futures.Future[torch.Tensor]] = collections.deque()
        os.environ["TP_SOCKET_IFNAME"] = "lo"
        self._rpc.init_rpc(
            side,
            rank=("consumer", "producer").index(side),
            world_size=2,
            rpc_backend_options=self._rpc.TensorPipeRpcBackendOptions(
                init_method=f"file://{folder}/store"
            ),
        )

    def ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._futures.append(self._rpc.rpc_async("producer", Rpc.answer, (request,)))

    def take(self, size: int) -> torch.Tensor:
        return self._futures.popleft().wait()

    @staticmethod
    def answer(request: Request) -> torch.Tensor:
        return Rpc.produce(request)

    def serve(self, produce: Produce) -> None:
        Rpc.produce = staticmethod(produce)
        self._rpc.shutdown()  # when the other side calls it, too

    def close(self) -> None:
        self._rpc.shutdown()


class ZeroMq(Peer):
    title = "ZeroMQ, ipc://"
    needs = "zmq"

    def __init__(self, end: Any) -> None:
        import zmq

        folder, side = end
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        (self._socket.bind if side == "consumer" else self._socket.connect)(f"ipc://{folder}/pair")

    def ask(self, requests: Sequence[Request]) -> None:
        self._socket.send(_pack(requests))

    def take(self, size: int) -> torch.Tensor:
        return torch.frombuffer(self._socket.recv(copy=False).buffer, dtype=torch.uint8)

    def serve(self, produce: Produce) -> None:
        while requests := _unpack(self._socket.recv()):
            for request in requests:
                tensor = produce(request)
                self._socket.send(tensor.numpy(), copy=request.size < 1 << 16)


class Iceoryx2(Peer):
    """Publish and subscribe, in one pair of services for each range of sizes.

    A sample lies in a slot of the largest size, and there are as many slots as can be outstanding.
    """

    title = "iceoryx2"
    needs = "iceoryx2"
    RANGES = ((1 << 16, 512), (1 << 28, 2))  # the largest sample in bytes, and how many

    def __init__(self, end: Any) -> None:
        import iceoryx2

        folder, side = end
        iceoryx2.set_log_level(iceoryx2.LogLevel.Fatal)
        self._name = Path(folder).name
        self._iceoryx2 = iceoryx2
        self._node = iceoryx2.NodeBuilder.new().create(iceoryx2.ServiceType.Ipc)
        self._sizes: collections.deque[int] = collections.deque()
        bells = requests, tensors = self._bell("requests"), self._bell("tensors")
        heard, rung = (tensors, requests) if side == "consumer" else (requests, tensors)
        self._listener = heard.listener_builder().create()
        self._notifier = rung.notifier_builder().create()
        self._requests = self._service("requests", 512)
        self._tensors = [
            self._service(f"tensors{i}", count) for i, (_, count) in enumerate(self.RANGES)
        ]
        if side == "consumer":
            self._publishers = [self._publisher(self._requests, 1 << 16)]
            self._subscribers = [each.subscriber_builder().create() for each in self._tensors]
        else:
            self._subscribers = [self._requests.subscriber_builder().create()]
            self._publishers = [
                self._publisher(service, size)
                for service, (size, _) in zip(self._tensors, self.RANGES, strict=True)
            ]

        services = [self._requests, *self._tensors]
        while not self._complete(bells, services):  # what is sent before goes nowhere
            time.sleep(0.01)

    @staticmethod
    def _complete(bells: Sequence[Any], services: Sequence[Any]) -> bool:
        """Whether both sides are there."""
        heard = all(bell.dynamic_config.number_of_listeners for bell in bells)
        return heard and all(
            service.dynamic_config.number_of_publishers
            and service.dynamic_config.number_of_subscribers
            for service in services
        )

    def _service_name(self, name: str) -> Any:
        return self._iceoryx2.ServiceName.new(f"{self._name}/{name}")

    def _bell(self, name: str) -> Any:
        builder = self._node.service_builder(self._service_name(name))
        return builder.event().open_or_create()

    def _service(self, name: str, count: int) -> Any:
        builder = self._node.service_builder(self._service_name(name))
        return (
            builder.publish_subscribe(self._iceoryx2.Slice[ctypes.c_uint8])
            .subscriber_max_buffer_size(count)
            .subscriber_max_borrowed_samples(count)
            .open_or_create()
        )

    def _publisher(self, service: Any, size: int) -> Any:
        return service.publisher_builder().initial_max_slice_len(size).create()

    def _range(self, size: int) -> int:
        return next(i for i, (most, _) in enumerate(self.RANGES) if size <= most)

    def _publish(self, publisher: Any, address: int, size: int) -> None:
        sample = publisher.loan_slice_uninit(size)
        ctypes.memmove(sample.payload_ptr, address, size)
        sample.assume_init().send()
        self._notifier.notify()

    def _receive(self, subscriber: Any) -> Any:
        while (sample := subscriber.receive()) is None:
            self._listener.blocking_wait()
        return sample

    def ask(self, requests: Sequence[Request]) -> None:
        self._sizes.extend(request.size for request in requests)
        packed = _pack([Request(len(requests), 0, False), *requests])
        address = ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p).value
        assert address is not None
        self._publish(self._publishers[0], address, len(packed))

    def take(self, size: int) -> torch.Tensor:
        sample = self._receive(self._subscribers[self._range(self._sizes.popleft())])
        buffer: Any = (ctypes.c_uint8 * size).from_address(sample.payload_ptr)
        buffer.sample = sample  # given back when the tensor goes
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def serve(self, produce: Produce) -> None:
        while True:
            sample = self._receive(self._subscribers[0])
            payload = ctypes.string_at(sample.payload_ptr, sample.payload().len())
            sample.delete()
            head, *requests = _unpack(payload)
            if head.size == 0:
                return
            for request in requests:
                tensor = produce(request)
                publisher = self._publishers[self._range(request.size)]
                self._publish(publisher, tensor.data_ptr(), tensor.nbytes)


class Ray(Peer):
    """An actor of Ray's own, which gives NumPy arrays: it reads them without a copy."""

    title = "Ray, NumPy"
    needs = "ray"

    @staticmethod
    def ends(folder: str) -> tuple[Any, Any]:
        return folder, None

    def __init__(self, end: Any) -> None:
        if end is None:
            return  # the actor does it all
        import ray

        self._ray = ray
        self._references: collections.deque[Any] = collections.deque()
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        self._actor = ray.remote(_RayProducer).remote(end)

    def ask(self, requests: Sequence[Request]) -> None:
        self._references.extend(self._actor.answer.remote(request) for request in requests)

    def take(self, size: int) -> torch.Tensor:
        return torch.from_numpy(self._ray.get(self._references.popleft()))

    def serve(self, produce: Produce) -> None:
        pass

    def close(self) -> None:
        self._ray.shutdown()


class _RayProducer:
    def __init__(self, folder: str) -> None:
        from .file_peers import Production

        self._produce = Production(folder)

    def answer(self, request: Request) -> Any:
        return self._produce(request).numpy()


PEERS: dict[str, type[Peer]] = {
    "pipe": Pipe,
    "queue_file_system": FileSystemQueue,
    "queue_descriptor": DescriptorQueue,
    "rpc": Rpc,
    "gloo": Gloo,
    "zeromq": ZeroMq,
    "iceoryx2": Iceoryx2,
    "ray": Ray,
}


def installed(peer: type[Peer]) -> bool:
    return peer.needs is None or importlib.util.find_spec(peer.needs) is not None
