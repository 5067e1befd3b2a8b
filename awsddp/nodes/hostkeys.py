"""Key pairs, and each instance's accepted host keys in known_hosts.

Host keys are stored by instance id (HostKeyAlias), because addresses are reused. An instance has two keys
while its host key is being changed. A key that is not in known_hosts is refused without a prompt.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from awsddp.errors import ConfigError
from awsddp.state import ClusterFolder, make_folder, write_private

_KEY = re.compile(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+={0,2}")


@dataclass(frozen=True, kw_only=True)
class KeyPair:
    """An ed25519 key pair: `private` is in OpenSSH's PEM form, and `public` is one line with a comment."""

    private: str = field(repr=False)
    public: str


def make_key(comment: str) -> KeyPair:
    """Generate an ed25519 key pair, for a login or for a host. `comment` ends the public line."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return KeyPair(private=private.decode(), public=f"{public.decode()} {comment}")


def ensure_login_key(folder: ClusterFolder, *, user_key: Path | None) -> str:
    """Create the cluster's login key if it does not exist, and return the key's public half.

    If the user has a private key (`user_key`), create a symbolic link to that key instead, and return "".
    """
    if user_key is not None:
        make_folder(folder.path)
        folder.key.unlink(missing_ok=True)
        folder.key.symlink_to(user_key)
        return ""
    public = folder.path / "key.pub"
    if not (folder.key.exists() and public.exists()):
        key_pair = make_key(f"awsddp {folder.name}")
        write_private(folder.key, key_pair.private.encode())
        write_private(public, key_pair.public.encode() + b"\n")
    return public.read_text(encoding="utf-8").strip()


def strip_comment(public: str) -> str:
    """Return a public key line's type and key, without the comment. Raises ConfigError."""
    line = " ".join(public.split()[:2])
    if not _KEY.fullmatch(line):
        raise ConfigError(f"invalid public key {public!r}")
    return line


def load_keys(known_hosts: Path) -> dict[str, tuple[str, ...]]:
    """Return {instance id: accepted keys}, or {} if the file does not exist. Raises ConfigError."""
    try:
        lines = known_hosts.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {known_hosts}", str(error)) from error
    keys: dict[str, tuple[str, ...]] = {}
    for line in lines:
        instance_id, _, key = line.strip().partition(" ")
        if instance_id and _KEY.fullmatch(key):
            keys[instance_id] = (*keys.get(instance_id, ()), key)
    return keys


def add_keys(known_hosts: Path, keys: Mapping[str, str]) -> None:
    """Add an accepted public key for each instance in `keys`. Raises ConfigError."""
    accepted = load_keys(known_hosts)
    for instance_id, public in keys.items():
        accepted[instance_id] = tuple(dict.fromkeys((*accepted.get(instance_id, ()), strip_comment(public))))
    _write(known_hosts, accepted)


def set_keys(known_hosts: Path, keys: Mapping[str, str]) -> None:
    """Replace the accepted keys for each instance in `keys` with one public key. Raises ConfigError."""
    accepted = load_keys(known_hosts) | {
        instance_id: (strip_comment(public),) for instance_id, public in keys.items()
    }
    _write(known_hosts, accepted)


def remove_instances(known_hosts: Path, instance_ids: Iterable[str]) -> None:
    """Remove all of the terminated instances' keys. Raises ConfigError."""
    accepted = load_keys(known_hosts)
    for instance_id in instance_ids:
        accepted.pop(instance_id, None)
    _write(known_hosts, accepted)


def _write(known_hosts: Path, keys: Mapping[str, tuple[str, ...]]) -> None:
    text = "".join(f"{instance_id} {key}\n" for instance_id, lines in keys.items() for key in lines)
    if not known_hosts.is_file() or known_hosts.read_text(encoding="utf-8", errors="replace") != text:
        write_private(known_hosts, text.encode())
