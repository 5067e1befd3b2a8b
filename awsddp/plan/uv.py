"""Calls uv, which reads what a project asks for."""

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
"""Its error, below its warnings."""
_FRAME = re.compile("[\u2500-\u25ff\u00d7]|cause:|Caused by:")
"""What it draws around its words, by its release."""


@dataclass(frozen=True)
class Said:
    """What uv wrote, line by line; what it `told` beside that; its `failure` on one line, "" for none."""

    lines: tuple[str, ...] = ()
    told: str = ""
    failure: str = ""


def run_uv(
    words: Sequence[str], env: Mapping[str, str], *, folder: Path, python: str = sys.executable
) -> Said:
    """Run uv in a folder, for a Python, and return what it said; also that it is not there, or took too long.

    Its own settings, of this machine or a project, do not count, nor its variables but that of its cache:
    nodes install by pip, and both are to find packages in the same places.
    """
    own = {key: value for key, value in os.environ.items() if key[:3] != "UV_" or key == "UV_CACHE_DIR"}
    timeout_s = os.environ.get("PIP_DEFAULT_TIMEOUT", "15")
    own |= {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_RETRIES": "1", "UV_HTTP_TIMEOUT": timeout_s, **env}
    try:
        from uv import find_uv_bin

        argv = [find_uv_bin(), *words, "--no-config", "--color", "never", "--python", python]
        done = subprocess.run(
            argv, cwd=folder, env=own, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return Said(failure=f"uv did not end within {_TIMEOUT_S:.0f} s")
    except (ImportError, OSError) as error:
        return Said(failure=f"uv cannot be run: {error}")
    told = done.stderr.decode(errors="replace")
    lines = tuple(done.stdout.decode(errors="replace").splitlines())
    found = _ERROR.search(told)
    failure = " ".join(_FRAME.sub(" ", found[0] if found else told).split()).removeprefix("error: ")
    return Said(lines, told, (failure or "it failed") if done.returncode else "")


def python_without_builds(folder: Path) -> str:
    """Write a Python that builds no package, and return its path.

    The first command that uv gives a Python is uv's own question what it is; this one answers it, as the path
    by which uv calls it, and refuses all later ones, which would be a package's code.
    """
    own = Path(tempfile.mkdtemp(dir=folder))
    program, once = own / "python", shlex.quote(str(own / "was-asked"))
    answer = "import sys; sys.executable = sys._base_executable = sys.argv[1]; exec(sys.argv[-1])"
    program.write_text(
        f"#!/bin/sh\nmkdir {once} 2>&- || exit 1\n"
        f'exec {shlex.quote(sys.executable)} -I -B -c {shlex.quote(answer)} "$0" "$@"\n'
    )
    program.chmod(0o700)
    return str(program)
