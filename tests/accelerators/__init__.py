"""The accelerator that the tests run on, under one set of names: the fake one, or CUDA.

``fake.py``, ``cuda.py``, and ``gated.py``, which is the fake with no more than CUDA offers, define
the same :data:`NAMES`; here they are those of the one that ``$TEST_ACCELERATOR`` names (default:
fake). Importing this initialises nothing; ``install()`` is what a process calls that is about to
use it.

What the names promise is what all of them keep:

==========================  ======================================================================
``DEVICE``, ``DEVICES``     the current device at the start, and all that there are: ``[-1]`` is
                            another one where there are two
``device_count()``          how many of them there are; asks no driver of this process
``install()``               make ``DEVICE`` usable; done once
``prepare()``               what takes long and needs no process of its own
``PATIENCE``                how many times longer than on the fake a process may take
``hold(stream)``            have it do nothing of what it is given from now on. Twice, with work
                            between, holds what follows, too
``release(stream)``         have it go on
``held(*streams)``          both, in a ``with`` block
``do_work(stream)``         have a held stream do one kernel, and nothing that tells of it
``reach_event(stream)``     have it reach the event behind that, and go on up to where it is held
``run_all(stream)``         have it do what it can
``keep_busy(milliseconds)`` have the current stream do nothing else for about so long
``drain(stream, seconds)``  wait until it has done all; TimeoutError
``assert_queue(...)``       it has just this to do: ``assert_queue(stream, "kernel", "event")``,
                            with a ``...`` at one end for what else there may be
``all_streams(*indices)``   every stream of the devices that may ever be used, but the default ones
``capturing(mode)``         in this ``with`` block a new stream is current, and records a graph; at
                            its end, the capture must be intact. It does not wait for the device.
                            ``assert_replay(tensor, values)`` of what it gives: replayed now, the
                            graph leaves these in the tensor
``until_waiting(count)``    wait until so many threads wait for the device
``nobody_synchronises()``   in this ``with`` block the calling thread never waits for the device
``live_blocks()``           how many pieces of device 0's memory are in use
``limit_memory(bytes)``     have an allocator that can be told so take no more from device 0
``is_initialized()``        whether any device is in use
``is_untouched()``          whether nothing at all was asked of the driver
``has_context(index)``      whether that one is
==========================  ======================================================================

A stream is named by a ``torch.Stream``, or by a device for that device's default stream.
"""

from __future__ import annotations

import os

NAME = os.environ.get("TEST_ACCELERATOR", "fake")

NAMES = (
    "DEVICE",
    "DEVICES",
    "PATIENCE",
    "all_streams",
    "assert_queue",
    "capturing",
    "device_count",
    "do_work",
    "drain",
    "has_context",
    "held",
    "hold",
    "install",
    "is_initialized",
    "is_untouched",
    "keep_busy",
    "limit_memory",
    "live_blocks",
    "nobody_synchronises",
    "prepare",
    "reach_event",
    "release",
    "run_all",
    "until_waiting",
)
__all__ = ["NAME", "NAMES", *NAMES]

if NAME == "cuda":
    from .cuda import *  # noqa: F403
elif NAME == "gated":
    from .gated import *  # noqa: F403
elif NAME == "fake":
    from .fake import *  # noqa: F403
else:
    raise ValueError(f"$TEST_ACCELERATOR: expected fake, gated or cuda, got {NAME!r}")
