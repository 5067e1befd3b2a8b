"""Command lines of users of docker, kubectl, gh, git, sky, torchrun, Slurm: the error says what to type.

Each line of SLIPS is a command line, and what the error must name; "=> works" marks a valid line.
"""

import shlex
import sys
from pathlib import Path

import click
import pytest

from awsddp.cli import failures
from awsddp.cli.main import cli
from awsddp.settings.verbs import HEEDS
from tests.support.advice_lines import parse_commands
from tests.support.command_lines import parse

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

train torchrun --nproc_per_node 2 train.py --lr 0.1 => awsddp train --nproc-per-node 2 train.py -- --lr 0.1
train -- torchrun --nproc_per_node 2 train.py --lr 3 => awsddp train --nproc-per-node 2 train.py -- --lr 3
train -c x -- torchrun train.py --budget 3 => awsddp -c x train train.py -- --budget 3
train --name x torchrun train.py --lr 3 => awsddp train --name x train.py -- --lr 3
train torchrun --nnodes 1:2 --max-restarts=3 train.py => awsddp train --nnodes 1:2 --max-restarts 3 train.py
torchrun --standalone --nproc_per_node=2 a.py => without --standalone & awsddp train --nproc-per-node 2 a.py
train accelerate launch train.py => awsddp train -o job.launcher=torchrun train.py
accelerate launch train.py => awsddp train -o job.launcher=torchrun train.py
train -- accelerate launch --num_processes 8 a.py => train -o job.launcher=torchrun --world-size 8 a.py
train python train.py --lr 3 => awsddp train train.py -- --lr 3
train -- python -m pkg.mod --x 3 => awsddp train -m pkg.mod -- --x 3
run --nodes 2 -y -- python train.py => awsddp run --nodes 2 -y train.py
python -m torch.distributed.run --nproc_per_node 2 train.py => awsddp train --nproc-per-node 2 train.py
train deepspeed --num_gpus 4 a.py --ds x => -o job.launcher=torchrun --nproc-per-node 4 a.py -- --ds x
train mpirun -np 4 -x LR=3 python train.py => awsddp train --world-size 4 --env-var LR=3 train.py
train -- srun -n 8 --time 1:30:00 python train.py => awsddp train --world-size 8 --timeout 90m train.py
train -- uv run train.py => awsddp train train.py
train torchrun -- train.py => awsddp train train.py
train CUDA_VISIBLE_DEVICES=0 torchrun train.py => awsddp train --env-var CUDA_VISIBLE_DEVICES=0 train.py
train LR=0.1 train.py --x 3 => awsddp train --env-var LR=0.1 train.py -- --x 3
train -- A=1 B=2 python train.py => awsddp train --env-var A=1 --env-var B=2 train.py
train python => awsddp train SCRIPT
train -- train.py --lr 3 => awsddp train train.py -- --lr 3
train -- train.py train.py => awsddp train train.py -- train.py

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

sbatch --time=90 train.py => awsddp train --detach --timeout 90m train.py
sbatch --time 2-01 train.py => --timeout 2940m
train --priority 5 train.py => awsddp train --after all train.py

options of another verb
run train.py --nodes 2 --world-size 4 --dry-run => awsddp plan --nodes 2 -o job.world_size=4
train train.py --dry-run => awsddp plan
down --dry-run => awsddp status
train train.py --budget 3 => awsddp plan, up, run & awsddp up --budget 3 && awsddp train train.py
--local train train.py --idle 5m -y => awsddp --local up --idle 5m && awsddp --local train train.py
train -c x train.py --spot --lr 0.1 => awsddp -c x up --spot && awsddp -c x train train.py -- --lr 0.1
train --lr 0.1 train.py --budget 3 => awsddp up --budget 3 && awsddp train train.py -- --lr 0.1
train train.py --budgt 3 => awsddp up --budget 3 && awsddp train train.py
python train.py --budget 3 => awsddp up --budget 3 && awsddp train train.py
train train.py --gpus 2 => awsddp plan, up, run & awsddp train train.py --nproc-per-node 2
train train.py --gpus L4:2 => awsddp up --gpus L4:2 && awsddp train train.py
train train.py --nodes 3 => awsddp up --nodes 3 && awsddp train train.py
train train.py --save s3://x/y => awsddp train train.py --save-to s3://x/y
train train.py --node 1 => awsddp train train.py --on 1
train train.py --rank 0 => awsddp logs --rank 0
train train.py --discard => awsddp down --help
up --nodes 2 --detach => awsddp train, recover, run & awsddp up --nodes 2   # then: & awsddp train --detach
up --timeout 2h => awsddp up --expires 2h   # then: & awsddp train --timeout 2h
up --world-size 4 => awsddp train, run & awsddp up & awsddp train --world-size 4
plan --world-size 4 => awsddp plan -o job.world_size=4
plan --save-to s3://runs/b => works
run --save-to s3://runs/b --dry-run => awsddp plan --save-to s3://runs/b
plan train.py --nodes 2 => only awsddp train and awsddp run take a script & awsddp plan --nodes 2
up train.py --nodes 2 => awsddp up --nodes 2 && awsddp train train.py
fetch --all => awsddp fetch all
status -w => awsddp logs -f
down --nodes 1 => next: awsddp down --help
stop --nodes 1 => next: awsddp stop --help
exec --nodes 2 hostname => next: awsddp exec --help
--local status --nodes 3 --budget 5 -v => plan, up, run & next: awsddp --local status -v
logs train-3 --nodes 2 => next: awsddp logs train-3
status --budget 4 => next: awsddp status

words
scale 4 => awsddp up --nodes 4
resize --nodes 3 => awsddp up --nodes 3
pause => awsddp stop
extend 12h => awsddp up --expires 12h
extend => awsddp up --expires 48h
autostop -i 60 => awsddp up --idle 60m
sky autostop mine -i 30 => awsddp up -c mine --idle 30m
launch -c c train.py => awsddp -c c up && awsddp -c c train train.py
sky launch -c c -y a.py --nodes 2 --timeout 2h => -c c up --nodes 2 && awsddp -c c train a.py --timeout 2h
-y launch => next: awsddp up
submit train.py --lr 3 => awsddp train --detach train.py -- --lr 3
jupyter => awsddp ssh -L 8888
notebook => awsddp ssh -L 8888
env => --env FILE
completion => _AWSDDP_COMPLETE=bash_source
upgrade => pipx install --force '.[local]'
uninstall => awsddp status --all & pipx uninstall awsddp
history => awsddp jobs -v
validate => awsddp plan
debug train-3 => awsddp why train-3
describe -o yaml => next: awsddp status -v
kill -9 train-3 => awsddp cancel train-3
up other => awsddp up -c other

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
cancel --all => awsddp cancel all
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
statsu -v -c other => awsddp -c other status -v
--regio us-east-1 up => awsddp --help
train --worldsize 4 => awsddp train --world-size 4
"""
CASES = [line.split(" => ") for line in SLIPS.splitlines() if " => " in line]


def test_there_are_at_least_60_cases() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(("line", "advice"), CASES, ids=[line for line, _ in CASES])
def test_an_error_names_what_to_type(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    line: str,
    advice: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").touch()
    if advice == "works":
        parse(f"awsddp {line}")
        return
    monkeypatch.setattr(sys, "argv", ["awsddp", *shlex.split(line)])
    code = failures.run_command(cli)
    error = capsys.readouterr().err
    assert [text for text in advice.split(" & ") if text not in error] == [], error
    assert code == (3 if line == "up --nodes 0" else 2), error
    assert "Did you mean one of" not in error
    for shown in error.splitlines():
        parse_commands(shown.partition("next: ")[2] or shown.strip())


def test_arguments_with_a_newline_are_not_repeated_as_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["train", "--lr\n0.1"], ["--region", "a\nb", "train", "--lr", "0.1"], ["ps", "a\nb"]):
        monkeypatch.setattr(sys, "argv", ["awsddp", *arguments])
        assert failures.run_command(cli) == 2
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith(" next: awsddp ")
        assert parse_commands(last.removeprefix(" next: "))


@pytest.mark.parametrize("verb", ["train", "run", "up", "plan", "down", "status"])
def test_an_option_of_another_verb_is_never_advised_as_an_argument_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "home"))
    by_verb = {name: _list_options(name) for name in HEEDS}
    values = {"--iam-policy": "user", "--save-to": "s3://runs/a"}
    others = {name: flag for options in by_verb.values() for name, flag in options.items()}
    for option in sorted(others.keys() - by_verb[verb].keys()):
        line = [verb, *["train.py", "--lr", "3"] * (verb in ("train", "run")), "-y", option]
        monkeypatch.setattr(sys, "argv", ["awsddp", *line, *[values.get(option, "3")] * (not others[option])])
        assert failures.run_command(cli) == 2
        error = capsys.readouterr().err
        owners = [name for name in by_verb if option in by_verb[name]]
        assert any(owner in error.partition("option of awsddp")[2] for owner in owners), error
        advised = [text.strip() for text in error.partition("next: ")[2].splitlines()]
        assert [text for text in advised if option in text.partition(" -- ")[2].split()] == []
        for command in (command for text in advised for command in parse_commands(text)):
            arguments = command.split()
            assert "--discard" not in arguments
            assert not {"-y", "--yes"} & {*arguments} or arguments[1] == verb, error


def _list_options(verb: str) -> dict[str, bool]:
    """Return the long options of a verb, each with whether it has no value."""
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    return {
        name: bool(parameter.is_flag or parameter.count)
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for name in parameter.opts
        if name.startswith("--")
    }


def test_words_after_two_dashes_are_arguments_if_a_script_is_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWSDDP_HOME", str(tmp_path / "home"))
    for name in ("train.py", "data.csv"):
        (tmp_path / name).touch()
    for file, code in (("", 2), ('[job]\nscript = "train.py"\n', 7)):
        (tmp_path / "awsddp.toml").write_text(f'{file}[cluster]\nregion = "us-east-1"\n')
        monkeypatch.setattr(sys, "argv", ["awsddp", "train", "--", "data.csv"])
        assert (failures.run_command(cli) == 2) is (code == 2), capsys.readouterr().err
