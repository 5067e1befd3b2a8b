"""What people type who know docker, kubectl, gh, git, sky, torchrun, Slurm: the answer says what to type.

Each line of SLIPS is a command line, and what the answer has to name; "=> works" is a line that is right as
it stands.
"""

import shlex
import sys
from pathlib import Path

import pytest

from awsddp.cli import failures
from awsddp.cli.main import cli
from tests.cli.advice_lines import type_in
from tests.cli.test_pages_of_docs import parse

SLIPS = """
docker
ps => awsddp jobs
ps -a => awsddp jobs
stop train-3 => awsddp cancel train-3
kill train-3 => awsddp cancel train-3
rm => awsddp down
logs --tail 20 => works
logs --follow train-3 => works
logs -t => awsddp logs
exec -it bash => awsddp ssh
exec node0 nvidia-smi => awsddp exec --node 0 nvidia-smi
run -d train.py => awsddp run --detach train.py
top => awsddp jobs -v
stats => awsddp jobs -v
inspect train-3 => awsddp jobs train-3
attach train-3 => awsddp logs -f train-3
cp node0:/data . => awsddp fetch
wait train-3 => awsddp logs -f train-3
info => awsddp status
compose up => awsddp up
images => awsddp plan --offers

kubectl
get nodes => awsddp status
get pods => awsddp jobs
get => awsddp status
describe => awsddp status -v
apply -f task.yaml => awsddp up
delete => awsddp down
port-forward 6006 => awsddp ssh -L
logs -f --tail=20 => works
logs train-3 -c default => works
exec -- nvidia-smi => works
create => awsddp up
cordon node1 => awsddp doctor
config => awsddp init

gh and git
list => awsddp status --all
view train-3 => awsddp report train-3
pull => awsddp fetch
push => awsddp sync
clone => awsddp sync
auth login => awsddp doctor
run list => awsddp jobs
run watch => awsddp logs -f
run view => awsddp report
log => awsddp logs
help train => works
--version => works
version => awsddp --version

sky
launch task.yaml => awsddp up
launch --num-nodes 2 => awsddp up
queue => awsddp jobs
autostop => awsddp up --idle
down --all => awsddp status --all & awsddp down -c
down -a => awsddp status --all & awsddp down -c
down train => awsddp down -c train
start => awsddp up
cost-report => awsddp jobs
check => awsddp doctor
show-gpus => awsddp plan --offers
spot launch => awsddp up --spot
up --num-nodes 2 => awsddp up --nodes 2

torchrun
train --nproc_per_node 2 train.py => works
up --nnodes 2 => awsddp up --nodes 2
train --lr 0.1 => awsddp train -- --lr 0.1
train train.py --model resnet => awsddp train train.py -- --model resnet
train --epochs=3 => awsddp train -- --epochs=3
train train.py --lr 0.1 --name a => awsddp train train.py --name a -- --lr 0.1
train --lr 0.1 train.py => awsddp train train.py -- --lr 0.1
--local train train.py --lr 0.1 => awsddp --local train train.py -- --lr 0.1
run train.py --nodes 2 --lr 0.1 -y => awsddp run train.py --nodes 2 -y -- --lr 0.1
train train.py 64 => awsddp train train.py -- 64
train -m pkg.mod => works
logs one two => awsddp logs --help
exec => awsddp exec --help
train --standalone train.py => awsddp run --local
train --rdzv-backend c10d train.py => awsddp train train.py
train --rdzv_endpoint=localhost:0 train.py => awsddp train train.py
train --master_addr 10.0.0.1 train.py => awsddp train train.py
train.py => awsddp train train.py
train.py --lr 0.1 => awsddp train train.py -- --lr 0.1
python train.py --lr 0.1 => awsddp train train.py -- --lr 0.1
torchrun train.py => awsddp train train.py

Slurm
sbatch train.py => awsddp train --detach
srun train.py => awsddp train
squeue => awsddp jobs
sacct => awsddp jobs
scancel train-3 => awsddp cancel train-3
sinfo => awsddp status
salloc => awsddp up
scontrol => awsddp status
train --dependency all => awsddp train --after all
train --dependency => awsddp train --after JOB
train --max-restart => awsddp train --max-restarts N
up --node => awsddp up --nodes N

own verbs
metrics train-3 => awsddp report train-3
clusters => awsddp status --all
tail train-3 => awsddp logs -f train-3
why => works
doctor --why train-3 => awsddp why train-3
doctor train-3 => awsddp why train-3
hang => awsddp why
restart train-3 => awsddp train --resume train-3
resume => awsddp train --resume last
destroy => awsddp down
terminate => awsddp down
nodes => awsddp status
up --node 3 => awsddp up --nodes 3
up --gpus-per-node 4 => awsddp up --gpus
up --instance g6.xlarge => awsddp up --instance-type g6.xlarge
up --type g6.xlarge => awsddp up --instance-type g6.xlarge
up --nodes 0 => --nodes
up --max-price 2 => -o cluster.max_price_usd=2
fetch --job train-3 => awsddp fetch train-3
report --job train-3 => awsddp report train-3
logs --job train-3 => awsddp logs train-3
logs --lines 5 => awsddp logs -n 5
cancel --all => awsddp jobs
price => awsddp plan
cost => awsddp jobs
ls => awsddp jobs
shell => awsddp ssh
connect => awsddp ssh
scp => awsddp fetch
download => awsddp fetch
upload => awsddp sync
tensorboard => awsddp ssh -L
statsu => awsddp status
statsu -v -c other => awsddp status -v -c other
--regio us-east-1 up => awsddp --help
train --worldsize 4 => awsddp train --world-size 4
"""
CASES = [line.split(" => ") for line in SLIPS.splitlines() if " => " in line]


def test_the_list_is_long_enough() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("line", "named"), CASES, ids=[line for line, _ in CASES])
def test_answer_names_what_to_type(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    if named == "works":
        parse(f"awsddp {line}")
        return
    monkeypatch.setattr(sys, "argv", ["awsddp", *shlex.split(line)])
    code = failures.run(cli)
    said = capsys.readouterr().err
    assert [words for words in named.split(" & ") if words not in said] == [], said
    assert code == (3 if line == "up --nodes 0" else 2), said
    assert "Did you mean one of" not in said
    for shown in said.splitlines():
        type_in(shown.partition("next: ")[2] or shown.strip())


def test_words_with_a_newline_are_not_repeated_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["train", "--lr\n0.1"], ["--region", "a\nb", "train", "--lr", "0.1"], ["ps", "a\nb"]):
        monkeypatch.setattr(sys, "argv", ["awsddp", *words])
        assert failures.run(cli) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith(" next: awsddp ")
        assert type_in(last.removeprefix(" next: "))
