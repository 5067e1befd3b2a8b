"""The file that `awsddp init` writes."""

from pathlib import Path

import pytest

from awsddp.errors import ConfigError
from awsddp.settings.loader import load
from awsddp.settings.starter import write_starter


def test_the_starter_file_sets_what_was_chosen_and_nothing_else(tmp_path: Path) -> None:
    chosen = {
        "cluster.region": "eu-west-1",
        "cluster.nodes": 4,
        "cluster.budget_usd": 7.5,
        "env.file": "r.txt",
    }
    spec, job = load(file=write_starter(tmp_path, chosen), environ={})
    assert spec.explicit == {"cluster.region", "cluster.nodes", "cluster.budget_usd"}
    assert (spec.cluster.region, spec.cluster.nodes, spec.cluster.budget_usd) == ("eu-west-1", 4, 7.5)
    assert (job.env.file, job.job.script) == ("r.txt", None)
    with pytest.raises(ConfigError, match="already exists"):
        write_starter(tmp_path)
