"""A session that resumes from the checkpoint of the last job."""

from pathlib import Path

from awsddp.session.context import Session
from awsddp.settings.loader import load

NOTE = "   # the script has to read $AWSDDP_RESUME"


def make_session(tmp_path: Path, script: str | None) -> Session:
    overrides = {"sync.workdir": str(tmp_path), "job.script": script, "job.resume": "last"}
    settings = load("default", overrides=overrides, environ={})
    return Session(name="default", home=tmp_path / "home", settings=settings)
