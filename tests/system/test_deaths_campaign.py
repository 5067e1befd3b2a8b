"""Deaths of ranks, drawn from the campaign (benchmarks/campaigns/deaths.py), under both launchers."""

from typing import TYPE_CHECKING

import pytest

from awsddp.agent_client.launchers import LAUNCHERS
from benchmarks.campaigns import deaths
from tests.support.seed import draw_cases

if TYPE_CHECKING:
    from tests.support.fleet import Fleet

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]


def test_campaign_has_at_least_forty_kinds() -> None:
    assert len(set(deaths.KINDS)) >= 40


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kind", draw_cases(deaths.KINDS, 2, label="deaths"), ids=str)
def test_rank_that_dies_is_the_cause_and_no_process_remains(
    fleet: "Fleet", launcher: str, kind: tuple[tuple[str, int], str]
) -> None:
    victim = deaths.KINDS.index(kind) % 4
    fleet.launch(deaths.SCRIPT, launcher=launcher, args=deaths.words(kind, victim))
    fleet.wait(seconds=200)
    row = deaths.judged(kind, victim, fleet.document(0))
    assert row["right"], row
    assert fleet.processes() == []
