"""Command lines of users of torchrun, SkyPilot or python: each works, or a hint has the right line."""

import sys
from pathlib import Path

import pytest

from awsddp.agent_client.rank_layout import resolve_interpreter
from awsddp.api.cluster import Cluster
from awsddp.cli import failures
from awsddp.cli.main import cli
from awsddp.errors import AwsddpError
from awsddp.settings.spec import KEYWORDS, JobSection, JobSpec, SyncSection


@pytest.fixture
def run_line(tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    """Return a function: it runs a command line up to its verb; returns the job, the output and the code."""
    (tmp_path / "teacher").mkdir()
    for name in ("tiny.py", "teacher/deep.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TOKEN_HERE", "from here")
    jobs: list[JobSpec] = []

    def reach(ctx, **_):  # type: ignore[no-untyped-def]
        jobs.append(ctx.job_spec)
        raise failures.UsageError("reached")

    monkeypatch.setattr("awsddp.job.train.train", reach)

    def run(*arguments: str) -> tuple[JobSpec | None, str, int]:
        monkeypatch.setattr(sys, "argv", ["awsddp", *arguments])
        code = failures.run_command(cli)
        output = capsys.readouterr()
        return (jobs.pop() if jobs else None), output.out + output.err, code

    return run


@pytest.mark.parametrize(
    ("args", "key", "value"),
    [
        (["-m", "pkg"], "job.module", True),
        (["-m", "pkg"], "job.script", "pkg"),
        (["tiny.py", "--nproc_per_node", "4"], "job.nproc_per_node", 4),
        (["tiny.py", "--nproc_per_node=gpu"], "job.nproc_per_node", None),
        (["tiny.py", "--max_restarts=2", "--world_size", "2"], "job.max_restarts", 2),
        (["tiny.py", "--env", "A=1", "--env", "B=2"], "env.variables", {"A": "1", "B": "2"}),
        (["tiny.py", "--env", "A=1", "--env", "need.txt"], "env.file", "need.txt"),
        (["tiny.py", "--env-var", "TOKEN_HERE"], "env.secrets", ("TOKEN_HERE",)),
        (["tiny.py", "--env-var", "TOKEN_HERE"], "env.variables", {}),
        (["tiny.py", "-o=job.grace=5s"], "job.grace", "5s"),
        (["tiny.py", "--", "--local_rank", "1"], "job.args", ("--local_rank", "1")),
        (["{cwd}/teacher/deep.py"], "job.script", "teacher/deep.py"),
        (["teacher/deep.py", "-o", "sync.workdir=teacher"], "job.script", "deep.py"),
        (["deep.py", "-o", "sync.workdir=teacher"], "job.script", "deep.py"),
    ],
)
def test_a_command_line_sets_a_key(run_line, args: list[str], key: str, value: object) -> None:  # type: ignore[no-untyped-def]
    job, output, _ = run_line("train", *(arg.replace("{cwd}", str(Path.cwd())) for arg in args))
    assert job is not None, output
    section, _, name = key.partition(".")
    assert getattr(getattr(job, section), name) == value


def test_env_with_a_value_names_the_right_option(run_line) -> None:  # type: ignore[no-untyped-def]
    assert "--env-var A=..." in run_line("train", "tiny.py", "--env", "A=1")[1]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "tiny.py", "--batch-size", "64"], "awsddp train tiny.py -- --batch-size 64"),
        (["train", "tiny.py", "--local_rank", "0"], "awsddp train tiny.py -- --local_rank 0"),
        (["train", "tiny.py", "--lr=1", "--", "x"], "awsddp train tiny.py -- --lr=1 x"),
        (["train", "-m", "pkg", "--lr", "1"], "awsddp train -m pkg -- --lr 1"),
        (["train", "--worldsize", "4"], "--world-size"),
        (["train", "tiny.py", "--env-var", "NOT-A-NAME"], "--env-var NOT-A-NAME: not the name of a variable"),
        (["up", "--env", "A=1"], "awsddp train --env-var A=VALUE"),
        (["launch", "task.yaml"], "awsddp up"),
        (["list"], "awsddp status --all"),
        (["ps"], "awsddp jobs"),
        (["queue"], "awsddp jobs"),
        (["destroy"], "awsddp down"),
        (["help", "nope"], "Unknown command 'nope'"),
    ],
)
def test_a_wrong_command_line_has_a_hint(run_line, arguments: list[str], hint: str) -> None:  # type: ignore[no-untyped-def]
    job, output, code = run_line(*arguments)
    assert (job, code) == (None, 2)
    assert hint in output


def test_help_accepts_a_verb(run_line) -> None:  # type: ignore[no-untyped-def]
    assert "Usage: awsddp train" in run_line("help", "train")[1]
    assert "Usage: awsddp local start" in run_line("help", "local", "start")[1]
    output, code = run_line("help")[1:]
    assert ("Usage: awsddp" in output, code) == (True, 0)


@pytest.mark.parametrize(
    ("name", "text", "mode", "command"),
    [
        ("a.py", "#!/usr/bin/python\n", 0o755, ("/env/bin/python", "a.py")),
        ("a.sh", "echo\n", 0o644, ("bash", "./a.sh")),
        ("a.sh", "#!/bin/zsh -e\n", 0o644, ("/bin/zsh", "-e", "./a.sh")),
        ("tool", "#!/usr/bin/env perl\n", 0o644, ("/usr/bin/env", "perl", "./tool")),
        ("tool", "\x7fELF", 0o755, ("./tool",)),
        ("notes", "print(1)\n", 0o644, ("/env/bin/python", "notes")),
        ("-c.py", "", 0o644, ("/env/bin/python", "./-c.py")),
    ],
)
def test_a_script_runs_with_its_interpreter(
    tmp_path: Path, name: str, text: str, mode: int, command: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(mode)
    spec = JobSpec(job=JobSection(script=name), sync=SyncSection(workdir=str(tmp_path)))
    before, begin = resolve_interpreter(spec, name, python="/env/bin/python")
    assert (*before, begin + name) == command


_WRONG = {
    "cluster.nodes": ("--nodes", 0),
    "cluster.disk_gb": ("--disk", 0),
    "cluster.idle": ("--idle", "5x"),
    "cluster.expires": ("--expires", "366d"),
    "data.sources": ("--data", "nowhere"),
    "job.world_size": ("--world-size", 0),
    "job.nproc_per_node": ("--nproc-per-node", 2000),
    "job.max_restarts": ("--max-restarts", -1),
    "job.nnodes": ("--nnodes", "4:1"),
    "job.on": ("--on", "first"),
    "job.timeout": ("--timeout", "soon"),
    "job.hang_after": ("", "5x"),
    "job.grace": ("", "x"),
    "job.heartbeat_timeout": ("", "1s"),
    "job.results_limit": ("", "many"),
    "network.jump": ("", "a b"),
    "network.address": ("", "hidden"),
    "capacity.efa": ("", "perhaps"),
}


@pytest.mark.parametrize(
    ("key", "source"),
    [
        (key, source)
        for source in ("option", "-o", "variable", "file", "keyword")
        for key, (option, _) in _WRONG.items()
        if option or source != "option"
    ],
)
def test_an_error_names_the_source_of_the_value(  # type: ignore[no-untyped-def]
    run_line, monkeypatch: pytest.MonkeyPatch, key: str, source: str
) -> None:
    (option, value), (section, _, name) = _WRONG[key], key.partition(".")
    arguments = {"option": [option, str(value)], "-o": ["-o", f"{key}={value}"]}.get(source, [])
    variable = f"AWSDDP_{section}_{name}".upper()
    if source == "variable":
        monkeypatch.setenv(variable, str(value))
    if source == "file":
        Path("awsddp.toml").write_text(f"[{section}]\n{name} = {value!r}\n")
    keyword = next(alias for alias, path in KEYWORDS.items() if path == key)
    if source == "keyword":
        with pytest.raises(AwsddpError) as refused:
            Cluster("typed", **{keyword: value}).plan()
        output, code = f"error: {refused.value}", refused.value.exit_code
    else:
        _, output, code = run_line("run", *arguments)
    labels = {"-o": f"-o {key}", "variable": variable, "file": f"awsddp.toml: [{section}] {name}"}
    label = labels.get(source, option if source == "option" else keyword)
    assert code == 3
    assert output.startswith((f"error: {label}: ", f"error: {label} holds for one command")), output


def test_contradicting_keys_are_named_as_they_were_typed(run_line) -> None:  # type: ignore[no-untyped-def]
    arguments = ["train", "tiny.py", "--max-restarts", "1", "-o", "job.launcher=ssh"]
    assert run_line(*arguments)[1].startswith("error: -o job.launcher: ssh does not support --max-restarts\n")
