"""What Tab offers: from this machine's files, without boto3 and without a call to AWS."""

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
def known() -> None:
    """Two clusters that this machine remembers, with jobs."""
    (job,) = RECORD.jobs
    for name, jobs in {"default": ("train-1", "train-2"), "other": ("eval-1",)}.items():
        made = tuple(replace(job, job=one) for one in jobs)
        ClusterFolder(awsddp_home(), name).write(replace(RECORD, jobs=made))


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
def test_words_that_are_offered(line: str, offered: list[str]) -> None:
    *words, incomplete = line.split(" ")
    assert sorted(one.value for one in SHELL.get_completions(words[1:], incomplete)) == sorted(offered)


@pytest.mark.parametrize("line", ["train tr", "run tr", "train --env req", "up --env req"])
def test_files_are_left_to_the_shell(line: str) -> None:
    *words, incomplete = line.split(" ")
    assert [one.type for one in SHELL.get_completions(words, incomplete)] == ["file"]


def test_bash_offers_them_and_boto3_is_not_imported(tmp_path: Path) -> None:
    program = tmp_path / "awsddp"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom awsddp.cli.main import main\ntry:\n    main()\n"
        f"finally:\n    open({str(tmp_path / 'modules')!r}, 'w').write(' '.join(sys.modules))\n"
    )
    program.chmod(0o755)
    asked = (
        'eval "$(_AWSDDP_COMPLETE=bash_source awsddp)"; COMP_WORDS=(awsddp logs -c other ""); COMP_CWORD=4; '
        '_awsddp_completion awsddp; echo "${COMPREPLY[@]}"'
    )
    bash = shutil.which("bash")
    assert bash is not None
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    shown = subprocess.run([bash, "-c", asked], env=environ, capture_output=True, text=True, cwd=tmp_path)
    assert (shown.stdout, shown.returncode) == ("eval-1\n", 0), shown.stderr
    modules = (tmp_path / "modules").read_text().split()
    assert "click" in modules
    assert not {"boto3", "botocore", "paramiko"} & set(modules)
