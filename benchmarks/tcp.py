"""What has gone through the TCP connections of this process, as the kernel counts it."""

from __future__ import annotations

import os
import socket
import stat
import struct
from dataclasses import dataclass

# In struct tcp_info of linux/tcp.h: tcpi_bytes_acked, _bytes_received, _segs_out, _segs_in.
_COUNTS = struct.Struct("=QQII")
_COUNTS_AT = 120


@dataclass(frozen=True)
class Traffic:
    """Of all connections that are open."""

    bytes: int  # in and out, without headers
    segments: int

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.bytes - before.bytes, self.segments - before.segments)


def traffic() -> Traffic:
    total, segments = 0, 0
    for name in os.listdir("/proc/self/fd"):
        for acked, received, sent, came in _counts(int(name)):
            total += acked + received
            segments += sent + came
    return Traffic(total, segments)


def _counts(descriptor: int) -> list[tuple[int, int, int, int]]:
    """Of one descriptor: none if it is no TCP socket, or closed by now."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return []
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6):
                return []
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return []
    return [_COUNTS.unpack_from(info, _COUNTS_AT)]
