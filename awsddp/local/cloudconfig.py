"""A small carrying-out of user data, for hosts that have no cloud-init: what awsddp sends, and plain scripts.

`/etc/...` and `/run/awsddp` in it mean the folders of a host, whose path is put before them everywhere.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import IO, Any

from awsddp.local.place import run_into

PATIENCE_S = 120.0
OWN = re.compile(r"(?<![\w./-])(/etc/|/run/awsddp\b)")


Run = Callable[[list[str]], list[str]]
"""Runs a command and returns what went wrong."""


def carry_out(
    user_data: bytes, *, root: Path, first: bool, environ: dict[str, str], console: IO[bytes]
) -> None:
    """Does what the user data asks for and writes cloud-init's result file.

    :param first: the instance's first boot; later ones run `bootcmd` alone.
    """
    text = OWN.sub(lambda found: f"{root}{found[1]}", user_data.decode(errors="replace"))
    run = partial(_run, environ, console)
    errors: list[str] = []
    if text.startswith("#cloud-config"):
        errors = _cloud_config(text, root, first=first, run=run)
    elif text.startswith("#!") and first:
        script = root / "run/user-data"
        script.write_text(text)
        script.chmod(0o700)
        errors = run([str(script)])
    result = root / "run/cloud-init/result.json"
    result.write_text(json.dumps({"v1": {"datasource": "DataSourceLocal", "errors": errors}}))


def _cloud_config(text: str, root: Path, *, first: bool, run: Run) -> list[str]:
    yaml: Any = importlib.import_module("yaml")  # comes with moto's server; it has no types
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"Failed loading yaml blob: {error}"]
    if not isinstance(config, dict):
        return ["the user data is not a mapping"]
    errors: list[str] = []
    if first:
        _host_keys(config.get("ssh_keys") or {}, root / "etc/ssh")
        for file in config.get("write_files") or []:
            path = root / file["path"].removeprefix(str(root)).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.get("content", ""))
            path.chmod(int(str(file.get("permissions", "0644")), 8))
    commands = [*(config.get("bootcmd") or []), *((config.get("runcmd") or []) if first else [])]
    for command in commands:
        words = ["sh", "-c", command] if isinstance(command, str) else [str(word) for word in command]
        errors += run(words)
    return errors


def _host_keys(keys: dict[str, str], folder: Path) -> None:
    for name, text in keys.items():
        kind, _, half = name.rpartition("_")
        path = folder / f"ssh_host_{kind}_key{'.pub' if half == 'public' else ''}"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(text if text.endswith("\n") else f"{text}\n")


def _run(environ: dict[str, str], console: IO[bytes], words: list[str]) -> list[str]:
    try:
        status = run_into(console, *words, env=environ, timeout=PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return [f"{words[0]}: exit {status}"] if status else []
