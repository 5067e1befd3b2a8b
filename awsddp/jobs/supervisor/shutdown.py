"""Why the node itself goes down: what the user data's scripts leave in /run, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from awsddp.jobs.supervisor.job_causes import cause_of_node

LIMIT_SECONDS = 110.0
"""The longest grace at a shutdown: awsddp-jobs.service holds it up for 120 s."""
_REASON = Path("/run/awsddp/shutdown")
_REASONS = {
    "expires": ("expired", "it expired (cluster.expires)"),
    "spot": ("spot_interruption", "AWS reclaims the spot instance"),
    "reboot": ("interrupted", "it was rebooted"),
    "poweroff": ("interrupted", "it was powered off, from inside or by a stop of the instance"),
}


def shutdown(request: dict[str, Any], file: Path = _REASON) -> dict[str, Any]:
    """Return how the job is to end at a shutdown of this node: its state, grace (s) and cause."""
    try:
        word, _, moment = file.read_text(encoding="ascii", errors="replace").strip().partition(" ")
    except OSError:
        word, moment = "", ""
    kind, reason = _REASONS.get(word, ("interrupted", "its supervisor got SIGTERM"))
    at = f" at {moment}" if moment else ""
    why = f"node{request['node']} was shut down while the job ran: {reason}{at}"
    return {
        "state": "interrupted",
        "grace": min(request["grace"], LIMIT_SECONDS),
        "cause": cause_of_node(
            request, request["node"], kind, why=why, **({"time": moment} if moment else {})
        ),
    }
