"""Mistakes of users: each has its documented exit code and a message that names the source, no traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import Lab


def run_refused(lab: Lab, *args: str, code: int) -> str:
    """Run `awsddp`, check its exit code and that its error is clear, and return its stderr."""
    result = lab.run(*args)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert "error: unexpected" not in result.stderr
    assert result.stderr.startswith("error: ")
    return result.stderr


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["upp"], 2, "next: awsddp up"),
        (["up", "--nodse", "2"], 2, "--nodes"),
        (["up", "--nodes", "two"], 2, "two"),
        (["up", "--nodes", "0"], 3, "--nodes: 0 is out of range"),
        (["up", "--budget", "inf"], 3, "--budget: inf is not an amount"),
        (["up", "--expires", "soon"], 3, "24h"),
        (["-c", "My Cluster", "up"], 3, "invalid cluster name"),
        (["-c", "$(touch canary)", "up"], 3, "invalid cluster name"),
        (["up", "-o", "cluster.nods=2"], 3, "did you mean 'nodes'?"),
        (["up", "-o", "cluster"], 2, "-o NAME=VALUE"),
        (["train", "--env-var", "NOT_SET"], 3, "--env-var: NOT_SET not set"),
        (["run", "--local", "-y", "--env-var", "NOT_SET"], 3, "read -rs NOT_SET && export NOT_SET"),
        (["train", "--env-var", "NOT-A-NAME"], 2, "--env-var NOT-A-NAME: not the name"),
        (["-c", "-vv", "status"], 3, "invalid cluster name '-vv'"),
        (["exec", "--", "tool", "--json"], 3, "no AWS region"),
        (["train", "nowhere.py"], 2, "script not found: nowhere.py"),
        (["train", "--name", "../x"], 2, "invalid job name"),
        (["train", "--name", "last"], 2, "job name 'last' is reserved"),
        (["train", "a.py", "b.py"], 2, "next: awsddp train a.py -- b.py"),
        (["ssh", "node1"], 2, "awsddp ssh --node 1"),
        (["ssh", "1", "nvidia-smi", "-L"], 2, "awsddp ssh --node 1 nvidia-smi -L"),
        (["run", "nowhere.py", "--local", "-y"], 2, "script not found: nowhere.py"),
        (["run", "--local", "-y", "--", "{rnak}"], 2, "invalid placeholder {rnak} in '{rnak}'"),
        (["train", "-o", "sync.workdir=nowhere"], 3, "nowhere"),
        (["train", "--workdir", "nowhere"], 2, "awsddp train -o sync.workdir=nowhere"),
        (["run", "--hang_after", "5m", "x.py"], 2, "awsddp run -o job.hang_after=5m x.py"),
        (["train", "--master-port", "29500"], 2, "--master-port is not an option of awsddp train"),
        (["logs", "-n", "0"], 2, "0 is not in the range x>=1"),
        (["local", "status"], 7, "awsddp local start"),
        (["local", "-y", "fault", "-q", "list"], 7, "awsddp local start"),
    ],
)
def test_a_wrong_command_has_its_code_and_advice(lab: Lab, args: list[str], code: int, text: str) -> None:
    assert text in run_refused(lab, *args, code=code)
    assert not list(lab.root.rglob("canary"))


@pytest.mark.parametrize("verb", ["train", "run"])
@pytest.mark.parametrize("runs", ["file", "dangling link"])
def test_a_results_folder_that_cannot_be_written_is_refused_before_any_cost(
    lab: Lab, verb: str, runs: str
) -> None:
    lab.script("x.py", "print(1)")
    path = lab.project / "runs"
    path.touch() if runs == "file" else path.symlink_to("nowhere")
    error = run_refused(lab, verb, "x.py", "--local", "-y", code=3)
    assert f"cannot write results to {path}" in error
    assert f"{path} is not a folder" in error
    assert "-o job.results=DIR" in error


def test_missing_credentials_are_reported_with_how_to_get_them(lab: Lab) -> None:
    error = run_refused(lab, "--region", "us-east-1", "up", "-y", code=4)
    assert "credentials" in error
    assert "--local" in error or "aws configure" in error


@pytest.mark.parametrize(
    ("args", "keys"),
    [
        (("jobs",), {"jobs": [], "clusters": []}),
        (("down", "-y"), {"state": "absent", "looked": ["the local cloud, which is not running"]}),
    ],
)
def test_jobs_and_down_need_no_region_without_a_cluster(
    lab: Lab, args: tuple[str, ...], keys: dict[str, object]
) -> None:
    document = lab.json(*args)
    assert {key: document[key] for key in keys} == keys


@pytest.mark.parametrize("args", [("status", "--all"), ("down", "--orphans", "-y")])
def test_a_search_of_every_region_needs_credentials_and_no_region(lab: Lab, args: tuple[str, ...]) -> None:
    assert "no AWS credentials" in run_refused(lab, *args, code=4)


@pytest.mark.parametrize(
    ("target", "code"),
    [((), 3), (("--region", "eu-west-1", "--profile", "work"), 4), (("--region", "eu-west-1"), 4)],
)
def test_a_missing_region_or_credentials_advise_the_same_command_with_local(
    lab: Lab, target: tuple[str, ...], code: int
) -> None:
    (lab.root / "work").write_text("[profile work]\n")
    lab.environ |= {"AWS_CONFIG_FILE": str(lab.root / "work")}
    lab.script("train.py", "print(1)")
    error = run_refused(lab, *target, "run", "train.py", "--nodes", "2", "--budget", "2", code=code)
    assert "awsddp plan --nodes 2 --budget 2.0 --local   # without AWS" in error
    assert "awsddp run --nodes 2 --budget 2.0 --local train.py   # without AWS" in error
    if not target:
        assert "--region" in error


def test_an_unknown_key_of_the_file_is_named_with_the_nearest_key(lab: Lab) -> None:
    (lab.project / "awsddp.toml").write_text("[cluster]\ninstance_typ = 'x'\n")
    error = run_refused(lab, "plan", "--local", code=3)
    assert "awsddp.toml: [cluster] instance_typ" in error
    assert "did you mean 'instance_type'?" in error


def test_an_invalid_requirement_is_refused_by_plan_and_by_up(records: Lab) -> None:
    (records.project / "requirements.txt").write_text("tqdm\nnumpy=1.26\n")
    for args in (("plan",), ("up", "-y")):
        error = run_refused(records, *args, "--local", "--env", "requirements.txt", code=3)
        assert "requirements.txt, line 2: 'numpy=1.26' is not a requirement" in error
    assert not any((records.home / "clusters").glob("*/key"))


def test_an_endpoint_that_is_down_is_named(lab: Lab) -> None:
    lab.environ |= {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    assert "127.0.0.1:9" in run_refused(lab, "--region", "us-east-1", "up", "-y", code=4)


def test_an_unknown_region_is_named_with_the_nearest_region(lab: Lab) -> None:
    lab.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    error = run_refused(lab, "--region", "useast1", "plan", code=3)
    assert "--region: unknown AWS region 'useast1'" in error
    assert "us-east-1" in error
    error = run_refused(lab, "--local", "--region", "eu-west-1", "plan", code=3)
    assert "the local cloud is in us-east-1" in error


def test_an_error_of_the_plan_names_the_option_or_key(records: Lab) -> None:
    error = run_refused(records, "plan", "--local", "--gpus", "H9000:8", code=3)
    assert "error: --gpus: 'H9000:8' is not a GPU that AWS offers" in error
    (records.project / "awsddp.toml").write_text("[cluster]\nimage = 'ami-1'\n")
    error = run_refused(records, "plan", "--local", code=3)
    assert "error: awsddp.toml: [cluster] image: " in error


def test_p2_is_refused_with_the_date_of_its_end_and_its_successor(lab: Lab) -> None:
    error = run_refused(lab, "up", "--local", "--instance-type", "p2.8xlarge", "-y", code=4)
    assert "2025-03-30" in error
    assert "g6.48xlarge" in error


def test_a_question_without_a_terminal_is_refused_with_the_flag(records: Lab, tmp_path: Path) -> None:
    free = records.run("up", "--local", "--nodes", "2", cwd=tmp_path)  # no question
    assert free.returncode == 0, free.stderr
    for args in (("up", "--nodes", "1"), ("down",)):
        result = records.run(*args, cwd=tmp_path)
        assert (result.returncode, "--yes" in result.stderr) == (2, True)
    assert len(records.json("status")["nodes"]) == 2
    assert records.run("down", "-y").returncode == 0


@pytest.mark.prove
def test_a_world_size_that_does_not_fit_is_refused_with_those_that_fit(cluster: Lab) -> None:
    error = run_refused(cluster, "train", "--world-size", "5", code=2)
    assert "4 or 6" in error


@pytest.mark.prove
def test_an_unknown_job_is_named(cluster: Lab) -> None:
    assert "no job nope" in run_refused(cluster, "fetch", "nope", code=7)
    assert "no job nope" in run_refused(cluster, "logs", "nope", code=7)


@pytest.mark.prove
def test_train_refuses_to_sync_a_home_folder(cluster: Lab) -> None:
    result = cluster.run("train", "--world-size", "1", cwd=cluster.root)
    assert result.returncode == 3
    assert "home folder" in result.stderr


@pytest.mark.prove
def test_a_second_cluster_of_the_same_name_in_another_region_is_refused(cluster: Lab) -> None:
    error = run_refused(cluster, "--region", "eu-west-1", "up", "-y", code=3)
    assert "is in the local cloud" in error


@pytest.mark.prove
def test_a_character_that_the_output_cannot_encode_is_escaped(cluster: Lab) -> None:
    cluster.script("trän.py", "print(1)\n" * 1000)  # one of the largest files, which -v names
    cluster.environ["PYTHONIOENCODING"] = "ascii"
    try:
        result = cluster.run("sync", "-v")
    finally:
        del cluster.environ["PYTHONIOENCODING"]
    assert result.returncode == 0, result.stderr
    assert r"tr\xe4n.py" in result.stdout


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale that cannot encode file names of another alphabet."""


def test_names_that_the_locale_cannot_encode_are_read_and_written(lab: Lab) -> None:
    program = (
        "import sys; from awsddp.cli import failures, main; "
        r"failures.run_command = lambda _: open('\u5b66.pt', 'w').close() or print(sys.argv[1], '\u00e4'); "
        "main.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, "--学"], cwd=lab.project, env=lab.environ | ASCII, capture_output=True
    )
    assert result.stdout.decode() == "--学 ä\n", result.stderr
    assert (lab.project / "学.pt").exists()


def test_the_api_refuses_a_locale_that_cannot_encode_every_name(lab: Lab) -> None:
    program = "import awsddp; awsddp.Cluster('c', local=True)"
    result = subprocess.run(
        [sys.executable, "-c", program], env=lab.environ | ASCII, capture_output=True, text=True
    )
    assert "cannot write every file name" in result.stderr
    assert "PYTHONUTF8=1" in result.stderr


def test_train_without_a_cluster_advises_up(lab: Lab) -> None:
    lab.script("x.py", "print(1)")
    error = run_refused(lab, "train", "x.py", "--local", code=7)
    assert "awsddp up --local" in error


def test_an_error_is_a_document_with_json(lab: Lab) -> None:
    result = lab.run("train", "nowhere.py", "--json")
    assert result.returncode == 2
    assert '"exit_code": 2' in result.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_awsddp_works_with_closed_standard_streams(lab: Lab, closed: str) -> None:
    line = f"{sys.executable} -m awsddp down --local -y {closed}"
    result = subprocess.run(
        ["sh", "-c", line], cwd=lab.project, env=lab.environ, capture_output=True, text=True
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_closed_pipe_ends_awsddp_without_an_error(lab: Lab) -> None:
    result = subprocess.run(
        ["sh", "-c", '"$0" -m awsddp --help | true', sys.executable],
        capture_output=True,
        text=True,
        env=lab.environ,
    )
    assert result.stderr == ""


def test_a_full_disk_for_the_output_is_reported(lab: Lab) -> None:
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "awsddp", "up", "--help"],
            env={key: value for key, value in lab.environ.items() if key != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert result.returncode == 3, result.stderr
    assert "error: cannot write the output" in result.stderr


def test_settings_of_the_parent_folder_are_not_read_and_a_warning_says_so(lab: Lab) -> None:
    settings = lab.project / "awsddp.toml"
    settings.write_text("[cluster]\nregion = 'eu-west-1'\n")
    inside = lab.project / "src"
    inside.mkdir()
    assert f"{settings} is not read" in lab.run("jobs", cwd=inside).stderr
    assert "is not read" not in lab.run("jobs").stderr
    (inside / "awsddp.toml").touch()
    assert "is not read" not in lab.run("jobs", cwd=inside).stderr
