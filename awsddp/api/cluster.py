"""Cluster: the object that the command line, scripts and notebooks share."""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from awsddp.cluster.reconcile import Confirm
from awsddp.errors import UsageError
from awsddp.plan.records import LaunchPlan
from awsddp.session.locate import target_of
from awsddp.util.format import counted, money

if TYPE_CHECKING:
    from awsddp.session.context import Cluster


@dataclass(frozen=True)
class Plan:
    """What `up` would do. `launch` has every detail; a notebook shows a table."""

    launch: LaunchPlan
    cluster: "Cluster"

    @property
    def price_usd_per_hour(self) -> float | None:
        """The list price of all nodes together; None where it is unknown."""
        return self.launch.price_usd_per_hour

    def rows(self) -> list[tuple[str, str]]:
        """Return the plan as a table of two columns."""
        one = self.launch
        return [
            ("cluster", f"{one.cluster}, {one.target}, {one.region}"),
            ("nodes", f"{one.nodes} x {one.instance_type}, {counted(one.kind.gpus, 'GPU')} each"),
            ("image", one.image.name),
            ("price per hour", money(one.price_usd_per_hour)),
            *(("step", str(step)) for step in one.steps),
            *(("warning", text) for text in one.warnings),
        ]

    def __repr__(self) -> str:
        return f"Plan({', '.join(f'{key} {text}' for key, text in self.rows()[:4])})"

    def _repr_html_(self) -> str:
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(text)}</td></tr>" for key, text in self.rows()
        )
        return f"<table>{cells}</table>"


def consent(cluster: "Cluster", agreed: Plan | None) -> Confirm:
    """Return what `up` calls before it launches or ends machines. It raises UsageError without consent."""
    limit = cluster.spec.cluster.max_price_usd if agreed is None else agreed.price_usd_per_hour
    is_local = target_of(cluster, cluster.folder.read()).name == "local"

    def confirm(change: LaunchPlan | str) -> None:
        price = None if isinstance(change, str) else change.price_usd_per_hour
        if is_local or (agreed is not None and price == limit):
            return
        if limit is None:
            raise UsageError(
                "up needs consent to a price",
                f"it would cost {money(price)} per hour",
                "pass max_price_usd=..., or a plan: cluster.up(cluster.plan(...))",
            )
        if price is not None and price > limit:
            raise UsageError(
                f"the price is now {money(price)} per hour, over {money(limit)}", "", "make a new plan"
            )

    return confirm
