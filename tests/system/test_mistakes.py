"""What people type wrong: the documented exit code, a message that names the place, never a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.lab import Lab


def refused(lab: Lab, *words: str, code: int) -> str:
    """Start `awsddp`, expect the exit code and a clear error; return what was said."""
    shown = lab.run(*words)
    assert shown.returncode == code, shown.stdout + shown.stderr
    assert "Traceback" not in shown.stderr
    assert "error: unexpected" not in shown.stderr
    assert shown.stderr.startswith("error: ")
    return shown.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
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
def test_wrong_words(lab: Lab, words: list[str], code: int, said: str) -> None:
    assert said in refused(lab, *words, code=code)
    assert not list(lab.root.rglob("canary"))


@pytest.mark.parametrize("verb", ["train", "run"])
@pytest.mark.parametrize("runs", ["file", "dangling link"])
def test_a_results_folder_that_cannot_be_written_is_refused_before_any_cost(
    lab: Lab, verb: str, runs: str
) -> None:
    lab.script("x.py", "print(1)")
    path = lab.project / "runs"
    path.touch() if runs == "file" else path.symlink_to("nowhere")
    said = refused(lab, verb, "x.py", "--local", "-y", code=3)
    assert f"cannot write results to {path}" in said
    assert f"{path} is not a folder" in said
    assert "-o job.results=DIR" in said


def test_without_credentials_aws_is_not_asked_and_the_ways_to_get_them_are_named(lab: Lab) -> None:
    said = refused(lab, "--region", "us-east-1", "up", "-y", code=4)
    assert "credentials" in said
    assert "--local" in said or "aws configure" in said


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (("jobs",), {"jobs": [], "clusters": []}),
        (("down", "-y"), {"state": "absent", "looked": ["the local cloud, which is not running"]}),
    ],
)
def test_where_nothing_is_here_no_region_is_needed(
    lab: Lab, words: tuple[str, ...], keys: dict[str, object]
) -> None:
    document = lab.json(*words)
    assert {key: document[key] for key in keys} == keys


@pytest.mark.parametrize("words", [("status", "--all"), ("down", "--orphans", "-y")])
def test_what_searches_every_region_needs_a_login_and_no_region(lab: Lab, words: tuple[str, ...]) -> None:
    assert "no AWS credentials" in refused(lab, *words, code=4)


@pytest.mark.parametrize(
    ("place", "code"),
    [((), 3), (("--region", "eu-west-1", "--profile", "work"), 4), (("--region", "eu-west-1"), 4)],
)
def test_without_a_region_or_a_login_what_was_typed_is_advised_without_aws(
    lab: Lab, place: tuple[str, ...], code: int
) -> None:
    (lab.root / "work").write_text("[profile work]\n")
    lab.environ |= {"AWS_CONFIG_FILE": str(lab.root / "work")}
    lab.script("train.py", "print(1)")
    said = refused(lab, *place, "run", "train.py", "--nodes", "2", "--budget", "2", code=code)
    assert "awsddp plan --nodes 2 --budget 2.0 --local   # without AWS" in said
    assert "awsddp run --nodes 2 --budget 2.0 --local train.py   # without AWS" in said
    if not place:
        assert "--region" in said


def test_an_unknown_key_in_the_file_is_named_with_the_nearest(lab: Lab) -> None:
    (lab.project / "awsddp.toml").write_text("[cluster]\ninstance_typ = 'x'\n")
    said = refused(lab, "plan", "--local", code=3)
    assert "awsddp.toml: [cluster] instance_typ" in said
    assert "did you mean 'instance_type'?" in said


def test_a_requirement_that_is_none_is_refused_by_plan_as_by_up(records: Lab) -> None:
    (records.project / "requirements.txt").write_text("tqdm\nnumpy=1.26\n")
    for words in (("plan",), ("up", "-y")):
        said = refused(records, *words, "--local", "--env", "requirements.txt", code=3)
        assert "requirements.txt, line 2: 'numpy=1.26' is not a requirement" in said
    assert not any((records.home / "clusters").glob("*/key"))


def test_an_endpoint_that_is_down_is_named(lab: Lab) -> None:
    lab.environ |= {
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    assert "127.0.0.1:9" in refused(lab, "--region", "us-east-1", "up", "-y", code=4)


def test_a_region_that_nobody_knows_is_named_with_the_nearest(lab: Lab) -> None:
    lab.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    said = refused(lab, "--region", "useast1", "plan", code=3)
    assert "--region: unknown AWS region 'useast1'" in said
    assert "us-east-1" in said
    said = refused(lab, "--local", "--region", "eu-west-1", "plan", code=3)
    assert "the local cloud is us-east-1" in said


def test_an_error_of_the_plan_names_what_was_typed(records: Lab) -> None:
    said = refused(records, "plan", "--local", "--gpus", "H9000:8", code=3)
    assert "error: --gpus: 'H9000:8' is not a GPU that AWS offers" in said
    (records.project / "awsddp.toml").write_text("[cluster]\nimage = 'ami-1'\n")
    said = refused(records, "plan", "--local", code=3)
    assert "error: awsddp.toml: [cluster] image: " in said


def test_p2_is_refused_with_the_day_it_went_and_what_takes_its_place(lab: Lab) -> None:
    said = refused(lab, "up", "--local", "--instance-type", "p2.8xlarge", "-y", code=4)
    assert "2025-03-30" in said
    assert "g6.48xlarge" in said


def test_nobody_to_answer_is_a_usage_error_that_names_the_flag(records: Lab, tmp_path: Path) -> None:
    free = records.run("up", "--local", "--nodes", "2", cwd=tmp_path)  # nothing is asked
    assert free.returncode == 0, free.stderr
    for words in (("up", "--nodes", "1"), ("down",)):
        shown = records.run(*words, cwd=tmp_path)
        assert (shown.returncode, "--yes" in shown.stderr) == (2, True)
    assert len(records.json("status")["nodes"]) == 2
    assert records.run("down", "-y").returncode == 0


@pytest.mark.prove
def test_a_world_size_that_does_not_fit_names_what_does(cluster: Lab) -> None:
    said = refused(cluster, "train", "--world-size", "5", code=2)
    assert "4 or 6" in said


@pytest.mark.prove
def test_a_job_that_nobody_knows(cluster: Lab) -> None:
    assert "no job nope" in refused(cluster, "fetch", "nope", code=7)
    assert "no job nope" in refused(cluster, "logs", "nope", code=7)


@pytest.mark.prove
def test_a_home_folder_is_not_sent(cluster: Lab) -> None:
    shown = cluster.run("train", "--world-size", "1", cwd=cluster.root)
    assert shown.returncode == 3
    assert "home folder" in shown.stderr


@pytest.mark.prove
def test_a_second_cluster_of_the_name_elsewhere_is_refused(cluster: Lab) -> None:
    said = refused(cluster, "--region", "eu-west-1", "up", "-y", code=3)
    assert "is in the local cloud" in said


@pytest.mark.prove
def test_a_character_that_the_output_cannot_hold_is_escaped(cluster: Lab) -> None:
    cluster.script("trän.py", "print(1)\n" * 1000)  # one of the largest files, which -v names
    cluster.environ["PYTHONIOENCODING"] = "ascii"
    try:
        shown = cluster.run("sync", "-v")
    finally:
        del cluster.environ["PYTHONIOENCODING"]
    assert shown.returncode == 0, shown.stderr
    assert r"tr\xe4n.py" in shown.stdout


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""A locale that no file name of another alphabet fits."""


def test_names_that_the_locale_cannot_write_are_read_and_written(lab: Lab) -> None:
    program = (
        "import sys; from awsddp.cli import failures, main; "
        r"failures.run_command = lambda _: open('\u5b66.pt', 'w').close() or print(sys.argv[1], '\u00e4'); "
        "main.main()"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, "--学"], cwd=lab.project, env=lab.environ | ASCII, capture_output=True
    )
    assert shown.stdout.decode() == "--学 ä\n", shown.stderr
    assert (lab.project / "学.pt").exists()


def test_python_whose_locale_cannot_write_every_name_is_refused_before_any_request(lab: Lab) -> None:
    program = "import awsddp; awsddp.Cluster('c', local=True)"
    shown = subprocess.run(
        [sys.executable, "-c", program], env=lab.environ | ASCII, capture_output=True, text=True
    )
    assert "cannot write every file name" in shown.stderr
    assert "PYTHONUTF8=1" in shown.stderr


def test_without_a_cluster_the_way_to_one_is_named(lab: Lab) -> None:
    lab.script("x.py", "print(1)")
    said = refused(lab, "train", "x.py", "--local", code=7)
    assert "awsddp up --local" in said


def test_the_error_is_a_document_with_json(lab: Lab) -> None:
    shown = lab.run("train", "nowhere.py", "--json")
    assert shown.returncode == 2
    assert '"exit_code": 2' in shown.stdout


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_started_without_a_stream_it_ends_as_with_it(lab: Lab, closed: str) -> None:
    line = f"{sys.executable} -m awsddp down --local -y {closed}"
    shown = subprocess.run(
        ["sh", "-c", line], cwd=lab.project, env=lab.environ, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_reader_that_goes_away_ends_it_quietly(lab: Lab) -> None:
    shown = subprocess.run(
        ["sh", "-c", '"$0" -m awsddp --help | true', sys.executable],
        capture_output=True,
        text=True,
        env=lab.environ,
    )
    assert shown.stderr == ""


def test_a_disk_without_room_for_the_output_is_said(lab: Lab) -> None:
    with Path("/dev/full").open("wb") as full:
        shown = subprocess.run(
            [sys.executable, "-m", "awsddp", "up", "--help"],
            env={key: value for key, value in lab.environ.items() if key != "PYTHONUNBUFFERED"},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert shown.returncode == 3, shown.stderr
    assert "error: cannot write the output" in shown.stderr


def test_settings_of_the_folder_above_are_not_read_and_that_is_said(lab: Lab) -> None:
    settings = lab.project / "awsddp.toml"
    settings.write_text("[cluster]\nregion = 'eu-west-1'\n")
    inside = lab.project / "src"
    inside.mkdir()
    assert f"{settings} is not read" in lab.run("jobs", cwd=inside).stderr
    assert "is not read" not in lab.run("jobs").stderr
    (inside / "awsddp.toml").touch()
    assert "is not read" not in lab.run("jobs", cwd=inside).stderr
