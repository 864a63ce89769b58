"""IPv4 addresses as the vendor's API writes them: little-endian integers, and ``ip:port`` strings."""

from __future__ import annotations

import socket
import struct


def ip_to_int(ip: str) -> int:
    """``"127.0.0.1"`` -> 16777343. Short forms work; names and IPv6 are ``RuntimeError``."""
    try:
        return int(struct.unpack("<I", socket.inet_aton(ip))[0])
    except OSError:
        raise RuntimeError(f"Can not parse ip str:{ip}") from None


def int_to_ip(number: int) -> str:
    """16777343 -> ``"127.0.0.1"``. ``ValueError`` for numbers that are no IPv4 address."""
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{number} is not an IPv4 address")
    return socket.inet_ntoa(struct.pack("<I", number))


def split_listen(text: str) -> tuple[str, str]:
    """``"ip:port"`` -> both parts; ``ValueError`` unless there are exactly two."""
    parts = text.split(":")
    if len(parts) != 2:
        raise ValueError(f"{text!r} is not ip:port")
    return parts[0], parts[1]
