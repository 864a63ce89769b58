"""``python -m demo``: what was asked, and how it ended.

Exit status: 0 all handovers and the pool's blocks gave the undivided run's tokens, 1 some did not or no block was found in
the pool, 2 it could not be run (the last lines say why).
"""

import argparse
import importlib
import importlib.util
import shutil
import sys
import time
from pathlib import Path

from demo.channel import WorkerFailedError
from demo.play import play
from demo.report import render
from demo.weights import WeightsMissingError, smollm2

NEEDED = ("kvferry", "torch", "transformers", "accelerate", "gguf")


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    missing = what_is_missing()
    if missing:
        return _cannot(
            f"This Python ({sys.executable}) lacks {missing}.\n"
            "`make demo` sets up an environment that has all of it, and runs the demo there."
        )
    if asked.model is not None and not (asked.model / "config.json").exists():
        return _cannot(f"{asked.model} is no model folder: it has no config.json.")
    started = time.monotonic()
    try:
        if asked.tiny:
            name = "tiny"
        elif asked.model is None:
            name = str(smollm2())
        else:
            name = str(asked.model.resolve())
        outcome = play(name, asked.tokens, _say)
    except (WeightsMissingError, WorkerFailedError) as error:
        return _cannot(str(error))
    print("\n" + render(outcome, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    print(f"\n{time.monotonic() - started:.0f} s in all")
    return 0 if outcome.holds else 1


def what_is_missing() -> str:
    """The packages that this Python would need and does not have, in words; ``""``: none."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if "kvferry" not in missing:
        try:
            importlib.import_module("kvferry")
        except ImportError as error:
            missing.insert(0, f"kvferry's native core ({error})")
    return ", ".join(missing)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo",
        description="Prefill in one process, decode in another, the KV cache handed over by kvferry in every way it knows; "
        "then kept in a pool, so that a longer prompt begins where the first one ended.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--model", type=Path, metavar="PATH", help="folder of a causal language model (default: SmolLM2)"
    )
    which.add_argument("--tiny", action="store_true", help="a made-up model of a fixed seed: seconds, nothing to fetch")
    parser.add_argument("--tokens", type=_at_least_one, default=16, metavar="N", help="tokens to decode (default 16)")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens, 1 or more")
    return int(text)


def _say(line: str) -> None:
    print(f"· {line}", flush=True)


def _cannot(reason: str) -> int:
    print(f"\n{reason}\n", file=sys.stderr)
    return 2


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except KeyboardInterrupt:
        raise SystemExit(130) from None
