"""Run uv, which resolves a project's requirements."""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TIMEOUT_S = 300.0
_ERROR = re.compile(r"^(?:error:|\s*\u00d7).*", re.MULTILINE | re.DOTALL)
"""The error in uv's output, which follows the warnings."""
_FRAME = re.compile("[\u2500-\u25ff\u00d7]|cause:|Caused by:")
"""The characters and labels that uv puts around the text of an error; they depend on uv's release."""


@dataclass(frozen=True)
class UvOutput:
    """The lines of uv's stdout, the text of its stderr, and the error as one line in `failure` ("": no
    failure).
    """

    lines: tuple[str, ...] = ()
    stderr: str = ""
    failure: str = ""


def run_uv(
    arguments: Sequence[str], env: Mapping[str, str], *, folder: Path, python: str = sys.executable
) -> UvOutput:
    """Run uv in `folder` for the Python `python` and return its output; a timeout is a `failure`.

    uv's own configuration files and variables are ignored, except for its cache: nodes install with pip, and
    both have to use the same indexes.
    """
    environ = {key: value for key, value in os.environ.items() if key[:3] != "UV_" or key == "UV_CACHE_DIR"}
    timeout_s = os.environ.get("PIP_DEFAULT_TIMEOUT", "15")
    environ |= {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": timeout_s, **env}
    try:
        from uv import find_uv_bin

        argv = [find_uv_bin(), *arguments, "--no-config", "--color", "never", "--python", python]
        process = subprocess.run(
            argv, cwd=folder, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return UvOutput(failure=f"uv did not end within {_TIMEOUT_S:.0f} s")
    except (ImportError, OSError) as error:
        return UvOutput(failure=f"uv cannot be run: {error}")
    stderr = process.stderr.decode(errors="replace")
    lines = tuple(process.stdout.decode(errors="replace").splitlines())
    match = _ERROR.search(stderr)
    failure = " ".join(_FRAME.sub(" ", match[0] if match else stderr).split()).removeprefix("error: ")
    return UvOutput(lines, stderr, (failure or "it failed") if process.returncode else "")


def write_python_without_builds(folder: Path) -> str:
    """Write to `folder` a program that runs as Python but cannot build packages, and return its path.

    The first command that uv runs with a Python is uv's own, and inspects the interpreter. The program runs
    that command and fails for all later commands, because they would run a package's code.
    """
    folder_of_python = Path(tempfile.mkdtemp(dir=folder))
    program, marker = folder_of_python / "python", shlex.quote(str(folder_of_python / "was-asked"))
    code = "import sys; sys.executable = sys._base_executable = sys.argv[1]; exec(sys.argv[-1])"
    program.write_text(
        f"#!/bin/sh\nmkdir {marker} 2>&- || exit 1\n"
        f'exec {shlex.quote(sys.executable)} -I -B -c {shlex.quote(code)} "$0" "$@"\n'
    )
    program.chmod(0o700)
    return str(program)
