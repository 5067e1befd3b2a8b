"""A project folder with odd file names, and the files of it that sync sends."""

from pathlib import Path

from awsddp.nodes.project_files import list_files_to_send

ODD_NAMES = [
    " ",
    "a b",
    "'",
    '"',
    "$(touch canary)",
    "-rf",
    "--delete",
    "new\nline",
    "tab\t",
    "*",
    "?",
    "[a]",
    "#x",
    ";",
    "\\",
    "end\\",
    "%s",
    "@@{key}",
    ":",
    "node0:",
    "~",
    "ünï",
    "\udcff\udcfe",
    "...",
    "..a",
    " lead",
    "trail ",
    "x" * 200,
]


def write_files(root: Path, *paths: str) -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(path.encode("utf-8", "surrogateescape").hex())


def names(root: Path, *ignore: str, **settings: object) -> list[str]:
    return [entry.path for entry in list_files_to_send(root, ignore, **settings).entries]  # type: ignore[arg-type]
