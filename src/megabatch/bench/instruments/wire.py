"""The loopback, which ranks on one machine talk over: a meter of what goes through it, and a limit on how fast.

The limit is one of the kernel's (tc, a token bucket), on the loopback of a network namespace of its own, so that
nothing else on the machine feels it and nothing is left behind. All ranks share it.
"""

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
COUNTERS = Path("/proc/self/net/dev")
CHECK_SECONDS = 0.5
TOOLS = ("unshare", "ip", "tc")

# tc's units, in bits per second.
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "bps": 8, "kbps": 8e3, "mbps": 8e6, "gbps": 8e9}

# The bucket must hold a packet, and one of the loopback has 64 KiB.
_SMALLEST_BURST = 2**17
# More than the windows of all connections together, so that the queue never drops a packet.
_QUEUE = 2**28
# What the check of the limit may find above it.
_TOLERANCE = 1.1


class NoLimit(Exception):
    """The loopback cannot be limited here, or is not; the text says why."""


def sent_bytes() -> int | None:
    """Bytes that went through the loopback so far, TCP's headers and acknowledgements too; None where nobody counts."""
    return transmitted(COUNTERS.read_text(), LOOPBACK) if COUNTERS.exists() else None


def transmitted(text: str, interface: str) -> int:
    """The bytes sent by an interface in a text of the form of /proc/net/dev."""
    for line in text.splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == interface:
            return int(counters.split()[8])
    raise KeyError(interface)


def bits_per_second(rate: str) -> float:
    """A rate as tc writes it: 1gbit, 250mbit, 100mbps (bytes)."""
    number = rate.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = rate[len(number) :]
    try:
        value = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        value = 0
    if not 0 < value < float("inf"):
        raise ValueError(f"a rate must be a number and one of {', '.join(_UNITS)}, as in 1gbit; got {rate!r}")
    return value


def run_limited(rate: str, command: Sequence[str]) -> int:
    """Run a command where the loopback passes no more than `rate`. Its exit code; raises NoLimit."""
    return subprocess.run([*_limited(rate), *command], check=False).returncode


def try_limit(rate: str) -> None:
    """Raises NoLimit, with what is missing, where `run_limited` would not work."""
    missing = [tool for tool in TOOLS if _path_of(tool) is None]
    if missing:
        raise NoLimit(f"not installed: {', '.join(missing)} (packages util-linux and iproute2)")
    attempt = subprocess.run([*_limited(rate), "true"], check=False, capture_output=True, text=True)
    if attempt.returncode:
        said = " ".join(attempt.stderr.split()) or f"exit code {attempt.returncode}"
        raise NoLimit(f"{said} (needs root, CAP_NET_ADMIN, or user namespaces)")


def check_limit(rate: str) -> float:
    """The bits per second of a plain transfer. Raises NoLimit if they are above the rate."""
    allowed = bits_per_second(rate)
    size = int(min(max(allowed / 8 * CHECK_SECONDS, 16 * _burst(rate)), 2**28))
    measured = 8 * size / _transfer_seconds(size)
    if measured > _TOLERANCE * allowed:
        raise NoLimit(f"a plain transfer ran at {measured / 1e6:,.0f} Mbit/s, above the limit of {rate}")
    return measured


def _limited(rate: str) -> list[str]:
    unshare, ip, tc = (_path_of(tool) or tool for tool in TOOLS)
    script = (
        f"{ip} link set {LOOPBACK} up && "
        f"{tc} qdisc add dev {LOOPBACK} root tbf rate {rate} burst {_burst(rate)} limit {_QUEUE} && "
        'exec "$@"'
    )
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    return [unshare, "--net", *as_root, "sh", "-c", script, "sh"]


def _burst(rate: str) -> int:
    """What may pass at once: two milliseconds' worth."""
    return max(int(bits_per_second(rate) / 8 * 0.002), _SMALLEST_BURST)


def _path_of(tool: str) -> str | None:
    """Also where only root's PATH leads."""
    return shutil.which(tool, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))


def _transfer_seconds(size: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server:
        receiver = threading.Thread(target=_receive, args=(server, size))
        receiver.start()
        chunk = bytes(2**20)
        with socket.create_connection(server.getsockname()) as sender:
            start = time.perf_counter()
            for first in range(0, size, len(chunk)):
                sender.sendall(chunk[: size - first])
            receiver.join()
            return time.perf_counter() - start


def _receive(server: socket.socket, size: int) -> None:
    connection, _ = server.accept()
    with connection:
        while size > 0 and (received := len(connection.recv(2**20))):
            size -= received
