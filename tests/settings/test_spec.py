import contextlib
from dataclasses import replace
from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.settings.loader import (
    job_arguments,
    list_settings,
    load,
    parse_job_arguments,
    with_cluster_settings,
)
from awsddp.settings.spec import KEYS


def write_settings(folder: Path, text: str) -> Path:
    file = folder / "awsddp.toml"
    file.write_text(text)
    return file


def test_defaults_are_two_nodes_that_end_after_a_day() -> None:
    cluster, job = load(environ={})
    assert (cluster.name, cluster.cluster.nodes, cluster.cluster.expires) == ("default", 2, "24h")
    assert (job.job.script, job.sync.workdir, job.job.results) == (None, ".", "runs")


def test_a_variable_may_be_a_number_and_is_text(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text("[env.variables]\nOMP_NUM_THREADS = 4\nRATE = 0.5\n")
    assert load(file=file, environ={})[1].env.variables == {"OMP_NUM_THREADS": "4", "RATE": "0.5"}
    file.write_text("[env.variables]\nDEBUG = true\n")
    with pytest.raises(ConfigError, match=r'such as \{ A = "1" \}'):
        load(file=file, environ={})


def test_a_version_without_quotes_keeps_its_digits(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_text('[env]\nkind = "venv"\npython = 3.10\nvariables = { CUDA = 12.0 }\n')
    env = load(file=file, environ={})[1].env
    assert (env.python, env.variables) == ("3.10", {"CUDA": "12.0"})
    file.write_text("[cluster]\nmax_price_usd = 1.50\n")
    assert type(load(file=file, environ={})[0].cluster.max_price_usd) is float
    file.write_text("[env]\nsetup = [1.0]\n")
    with pytest.raises(ConfigError, match=r"\[env\] setup: invalid value \[1.0\]"):
        load(file=file, environ={})


def test_options_override_variables_and_variables_override_the_file(tmp_path: Path) -> None:
    file = write_settings(tmp_path, '[cluster]\nnodes = 3\ndisk_gb = 300\nexpires = "1h"\n')
    environ = {"AWSDDP_CLUSTER_NODES": "4", "AWSDDP_CLUSTER_DISK_GB": "400"}
    cluster, _ = load(file=file, environ=environ, overrides={"cluster.nodes": 5})
    assert (cluster.cluster.nodes, cluster.cluster.disk_gb, cluster.cluster.expires) == (5, 400, "1h")


def test_lists_and_tables_are_read_as_toml_and_a_bare_word_is_a_list_of_one() -> None:
    cluster, job = load(
        environ={},
        overrides={
            "network.ssh_cidr": "203.0.113.7/32",
            "sync.ignore": '["*.bin", "data/"]',
            "env.variables.NCCL_DEBUG": "INFO",
            "tags.team": "vision",
        },
    )
    assert cluster.network.ssh_cidr == ("203.0.113.7/32",)
    assert job.sync.ignore == ("*.bin", "data/")
    assert job.env.variables == {"NCCL_DEBUG": "INFO"}
    assert cluster.tags == {"team": "vision"}


@pytest.mark.parametrize(
    ("text", "location", "hint"),
    [
        ("[cluster]\nnodse = 2\n", "[cluster] nodse", "'nodes'"),
        ("[clutser]\nnodes = 2\n", "[clutser] nodes", "'cluster'"),
        ("nodes = 2\n", "nodes", "cluster"),
        ('[cluster]\nnodes = "two"\n', "[cluster] nodes", "a whole number"),
        ("[cluster]\nnodes = 0\n", "[cluster] nodes", "1 to 1000"),
        ("[cluster]\nnodes = true\n", "[cluster] nodes", "a whole number"),
        ('[cluster]\nexpires = "soon"\n', "[cluster] expires", "24h"),
        ('[job]\nheartbeat_timeout = "4.9s"\n', "[job] heartbeat_timeout", "5s or more"),
        ("[cluster\n", "awsddp.toml", "fix the file"),
        ("[cluster]\nnodes = 2\nnodes = 3\n", "awsddp.toml", "fix the file"),
    ],
)
def test_an_invalid_file_is_refused_with_the_location_and_a_hint(
    tmp_path: Path, text: str, location: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(file=write_settings(tmp_path, text), environ={})
    assert location in raised.value.message
    assert hint in raised.value.next


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=file, environ={})
    file.unlink()
    file.symlink_to(tmp_path / "moved.toml")  # defaults must not replace a file that cannot be read
    with pytest.raises(ConfigError, match="cannot read"):
        load(file=file, environ={})


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "awsddp.toml"
    file.write_bytes(b"\xef\xbb\xbf[cluster]\r\nnodes = 3\r\n")
    assert load(file=file, environ={})[0].cluster.nodes == 3


@pytest.mark.parametrize("name", ["", "A", "1a", "a" * 32, "a b", "$(touch canary)", "a\n", "../x", "-a"])
def test_an_invalid_cluster_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="invalid cluster name"):
        load(name, environ={})


@pytest.mark.parametrize("text", ["366d", "10000000000000000000", "9" * 5000 + "h"])
def test_a_duration_of_more_than_a_year_is_refused_with_the_range(text: str) -> None:
    for key in ("cluster.idle", "cluster.expires", "job.timeout"):
        with pytest.raises(ConfigError, match=f"{key}: .* out of range") as refusal:
            load(environ={}, overrides={key: text})
        assert refusal.value.next == "a duration of 365d or less"


@pytest.mark.parametrize(
    ("key", "short", "least"),
    [
        *(("cluster.expires", short, "1m") for short in ("0", "1s", "59s")),
        *((key, "0", "1s") for key in ("job.timeout", "job.hang_after")),
        ("job.heartbeat_timeout", "4s", "5s"),
    ],
)
def test_a_limit_that_is_too_short_is_refused(key: str, short: str, least: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}: '{short}' is too short") as refused:
        load(environ={}, overrides={key: short})
    assert refused.value.next == f"use {least} or more"
    load(environ={}, overrides={key: least})


def test_the_look_at_silent_jobs_can_be_turned_off() -> None:
    assert load(environ={}, overrides={"job.hang_after": "off"})[1].job.hang_after == "off"


@pytest.mark.parametrize(
    ("key", "wrong", "form"),
    [
        ("cluster.spot", "frist", 'true, false or "first"'),
        ("capacity.placement_group", "yes", "true or false"),
        ("cluster.nodes", "two", "a whole number"),
        ("cluster.disk_gb", "big", "a whole number"),
        ("cluster.budget_usd", "little", "a number"),
        ("network.address", "hidden", '"public" or "private"'),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_with_what_the_key_takes(
    key: str, wrong: str, form: str
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: invalid value '{wrong}'") as refused:
        load(environ={}, overrides={key: wrong})
    assert refused.value.next == form


def test_each_key_accepts_an_invalid_value_or_raises_config_error() -> None:
    for key in KEYS:
        with contextlib.suppress(ConfigError):
            load(environ={}, overrides={key: "\0"})


def test_each_setting_names_its_source(tmp_path: Path) -> None:
    file = write_settings(tmp_path, "[cluster]\nnodes = 3\ndisk_gb = 300\n[job]\nscript = 'a.py'\n")
    environ = {"AWSDDP_CLUSTER_DISK_GB": "400", "AWSDDP_JOB_GRACE": "5s"}
    cluster, job = load(file=file, environ=environ, overrides={"cluster.spot": True, "tags.team": "vision"})
    recorded = {"cluster.disk_gb": 500, "access.user": "me", "tags.team": "x", "tags.cost": "y"}
    cluster = with_cluster_settings(cluster, {})
    values = {key: (value, source) for key, value, source in list_settings(cluster, job)}
    assert values["cluster.nodes"] == (3, str(file))
    cluster = with_cluster_settings(cluster, recorded | {"cluster.nodes": 9})
    values = {key: (value, source) for key, value, source in list_settings(cluster, job)}
    assert values["cluster.nodes"] == (9, "cluster")
    assert values["cluster.disk_gb"] == (400, "AWSDDP_CLUSTER_DISK_GB")
    assert values["cluster.spot"] == (True, "option")
    assert values["cluster.idle"] == ("60m", "default")
    assert values["access.user"] == ("me", "cluster")
    assert (values["tags.team"], values["tags.cost"]) == (("vision", "option"), ("y", "cluster"))
    assert (values["job.script"], values["job.grace"]) == (("a.py", str(file)), ("5s", "AWSDDP_JOB_GRACE"))
    assert "cluster.gpus" not in values


def test_awsddp_toml_changes_only_limits_and_consent_of_a_cluster(tmp_path: Path) -> None:
    text = """
    [cluster]
    nodes = 4
    gpus = "A100:8"
    expires = "48h"
    max_price_usd = 3.5
    [network]
    jump = "bastion"
    [local]
    gpus = "off"
    [capacity]
    experimental = true
    [tags]
    team = "vision"
    """
    cluster, _ = load(file=write_settings(tmp_path, text), environ={"AWSDDP_CLUSTER_IDLE": "30m"})
    recorded = {"cluster.nodes": 1, "cluster.instance_type": "g6.xlarge", "cluster.max_price_usd": 9.0}
    configured = with_cluster_settings(cluster, recorded)
    default, _ = load(environ={}, overrides=recorded | {"cluster.idle": "30m", "cluster.max_price_usd": 3.5})
    assert configured == replace(default, capacity=replace(default.capacity, experimental=True))
    assert configured.explicit == default.explicit | {"capacity.experimental"}
    assert with_cluster_settings(configured, recorded) == configured


@pytest.mark.parametrize(
    ("key", "typed"),
    [
        ("cluster.replace", "-o 'cluster.replace=[\"i-1\"]'"),
        ("capacity.retry_until_up", "-o capacity.retry_until_up=true"),
        ("job.resume", "--resume last"),
        ("job.after", "--after all"),
        ("job.on", "--on 0"),
    ],
)
def test_a_setting_of_a_single_command_is_refused_in_the_file(tmp_path: Path, key: str, typed: str) -> None:
    section, _, name = key.partition(".")
    text = typed.partition("=")[2].strip("'") or typed.split()[1]
    value = text if text in ("true", '["i-1"]') else f'"{text}"'
    with pytest.raises(ConfigError, match=rf"\[{section}\] {name} holds for one command") as refused:
        load(file=write_settings(tmp_path, f"[{section}]\n{name} = {value}\n"), environ={})
    assert refused.value.next.startswith(f"awsddp ... {typed}   #")
    variable = f"AWSDDP_{section}_{name}".upper()
    with pytest.raises(ConfigError, match=f"{variable} holds for one command"):
        load(environ={variable: text})


def test_instance_types_and_markets_keep_their_order(tmp_path: Path) -> None:
    text = '[cluster]\ninstance_type = "p4d.24xlarge, g5.48xlarge"\nspot = "first"\n'
    cluster = load(file=write_settings(tmp_path, text), environ={})[0].cluster
    assert cluster.types == ("p4d.24xlarge", "g5.48xlarge")
    assert cluster.markets == ("spot", "on-demand")
    typed = load(environ={"AWSDDP_CLUSTER_SPOT": "true"})[0].cluster
    assert (typed.types, typed.markets) == ((), ("spot",))
    with pytest.raises(ConfigError, match="AWSDDP_CLUSTER_SPOT: invalid value 'last'"):
        load(environ={"AWSDDP_CLUSTER_SPOT": "last"})


def test_a_typed_instance_type_overrides_the_cluster_and_the_file(tmp_path: Path) -> None:
    file = write_settings(tmp_path, '[cluster]\ninstance_type = "g5.xlarge"\n')
    cluster, _ = load(file=file, environ={}, overrides={"cluster.gpus": "L4:1"})
    configured = with_cluster_settings(cluster, {"cluster.nodes": 1, "cluster.instance_type": "g6.xlarge"})
    assert (configured.cluster.instance_type, configured.cluster.gpus) == (None, "L4:1")


def test_arguments_of_a_job_give_the_same_job_and_no_secret() -> None:
    overrides = {
        "job.timeout": "1h",
        "job.world_size": 4,
        "job.outputs": ["a b", "c"],
        "job.module": True,
        "env.file": "requirements.txt",
        "env.index_url": "https://user:secret@index",
        "env.variables.TOKEN": "secret",
    }
    _, job = load(environ={}, overrides=overrides)
    arguments = job_arguments(job)
    assert "secret" not in " ".join(arguments)
    assert arguments[-2:] == ("--env-var", "TOKEN")
    parsed = dict(argument.split("=", 1) for argument in arguments[1:-2:2])
    _, same = load(environ={}, overrides=parsed)
    assert same.job == job.job
    assert same.env.file == "requirements.txt"
    _, last = load(environ={}, overrides={**parse_job_arguments(arguments), "env.variables.TOKEN": "secret"})
    assert (last.job, last.env.variables) == (job.job, {"TOKEN": "secret"})
