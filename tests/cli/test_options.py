"""Shell completion: from the client's files, without boto3 and without a request to AWS."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from awsddp.cli.main import cli
from awsddp.state import ClusterFolder, awsddp_home
from tests.test_state import RECORD

SHELL = BashComplete(cli, {}, "awsddp", "_AWSDDP_COMPLETE")


@pytest.fixture(autouse=True)
def clusters() -> None:
    """Two clusters with jobs in the records of the client."""
    (job,) = RECORD.jobs
    for name, jobs in {"default": ("train-1", "train-2"), "other": ("eval-1",)}.items():
        records = tuple(replace(job, job=job_name) for job_name in jobs)
        ClusterFolder(awsddp_home(), name).write(replace(RECORD, jobs=records))


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("awsddp -c ", ["default", "other"]),
        ("awsddp down -c o", ["other"]),
        ("awsddp logs ", ["train-2", "train-1"]),
        ("awsddp -c other logs ", ["eval-1"]),
        ("awsddp logs -c other e", ["eval-1"]),
        ("awsddp fetch train-1", ["train-1"]),
        ("awsddp report n-2", ["train-2"]),
        ("awsddp jobs train-1 2", ["train-2"]),
        ("awsddp train train.py --resume train", ["train-2", "train-1"]),
        ("awsddp why ", ["train-2", "train-1"]),
        ("awsddp up --instance-type p5.", ["p5.4xlarge", "p5.48xlarge"]),
        ("awsddp lo", ["logs", "local"]),
        ("awsddp train --world", ["--world-size"]),
        ("awsddp -c nowhere logs ", []),
    ],
)
def test_completion_offers_the_words_that_fit(line: str, offered: list[str]) -> None:
    *words, incomplete = line.split(" ")
    assert sorted(item.value for item in SHELL.get_completions(words[1:], incomplete)) == sorted(offered)


@pytest.mark.parametrize("line", ["train tr", "run tr", "train --env req", "up --env req"])
def test_files_are_left_to_the_shell(line: str) -> None:
    *words, incomplete = line.split(" ")
    assert [item.type for item in SHELL.get_completions(words, incomplete)] == ["file"]


def test_completion_works_in_bash_and_does_not_import_boto3(tmp_path: Path) -> None:
    program = tmp_path / "awsddp"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom awsddp.cli.main import main\ntry:\n    main()\n"
        f"finally:\n    open({str(tmp_path / 'modules')!r}, 'w').write(' '.join(sys.modules))\n"
    )
    program.chmod(0o755)
    script = (
        'eval "$(_AWSDDP_COMPLETE=bash_source awsddp)"; COMP_WORDS=(awsddp logs -c other ""); COMP_CWORD=4; '
        '_awsddp_completion awsddp; echo "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    assert bash is not None
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run([bash, "-c", script], env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert (shown.stdout, shown.returncode) == ("eval-1\n", 0), shown.stderr
    modules = (tmp_path / "modules").read_text().split()
    assert "click" in modules
    assert not {"boto3", "botocore", "paramiko"} & set(modules)
