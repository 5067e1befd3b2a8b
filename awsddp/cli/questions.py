"""The questions that need more than a sentence: the launch of a plan, the loss of results."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from awsddp.cli.plan_page import plan_page
from awsddp.cli.screen import Screen
from awsddp.errors import NodeError, UsageError
from awsddp.report import money
from awsddp.spec import ClusterSpec

if TYPE_CHECKING:
    from awsddp.plan.records import LaunchPlan


_PRICED = frozenset(
    {
        "cluster.instance_type",
        "cluster.gpus",
        "cluster.max_price_usd",
        "cluster.budget_usd",
        "capacity.reservation",
    }
)
"""Keys that choose what is paid for, or limit it."""


def launch_question(show: Screen, spec: ClusterSpec) -> Callable[["LaunchPlan | str"], None]:
    """Return the question of `up`, called with a plan or with the text of a change.

    -y answers it, but chooses no price: UsageError where neither a type nor a limit was given.
    """

    def ask(plan: "LaunchPlan | str") -> None:
        if isinstance(plan, str):
            show.question("", "nothing was changed")(f"{plan}Do this?")
            return
        is_chosen = plan.target == "local" or plan.steps or spec.explicit & _PRICED
        if show.options.yes and not is_chosen:
            _refuse_any_price(plan)
        show.pause()
        if not show.options.quiet and not (show.options.json and show.options.yes):
            plan_page(plan, stderr=True)
        show.question("Do this?" if plan.steps else "Launch this?", "nothing was launched")("")

    return ask


def _refuse_any_price(plan: "LaunchPlan") -> None:
    price = money(plan.price_usd_per_hour)
    raise UsageError(
        f"-y does not choose a price: {plan.nodes} x {plan.instance_type} cost {price} per hour",
        "neither an instance type, GPUs, nor a limit was given",
        f"--instance-type {plan.instance_type}   # if that is what you want\n"
        "--budget USD   # or a limit until they expire",
    )


def loss_question(show: Screen) -> Callable[[NodeError], bool]:
    """Return the question of `down` where results cannot be fetched. Only a person may lose them."""

    def ask(error: NodeError) -> bool:
        show.pause()
        if show.options.yes or not sys.stdin.isatty():
            return False
        return show.confirm(f"{error.message}: {error.why}\nTerminate the nodes and lose these results?")

    return ask
