"""A pool node as a program: ``kvferry pool serve``, and ``python -m kvferry.pool.program``, which a user's own node runs.

What its options may say is checked here, each in a sentence that names it, and so is how it ends.
"""

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvferry.errors import InvalidArgument, KvferryError
from kvferry.options import LARGEST, format_size, parse_place, parse_size
from kvferry.pool import places
from kvferry.pool.eviction import POLICIES
from kvferry.pool.places import LONGEST_S

__all__ = ["add_options", "main", "seconds", "serve", "whole_number"]

LEAST_BYTES, MOST_BYTES = 1 << 12, 1 << 62


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvferry pool serve", description="Runs a pool node in this process.")
    add_options(parser)
    return serve(parser.parse_args(arguments))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--listen",
        type=_place,
        metavar="ADDRESS",
        help="unix:/path/to.sock or host:port; left out, this is the pool node of your own",
    )
    parser.add_argument(
        "--memory",
        type=_size,
        help="the most it may take, as in 8GiB; left out, a quarter of what is free, and for the node of your own at most "
        "the configuration file's memory",
    )
    parser.add_argument(
        "--segment", type=_size, default=256 << 20, help="memory is taken and given back in such pieces (256MiB)"
    )
    parser.add_argument(
        "--idle-s",
        type=seconds(above=True),
        help="leave after so long without a client; left out, never, or for the node of your own after the configuration "
        "file's idle_s",
    )
    parser.add_argument("--policy", choices=POLICIES, help="what goes when room is needed; see docs/pool.md")
    parser.add_argument(
        "--secret-file",
        dest="secret",
        type=_content,
        metavar="FILE",
        help="what links must know: the file's bytes without a newline at the end",
    )
    parser.add_argument("--node-id", type=whole_number(1, LARGEST), help="what peers call it; random unless given")


def serve(chosen: argparse.Namespace) -> int:
    """Runs a node in this process until SIGTERM, SIGINT, a ``kvferry pool stop`` or its idle time; its exit status."""
    from kvferry.pool import embedded
    from kvferry.pool.node import PoolNode

    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("kvferry.pool").setLevel(logging.INFO)
    lock = None
    try:
        listen = chosen.listen
        said = places.settings() if listen is None else places.Settings()  # the file is about the user's own node alone
        memory = chosen.memory or embedded.fitting_memory(said.memory)
        idle_s = chosen.idle_s or said.idle_s
        if listen is None:
            listen, lock = embedded.claim(memory, idle_s)
        node = PoolNode(
            listen,
            memory,
            segment_bytes=chosen.segment,
            policy=chosen.policy,
            secret=chosen.secret,
            node_id=chosen.node_id,
        )
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: node.stop())
            signal.siginterrupt(signal.SIGTERM, True)
            with suppress(OSError):  # the log is on a disk that is full, say: the node serves all the same
                sys.stdout.write(
                    f"kvferry pool node at {node.address}: {format_size(node.capacity_bytes)} at most, process {os.getpid()}; "
                    f"stop it with SIGTERM{' or `kvferry pool stop`' if embedded.is_own(node.address) else ''}\n"
                )
                sys.stdout.flush()
            node.run(idle_s)
        finally:
            node.close()
    except KvferryError as error:
        sys.stderr.write(f"kvferry pool serve: {error}\n")
        return 1
    finally:
        if lock is not None:
            os.close(lock)
    return 0


# --- what an option may say -------------------------------------------------------------------------------------------


def seconds(*, above: bool = False) -> Callable[[str], float]:
    """For ``type=``: a time in seconds, ``above`` 0 or from 0 on."""

    def parse(words: str) -> float:
        try:
            number = float(words)
        except ValueError:
            number = -1
        too_little = number <= 0 if above else number < 0
        if too_little or not number <= LONGEST_S:  # neither is true of nan
            raise argparse.ArgumentTypeError(
                f"{words[:40]!r} is no time: give seconds, {'more than' if above else 'from'} 0 and at most {LONGEST_S:.0f}"
            )
        return number

    return parse


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """For ``type=``: one of these."""

    def parse(words: str) -> int:
        try:
            number = int(words)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{words[:40]!r} is not a whole number from {least} to {most}")
        return number

    return parse


def _size(words: str) -> int:
    try:
        size = parse_size("size", words)
    except InvalidArgument:
        size = 0
    if not LEAST_BYTES <= size <= MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{words[:40]!r} is no size from 4 KiB to 4 EiB: write 8GiB, or 512MiB")
    return size


def _place(words: str) -> str:
    try:
        parse_place(words)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return words


def _content(path: str) -> bytes:
    try:
        return places.secret_in(path)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
