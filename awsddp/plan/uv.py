"""Calls uv, which reads what a project asks for."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_KEPT = ("UV_CACHE_DIR", "UV_LINK_MODE")


@dataclass(frozen=True)
class Said:
    """What uv wrote, line by line, and what it said of its failure: "" for none."""

    lines: tuple[str, ...]
    told: str
    failure: str


def run_uv(words: Sequence[str], env: Mapping[str, str] | None = None, *, timeout_s: float = 60.0) -> Said:
    """Run uv with the variables `env`, and return what it said; also that it is not there, or took too long.

    Neither its own settings, of this machine or a project, nor its variables count: nodes install by pip.
    """
    own = {key: value for key, value in os.environ.items() if not key.startswith("UV_") or key in _KEPT}
    own |= {"UV_PYTHON_DOWNLOADS": "never", "UV_HTTP_RETRIES": "1", **(env or {})}
    own["UV_HTTP_TIMEOUT"] = os.environ.get("PIP_DEFAULT_TIMEOUT", "15")
    try:
        from uv import find_uv_bin

        command = [find_uv_bin(), *words, "--no-config", "--color", "never", "--python", sys.executable]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env=own, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Said((), "", f"uv did not end within {timeout_s:.0f} s")
    except (ImportError, OSError) as error:
        return Said((), "", f"uv cannot be run: {error}")
    told = done.stderr.decode(errors="replace")
    return Said(
        tuple(done.stdout.decode(errors="replace").splitlines()), told, told if done.returncode else ""
    )
