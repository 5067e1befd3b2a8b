"""How a script receives the checkpoint from which it resumes."""

from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.cli.command_line import COMMAND, resume_command
from awsddp.model.records import JobRecord
from tests.support.resuming import NOTE, make_session


@pytest.mark.parametrize(
    ("script", "text", "args", "expected"),
    [
        ("a.py", "os.environ['AWSDDP_RESUME']", (), "a.py"),
        ("a.py", "", ("--from", "{resume}"), "a.py -- --from '{resume}'"),
        ("a.py", "add_argument('--resume')", ("--lr", "1"), "a.py -- --lr 1 --resume '{resume}'"),
        ("m.n", 'add_argument("--resume-from", type=str)', (), "m.n -- --resume-from '{resume}'"),
        ("a.py", "HfArgumentParser(TrainingArguments)", (), "a.py -- --resume_from_checkpoint '{resume}'"),
        ("a.py", "add_argument('--resume', action='store_true')", (), f"a.py{NOTE}"),
        ("a.py", "add_argument('--checkpoint', help='where to save')", (), f"a.py{NOTE}"),
        ("gone.py", None, (), f"gone.py{NOTE}"),
    ],
)
def test_the_resume_command_passes_the_checkpoint_or_notes_that_the_script_must_read_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    text: str | None,
    args: tuple[str, ...],
    expected: str,
) -> None:
    monkeypatch.setattr(COMMAND, "session", make_session(tmp_path, script))
    if text is not None:
        path = tmp_path / ("m/n.py" if script == "m.n" else script)
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    job = JobRecord(
        job="oom",
        state="failed",
        cause=None,
        ranks=(),
        home="",
        script=script,
        args=args,
        options=("-o", "env.file=requirements.txt", "-o", "job.after=hang"),
        started="2026-11-28T00:00:00Z",
    )
    assert resume_command(job) == f"awsddp train --env requirements.txt --resume oom {expected}"
    assert "--after hang" in resume_command(replace(job, started=None)), "the other job may still run"
