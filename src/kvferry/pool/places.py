"""Where a user's own node is to be found on this host, and what its configuration says.

The runtime directory holds its socket and locks, so it must be nobody else's; the log lies in the user's state directory,
the configuration in the one for configurations (XDG Base Directory Specification). Starts nothing; ``embedded`` does.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvferry.errors import InvalidArgument, Refused
from kvferry.options import parse_address, parse_size, shown

__all__ = [
    "OWN",
    "Settings",
    "log_file",
    "resolve",
    "runtime_directory",
    "secret",
    "secret_in",
    "settings",
    "socket_path",
]

OWN: Literal["own"] = "own"
LONGEST_SOCKET_PATH = 107  # bytes: the kernel's sockaddr_un holds one more, a zero
LONGEST_S = 1_000_000.0  # that a node may be told to wait
LOG_BYTES = 1 << 20  # from then on a starting node begins a new log and keeps one old one


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``~/.config/kvferry/pool.json``. All of it is optional, and so is the file."""

    members: str | list[str] = OWN  # as KVFERRY_POOL, or a list of addresses
    secret_file: str | None = None  # holds what links to these members must know
    memory: str | int | None = None  # the most that a node of your own may take, such as "8GiB"
    idle_s: float | None = None  # after which a node of your own leaves


def resolve(members: str | Sequence[str] | None) -> list[str] | Literal["private", "own"] | None:
    """Which pool is meant: addresses; a private one; the user's own node (``OWN``); None, none at all.

    What the caller says counts, else the environment's KVFERRY_POOL, else the configuration file, else ``OWN``.

    :raises InvalidArgument: something there is no address; the sentence says where it stands.
    """
    if members is not None:
        return _meant("members", members)
    if said := os.environ.get("KVFERRY_POOL", "").strip():
        return _meant("KVFERRY_POOL", said)
    return _meant(f"members in {_settings_file()}", settings().members)


def _meant(what: str, members: str | Sequence[str]) -> list[str] | Literal["private", "own"] | None:
    if members == "off":
        return None
    if members == "private":
        return "private"
    if members == OWN:
        return OWN
    listed = members.split(",") if isinstance(members, str) else list(members)
    addresses = [address.strip() if isinstance(address, str) else address for address in listed]
    if not addresses:
        raise InvalidArgument(f"{what} names no node; leave it out to use a node of your own, or say 'off'")
    for address in addresses:
        if not isinstance(address, str):
            raise InvalidArgument(f"{what} holds {shown(address)}, which is no str; addresses are")
        if address.startswith("unix:/"):
            continue
        try:
            parse_address(address)
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{what}: {error}. A path is absolute; words are 'off', 'private' and 'own'"
            ) from None
    return addresses


def settings() -> Settings:
    """What the configuration file says; all defaults where there is none.

    :raises InvalidArgument: it cannot be read, or says something else than what there is to say.
    """
    path = _settings_file()
    try:
        written = path.read_bytes() if path is not None else b"{}"
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return Settings()
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror}") from error
    try:
        found = msgspec.json.decode(written, type=Settings)
        if found.memory is not None:
            parse_size("memory", found.memory)
        if found.idle_s is not None and not 0 < found.idle_s <= LONGEST_S:
            raise InvalidArgument(f"idle_s={found.idle_s} is no time above 0 and up to {LONGEST_S:.0f} in seconds")
    except (msgspec.MsgspecError, InvalidArgument) as error:
        raise InvalidArgument(f"{path}: {error}") from None
    return found


def secret() -> bytes | None:
    """What links must know to the nodes that the environment or the configuration file names: the content of the file that
    KVFERRY_POOL_SECRET_FILE, else ``secret_file`` there names; None: neither does.

    :raises InvalidArgument: it cannot be read, or is empty.
    """
    if said := os.environ.get("KVFERRY_POOL_SECRET_FILE", "").strip():
        return secret_in(said, "KVFERRY_POOL_SECRET_FILE: ")
    path = settings().secret_file
    return None if path is None else secret_in(path, f"secret_file in {_settings_file()}: ")


def secret_in(path: str, who: str = "") -> bytes:
    """The bytes of a file without newlines at the end. :raises InvalidArgument: as `secret`, after ``who``."""
    try:
        # Whoever names a pipe by mistake does not wait for somebody who writes into it.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            content = (file.read() or b"").rstrip(b"\n")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"{who}{path!r} cannot be read: {why}") from None
    if not content:
        raise InvalidArgument(f"{who}{path!r} is empty: write the secret into it, or leave this out")
    return content


def runtime_directory(create: bool) -> Path:
    """The directory of sockets and locks: this user's alone. Made, with mode 0700, if ``create``; else it may not exist.

    ``$XDG_RUNTIME_DIR/kvferry``, else ``/run/user/UID/kvferry``, else ``/tmp/kvferry-UID``.

    :raises Refused: it, or the one above, is somebody else's, or others can write to it, or it is no directory.
    """
    uid = os.geteuid()
    above = Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}")
    if above.is_absolute() and above.is_dir():
        directory = above / "kvferry"
        _must_be_ours(above, os.stat(above), uid)
    else:
        directory = Path(f"/tmp/kvferry-{uid}")
    try:
        if create:
            directory.mkdir(mode=0o700, exist_ok=True)
        _must_be_ours(directory, os.lstat(directory), uid)
    except FileNotFoundError:
        pass
    except FileExistsError:  # a link that leads nowhere, or a file
        _must_be_ours(directory, os.lstat(directory), uid)
    except OSError as error:
        raise Refused(f"{directory} cannot be made: {error.strerror}. {_OTHERWISE}") from error
    return directory


_OTHERWISE = (
    "A pool node of your own needs a directory that only you can write to: mend it, point XDG_RUNTIME_DIR elsewhere, or set "
    "KVFERRY_POOL=private, off, or to the address of another node"
)


def _must_be_ours(path: Path, found: os.stat_result, uid: int) -> None:
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is a symbolic link" if stat.S_ISLNK(found.st_mode) else "is no directory"
    elif found.st_uid != uid:
        wrong = f"belongs to uid {found.st_uid}, and this process runs as uid {uid}"
    elif found.st_mode & 0o022:
        wrong = f"can be written to by others (mode {stat.S_IMODE(found.st_mode):o})"
    else:
        return
    raise Refused(f"{path} {wrong}. {_OTHERWISE}")


def socket_path(directory: Path) -> Path:
    """The node's socket in its runtime directory.

    :raises Refused: the kernel knows no sockets of such long names.
    """
    path = directory / "pool.sock"
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        raise Refused(f"{path} is too long for a socket: {LONGEST_SOCKET_PATH} bytes are allowed. {_OTHERWISE}")
    return path


def log_file(directory: Path) -> Path:
    """Where the node's log is: made room for, or in the runtime directory where the state directory cannot be written to."""
    state = _home("XDG_STATE_HOME", ".local/state")
    if state is not None:
        try:
            (state / "kvferry").mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(state / "kvferry", os.W_OK | os.X_OK):
                return state / "kvferry" / "pool.log"
        except OSError:
            pass
    return directory / "pool.log"


def _settings_file() -> Path | None:
    config = _home("XDG_CONFIG_HOME", ".config")
    return None if config is None else config / "kvferry" / "pool.json"


def _home(variable: str, otherwise: str) -> Path | None:
    """A base directory of the XDG specification: relative ones do not count, and a uid may have no home."""
    given = Path(os.environ.get(variable, ""))
    if given.is_absolute():
        return given
    home = Path(os.path.expanduser("~"))
    return home / otherwise if home.is_absolute() else None
