"""What people type who know torchrun, SkyPilot or python: it works, or a hint holds the right line."""

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
def typed(tmp_path, monkeypatch, capsys):  # type: ignore[no-untyped-def]
    """Runs a command line up to its verb, in a folder with scripts; returns the code, the job and stderr."""
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

    def run(*words: str) -> tuple[JobSpec | None, str, int]:
        monkeypatch.setattr(sys, "argv", ["awsddp", *words])
        code = failures.run_command(cli)
        said = capsys.readouterr()
        return (jobs.pop() if jobs else None), said.out + said.err, code

    return run


@pytest.mark.parametrize(
    ("words", "key", "value"),
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
def test_line_works(typed, words: list[str], key: str, value: object) -> None:  # type: ignore[no-untyped-def]
    job, said, _ = typed("train", *(word.replace("{cwd}", str(Path.cwd())) for word in words))
    assert job is not None, said
    section, _, name = key.partition(".")
    assert getattr(getattr(job, section), name) == value


def test_env_with_a_value_says_what_it_does(typed) -> None:  # type: ignore[no-untyped-def]
    assert "--env-var A=..." in typed("train", "tiny.py", "--env", "A=1")[1]


@pytest.mark.parametrize(
    ("words", "hint"),
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
def test_line_gets_a_hint(typed, words: list[str], hint: str) -> None:  # type: ignore[no-untyped-def]
    job, said, code = typed(*words)
    assert (job, code) == (None, 2)
    assert hint in said


def test_help_takes_a_verb(typed) -> None:  # type: ignore[no-untyped-def]
    assert "Usage: awsddp train" in typed("help", "train")[1]
    assert "Usage: awsddp local start" in typed("help", "local", "start")[1]
    said, code = typed("help")[1:]
    assert ("Usage: awsddp" in said, code) == (True, 0)


@pytest.mark.parametrize(
    ("name", "text", "mode", "words"),
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
def test_a_script_runs_as_what_it_is(
    tmp_path: Path, name: str, text: str, mode: int, words: tuple[str, ...]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / name).chmod(mode)
    spec = JobSpec(job=JobSection(script=name), sync=SyncSection(workdir=str(tmp_path)))
    before, begin = resolve_interpreter(spec, name, python="/env/bin/python")
    assert (*before, begin + name) == words


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
    ("key", "way"),
    [
        (key, way)
        for way in ("option", "-o", "variable", "file", "keyword")
        for key, (option, _) in _WRONG.items()
        if option or way != "option"
    ],
)
def test_an_error_names_what_was_typed(  # type: ignore[no-untyped-def]
    typed, monkeypatch: pytest.MonkeyPatch, key: str, way: str
) -> None:
    (option, value), (section, _, name) = _WRONG[key], key.partition(".")
    words = {"option": [option, str(value)], "-o": ["-o", f"{key}={value}"]}.get(way, [])
    variable = f"AWSDDP_{section}_{name}".upper()
    if way == "variable":
        monkeypatch.setenv(variable, str(value))
    if way == "file":
        Path("awsddp.toml").write_text(f"[{section}]\n{name} = {value!r}\n")
    keyword = next(one for one, known in KEYWORDS.items() if known == key)
    if way == "keyword":
        with pytest.raises(AwsddpError) as refused:
            Cluster("typed", **{keyword: value}).plan()
        said, code = f"error: {refused.value}", refused.value.exit_code
    else:
        _, said, code = typed("run", *words)
    named = {"-o": f"-o {key}", "variable": variable, "file": f"awsddp.toml: [{section}] {name}"}
    label = named.get(way, option if way == "option" else keyword)
    assert code == 3
    assert said.startswith((f"error: {label}: ", f"error: {label} holds for one command")), said


def test_keys_that_contradict_each_other_are_named_as_they_were_typed(typed) -> None:  # type: ignore[no-untyped-def]
    words = ["train", "tiny.py", "--max-restarts", "1", "-o", "job.launcher=ssh"]
    assert typed(*words)[1].startswith("error: -o job.launcher: ssh does not support --max-restarts\n")
