"""The command ``kvferry``.

``kvferry doctor`` says which transports work on this host, whether vLLM can use the connector, and what to change; ``kvferry
pool`` runs a pool node, looks at the one of whoever asks, and ends it; ``kvferry replay`` says what a pool would have done for
recorded requests; ``kvferry cmake-dir`` and its like say where the C++ library is.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry import _core
from kvferry.errors import KvferryError
from kvferry.pool import program
from kvferry.pool.eviction import POLICIES

__all__ = ["main"]

PICTURES = (".png", ".pdf", ".svg")
CPP_FOLDERS = {
    "cmake-dir": ("lib/cmake/kvferry", "for C++: cmake -Dkvferry_DIR=$(kvferry cmake-dir), then find_package(kvferry)"),
    "include-dir": ("include/kvferry", "for C++: where llm_datadist/llm_datadist.h is"),
    "pkgconfig-dir": (
        "lib/pkgconfig",
        "for C++: PKG_CONFIG_PATH=$(kvferry pkgconfig-dir), package kvferry-llm-datadist",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; its exit status.

    ``doctor`` ends with 1 if a transport does not work, ``pool status`` with 1 if no node listens, and whatever fails with 1
    and one line that says why; an option that cannot be with 2, after a line that names it; else it is 0.
    """
    parser = argparse.ArgumentParser(prog="kvferry", description="Moves KV caches between processes and machines.")
    parser.add_argument("--version", action="version", version=f"kvferry {version('kvferry')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    doctor = commands.add_parser("doctor", help="what works on this host and with its vLLM, and what to change")
    doctor.add_argument("--json", action="store_true", help="for programs: the report and the verdicts")
    doctor.set_defaults(run=_doctor)
    _add_pool(commands.add_parser("pool", help="a pool node: run it, look at your own, stop it"))
    _add_replay(
        commands.add_parser("replay", help="recorded requests through a pool's store, bytes simulated: hit rates")
    )
    for name, (folder, words) in CPP_FOLDERS.items():
        commands.add_parser(name, help=words.replace("%", "%%")).set_defaults(run=_cpp_folder, folder=folder)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except OSError as error:  # nobody reads what it prints, or the disk is full
        sys.stdout = None  # or the interpreter tries once more, and says so
        return _failed(error)
    return status


def _cpp_folder(chosen: argparse.Namespace) -> int:
    # Beside the native module: Python files of an editable install lie somewhere else.
    folder = Path(_core.__file__).parent / "cpp" / chosen.folder
    if not folder.is_dir():
        return _failed(OSError(f"{folder} does not exist: this kvferry was built without its C++ library"))
    print(folder)
    return 0


def _add_pool(pool: argparse.ArgumentParser) -> None:
    commands = pool.add_subparsers(title="commands", metavar="COMMAND", required=True)
    serve = commands.add_parser("serve", help="run a node in this process, until SIGTERM or SIGINT")
    program.add_options(serve)
    serve.set_defaults(run=program.serve)
    status = commands.add_parser("status", help="whether it runs, where it listens, how big it may become")
    status.add_argument("--json", action="store_true", help="for programs")
    status.set_defaults(run=_pool_status)
    stop = commands.add_parser("stop", help="ask it to leave; what it holds is lost, and loads of it are misses")
    stop.add_argument("--timeout-s", type=program.seconds(), default=10.0, help="after which it is killed (default 10)")
    stop.set_defaults(run=_pool_stop)


def _add_replay(replay: argparse.ArgumentParser) -> None:
    replay.add_argument("trace", type=Path, help="one JSON object a line, with input_length and hash_ids")
    replay.add_argument(
        "--capacity",
        default="100k,300k,1M,3M,10M,30M,100M",
        help="tokens (k, M, G) or bytes (MiB, GiB, TiB), with commas",
    )
    replay.add_argument(
        "--policy", type=_policies, default="lru,s3fifo", help="lru, s3fifo, or both with a comma (the default)"
    )
    replay.add_argument(
        "--block-tokens", type=program.whole_number(1, 1 << 31), default=512, help="tokens that one id stands for (512)"
    )
    replay.add_argument(
        "--token-bytes",
        type=program.whole_number(1, 1 << 40),
        default=1 << 17,
        help="KV cache of one token, in bytes (131072)",
    )
    replay.add_argument("--plot", type=_picture, metavar="OUT.png", help="hit rate against capacity; needs matplotlib")
    replay.set_defaults(run=_replay, parser=replay)


def _policies(words: str) -> list[str]:
    policies = words.split(",")
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise argparse.ArgumentTypeError(f"no policy is called {unknown[0]!r}; there are {', '.join(POLICIES)}")
    return policies


def _picture(words: str) -> Path:
    path = Path(words)
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            "it needs matplotlib, which is not installed: pip install matplotlib, or leave --plot out"
        )
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{words!r} is no picture: its name ends with one of {', '.join(PICTURES)}")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.parent}")
    return path


def _doctor(chosen: argparse.Namespace) -> int:
    from kvferry import _core
    from kvferry.doctor import diagnose, diagnose_vllm, installed_vllm, render, render_vllm

    report, found = _core.host_report(), installed_vllm()
    verdicts, findings = diagnose(report), diagnose_vllm(found)
    if chosen.json:
        told = {
            "host": report,
            "transports": [dataclasses.asdict(verdict) for verdict in verdicts],
            "vllm": found | {"findings": [dataclasses.asdict(finding) for finding in findings]},
        }
        print(json.dumps(told, indent=2))
    else:
        print(render(report, verdicts))
        print(render_vllm(found, findings))
    return 0 if all(verdict.works for verdict in verdicts) else 1


def _pool_status(chosen: argparse.Namespace) -> int:
    from kvferry.options import format_size
    from kvferry.pool import embedded

    try:
        seen = embedded.status()
    except (KvferryError, OSError) as error:
        return _failed(error)
    facts = _facts(seen.address) if seen.state == "listening" else None
    if chosen.json:
        print(json.dumps(dataclasses.asdict(seen) | {"facts": facts}, indent=2))
    elif seen.state == "nobody":
        print(f"No pool node of your own runs; it would listen at {seen.address}, and its log is {seen.log}")
    else:
        print(f"{'A pool node listens' if seen.state == 'listening' else 'A pool node starts'} at {seen.address}")
        lines = {
            "pid": seen.pid or None,
            "memory": seen.memory_bytes and f"up to {format_size(seen.memory_bytes)}",
            "keys": facts and f"{facts['keys']}, of {format_size(facts['taken_bytes'] - facts['copies_bytes'])}",
            "copies": facts and f"{facts['copies']}, of {format_size(facts['copies_bytes'])}, of what other nodes own",
            "answers": "no" if seen.state == "listening" and facts is None else None,
            "started": seen.started and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen.started)),
            "leaves": seen.idle_s and f"after {seen.idle_s:g} s without a client",
            "log": seen.log,
            "stop it": "kvferry pool stop",
        }
        print("\n".join(f"  {name:<10}{value}" for name, value in lines.items() if value))
    return 0 if seen.state == "listening" else 1


def _facts(address: str) -> dict[str, Any] | None:
    """What a node says of itself; None if it does not answer within two seconds."""
    from kvferry.node import Node
    from kvferry.pool import messages
    from kvferry.pool.peer import Peer, Unreachable

    with Node(program="kvferry pool status") as node:
        try:
            peer = Peer(node, lambda timeout_ms: address)
            return peer.ask(messages.Status(), messages.Facts, time.monotonic() + 2).facts
        except (Unreachable, KvferryError):
            return None


def _pool_stop(chosen: argparse.Namespace) -> int:
    from kvferry.pool import embedded

    try:
        how = embedded.stop(int(1000 * chosen.timeout_s))
    except (KvferryError, OSError) as error:
        return _failed(error)
    said = {
        "nobody": "No pool node of your own runs",
        "stopped": "The pool node has left",
        "killed": f"The pool node did not leave within {chosen.timeout_s:g} s and was killed",
    }
    print(said[how])
    return 0


def _replay(chosen: argparse.Namespace) -> int:
    from kvferry.pool import replay

    try:
        capacities = [replay.capacity_tokens(words, chosen.token_bytes) for words in chosen.capacity.split(",")]
    except ValueError as error:
        chosen.parser.error(f"argument --capacity: {error}")
    try:
        requests = replay.read(chosen.trace)
    except (ValueError, OSError) as error:
        return _failed(error)
    prompts = sum(request.tokens for request in requests)
    print(
        f"{len(requests):,} requests, {prompts:,} tokens of prompts; counted are tokens of prompts, hits of whole blocks"
    )
    print("of the unbroken prefix; the optimum is Belady's, in blocks\n")
    print(replay.HEAD)
    results = []
    for result, best in replay.compare(
        requests, capacities, chosen.policy, block_tokens=chosen.block_tokens, token_bytes=chosen.token_bytes
    ):
        results.append(result)
        print(replay.row(result, best), flush=True)
    if chosen.plot is not None:
        replay.plot(results, chosen.plot)
        print(f"\n{chosen.plot}")
    return 0


def _failed(error: Exception) -> int:
    why: object = error
    if isinstance(error, OSError) and error.strerror:
        why = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    sys.stderr.write(f"kvferry: {why}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
