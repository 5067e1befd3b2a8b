"""Parse and check the text of settings: durations, sizes, node ranges, hosts, S3 URIs, data sources."""

import math
import posixpath
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.parse import urlsplit

from awsddp.errors import ConfigError

CLUSTER_NAME = re.compile(r"[a-z][a-z0-9-]{0,30}")
"""The form that a cluster's name must have."""
VARIABLE_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""The form that an environment variable's name must have."""
MAX_DURATION_S = 365 * 86400.0
MIN_EXPIRY = "1m"
"""The shortest `cluster.expires`: EC2 bills each instance for at least a minute.

https://aws.amazon.com/ec2/pricing/on-demand/
"""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|h|d|)")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_NODES = re.compile(r"(\d{1,4})(?::(\d{1,4}))?", re.ASCII)
_ON = re.compile(r"(\d{1,4})(?:-(\d{1,4}))?(?::(\d{1,3})(?:-(\d{1,3}))?)?", re.ASCII)
_SIZE = re.compile(r"(\d{1,9}(?:\.\d+)?)\s*(kB|[MGT]B)", re.IGNORECASE | re.ASCII)
_BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_DATA = re.compile(r"(?:([^/:.~=][^/:=]*)=)?(.*)", re.DOTALL)
_DATA_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}(?<!\.sent)")  # sync uses NAME.sent
_S3 = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])((?:/[^\x00-\x1f\x7f]*)?)")
_HF = re.compile(r"hf://datasets/(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w./-]*))?", re.ASCII)
_JUMP = re.compile(r"((?:\w[\w.@+-]*@)?)(?:\[([0-9A-Fa-f:.]+)\]|(\w[\w.-]*))(?::(\d{1,5}))?", re.ASCII)


def check_file_names() -> None:
    """Raise ConfigError unless this process can represent every file name that a node may send."""
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise ConfigError(
            f"Python cannot write every file name: its encoding is {encoding}",
            "the names of a job's result files may have any characters",
            "export PYTHONUTF8=1   # before Python starts; or LANG=C.UTF-8",
        )


def parse_duration(text: str) -> float:
    """Return a duration such as "90", "30s", "90m", "24h" or "7d" in seconds. Raises ConfigError."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid duration {text!r}", "", "use 30s, 90m, 24h or 7d   # docs/cost.md")
    duration_s = float(match[1]) * _SECONDS[match[2]]
    if duration_s > MAX_DURATION_S:
        raise ConfigError(f"{text[:40]!r} is out of range", "", "a duration of 365d or less")
    return duration_s


def parse_size(text: str) -> float:
    """Return the value of `job.results_limit`, such as "500MB" or "20GB", in bytes. Raises ConfigError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"invalid size {text!r}", "", "use 500MB, 20GB or 1.5TB   # docs/results.md")
    return float(match[1]) * _BYTES[match[2].upper()]


def parse_nodes_range(text: str) -> tuple[int, int]:
    """Return MIN and MAX of `job.nnodes`, which is "MIN:MAX" or a number. Raises ConfigError."""
    match = _NODES.fullmatch(text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 0 < low <= high:
        raise ConfigError(f"invalid range {text!r}", "", "write it as MIN:MAX, such as 1:4")
    return low, high


def parse_gpus(text: str) -> dict[int, tuple[int, ...]]:
    """Return {node: GPUs} for the nodes in `job.on`; () means all of a node's GPUs.

    Raises ConfigError if the text is invalid.
    """
    gpus_by_node: dict[int, tuple[int, ...]] = {}
    for part in text.split(","):
        match = _ON.fullmatch(part.strip())
        nodes = _number_range(match[1], match[2]) if match else ()
        gpus = _number_range(match[3], match[4]) if match and match[3] else ()
        if not nodes or (match and match[3] and not gpus) or not gpus_by_node.keys().isdisjoint(nodes):
            raise ConfigError(
                f"invalid value {text!r}",
                f"{part!r} is neither nodes nor GPUs of nodes, or names a node twice",
                "write it as 0,2-3 (nodes) or 0:4-7,1:0-3 (GPUs of nodes)",
            )
        gpus_by_node |= dict.fromkeys(nodes, gpus)
    return dict(sorted(gpus_by_node.items()))


def _number_range(first: str, last: str | None) -> tuple[int, ...]:
    return tuple(range(int(first), int(last or first) + 1))


def parse_idle(text: str) -> int:
    """Return the value of `cluster.idle` in seconds; 0 for "off". Raises ConfigError."""
    idle_s = 0 if text == "off" else int(parse_duration(text))
    if idle_s == 0 and text != "off":
        raise ConfigError(f"{text!r} is too short", "", 'from 1s to 365d, or "off"')
    return idle_s


def parse_jump_host(text: str) -> tuple[str, int | None]:
    """Return the ssh destination in `network.jump`, and its port or None if no port is given.

    Raises ConfigError.
    """
    match = _JUMP.fullmatch(text)
    if match is None or not 0 < int(match[4] or 22) < 65536:
        raise ConfigError(
            f"invalid jump host {text!r}",
            "network.jump takes only one host; configure more hops with ProxyJump in ~/.ssh/config",
            "use user@host, user@host:2222, or a name in your ~/.ssh/config",
        )
    return f"{match[1]}{match[2] or match[3]}", int(match[4]) if match[4] else None


def parse_s3_uri(text: str) -> tuple[str, str]:
    """Return the bucket and the prefix of an S3 URI, s3://bucket/prefix. Raises ConfigError."""
    match = _S3.fullmatch(text)
    if match is None:
        why = "an S3 URI has a bucket and a prefix of object keys"
        raise ConfigError(f"invalid S3 URI {text!r}", why, "write it as s3://bucket/prefix")
    return match[1], match[2].strip("/")


def parse_notify_url(url: str) -> str:
    """Return the host of the secret URL `notify.url`. Raises ConfigError, whose texts do not have the URL."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or "@" in parts.netloc or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            "the URL is not valid",
            "it begins with https:// or http://, and has no spaces and no name or password before its host",
            "read -rs AWSDDP_NOTIFY_URL && export AWSDDP_NOTIFY_URL   # enter the URL",
        )
    return str(parts.hostname)


def range_check(low: int, high: int) -> Callable[[int], None]:
    """Return a function that raises ConfigError if a number is not between `low` and `high`."""

    def check(value: int) -> None:
        if not low <= value <= high:
            raise ConfigError(f"{value} is out of range", "", f"use a whole number from {low} to {high}")

    return check


def check_positive_amount(usd: float) -> None:
    """Raise ConfigError if an amount in US dollars is not finite and positive."""
    if not (math.isfinite(usd) and usd > 0):
        raise ConfigError(f"{usd} is not an amount", "", "use US dollars, such as 20")


def min_duration_check(least: str, why: str) -> Callable[[str], None]:
    """Return a function that raises ConfigError, with `why` as the reason, if a duration is under `least`."""

    def check(text: str) -> None:
        if parse_duration(text) < parse_duration(least):
            raise ConfigError(f"{text!r} is too short", why, f"use {least} or more")

    return check


class Source(NamedTuple):
    """A data source, and the name that the data gets on the nodes.

    `at` and `part` are a bucket and a prefix, a Hugging Face data set and a revision, or a local folder and
    "".
    """

    name: str
    kind: Literal["s3", "hf", "folder"]
    at: str
    part: str

    def __str__(self) -> str:
        if self.kind == "s3":
            return f"s3://{self.at}/{self.part}".rstrip("/")
        return self.at if self.kind == "folder" else f"hf://datasets/{self.at}@{self.part}"


def parse_data_sources(texts: Iterable[str]) -> tuple[Source, ...]:
    """Return the sources in `data.sources`, each written as "[NAME=]SOURCE". Raises ConfigError."""
    sources: dict[str, Source] = {}
    for text in texts:
        match = _DATA.fullmatch(text)
        assert match is not None, "it matches any text"
        source = _parse_source(match[2])
        if not _DATA_NAME.fullmatch(name := match[1] or source.name):
            raise ConfigError(
                f"invalid name {name!r} of data",
                "a name has up to 100 letters, digits, dots, dashes and underscores",
                f"--data NAME={match[2]}",
            )
        if name in sources:
            raise ConfigError(f"two data sources have the name {name}", "", f"--data NAME={match[2]}")
        sources[name] = source._replace(name=name)
    return tuple(sources.values())


def _parse_source(text: str) -> Source:
    """Return the source that `text` describes, with its default name. Raises ConfigError."""
    if match := _S3.fullmatch(text):
        prefix = match[2].strip("/")
        return Source(posixpath.basename(prefix or match[1]), "s3", match[1], prefix)
    if match := _HF.fullmatch(text):
        return Source(match[1].rpartition("/")[2], "hf", match[1], match[2] or "main")
    if text in (".", "..") or text.startswith(("./", "../", "/", "~/")):
        return Source(Path(text).expanduser().absolute().resolve().name, "folder", text, "")
    raise ConfigError(
        f"invalid source {text!r}",
        "",
        "use s3://bucket/prefix, hf://datasets/NAME[@REVISION] or ./folder   # docs/data.md",
    )


def check_name(name: str) -> None:
    """Raise ConfigError for an invalid cluster name."""
    if not CLUSTER_NAME.fullmatch(name):
        raise ConfigError(
            f"invalid cluster name {name!r}",
            "a name is a lower-case letter, then up to 30 lower-case letters, digits and dashes",
            "try: awsddp -c my-cluster ...",
        )
