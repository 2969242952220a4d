"""Network namespaces, one a region, and their TUN devices. Linux only.

Region N has the address 10.77.N.1, and reaches 10.77.0.0/16 over its TUN device. What the kernel
sends there is read from the device's descriptor; what is written to the descriptor arrives.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
from pathlib import Path
from typing import Final

#: Packets are few at this size: a router in Python handles each for about 20 us.
MTU: Final = 60_000
_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_DEVICE: Final = "wan0"
#: The router's descriptors of the namespaces: this number plus the region's.
_FIRST_DESCRIPTOR: Final = 200
#: Runs a command as root of a new user namespace.
AS_ROOT: Final = ("unshare", "--user", "--map-root-user")

_libc: Final = ctypes.CDLL(None, use_errno=True)


def address(region: int) -> str:
    """Return the address of a region."""
    return f"10.77.{region}.1"


def region_of(host: str) -> int:
    """Return the region that has the address `host`."""
    return int(host.split(".")[2])


def why_not() -> str:
    """Return why this machine allows no such namespaces, or ""."""
    command = [*AS_ROOT, "--net", "ip", "tuntap", "add", "dev", _DEVICE, "mode", "tun"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"cannot run `unshare`: {error.strerror}"
    if done.returncode:
        return f"`{' '.join(command)}` failed: {done.stderr.strip() or done.returncode}"
    return ""


def create(region: int) -> int:
    """Create the namespace of a region; return the descriptor of its TUN device.

    The calling process is in the new namespace afterwards, and keeps it in existence with a
    descriptor, which `enter` uses.

    Raises:
        OSError: the kernel refuses it.
        subprocess.CalledProcessError: `ip` refused the device's settings.

    """
    _check(_libc.unshare(_CLONE_NEWNET))
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    os.dup2(own, _FIRST_DESCRIPTOR + region, inheritable=False)
    os.close(own)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        "link set lo up",
        f"addr add {address(region)}/32 dev {_DEVICE}",
        f"link set {_DEVICE} mtu {MTU} txqueuelen 10000 up",
        f"route add 10.77.0.0/16 dev {_DEVICE} src {address(region)}",
    ):
        subprocess.run(["ip", *command.split()], check=True)  # noqa: S607 - of this machine
    return tun


def enter(router: int, region: int) -> None:
    """Move the calling process into a region; it must have one thread.

    A process that has no right to that enters the router's user namespace first. One of the
    machine's root stays in its own, so that it can run programs as other users there.

    Args:
        router: process id of the router.
        region: the region's number.

    Raises:
        OSError: there is no such router, or the kernel refuses it.

    """
    network = Path(f"/proc/{router}/fd/{_FIRST_DESCRIPTOR + region}")
    try:
        _set_namespace(network, _CLONE_NEWNET)
    except PermissionError:
        _set_namespace(Path(f"/proc/{router}/ns/user"), _CLONE_NEWUSER)
        _set_namespace(network, _CLONE_NEWNET)


def _set_namespace(path: Path, kind: int) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _check(_libc.setns(descriptor, kind))
    finally:
        os.close(descriptor)


def _check(result: int) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
