"""What is asked before money is spent or results are lost."""

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from awsddp.cli.options import Globals
from awsddp.cli.plan_page import plan_page
from awsddp.cli.screen import Screen, confirm
from awsddp.errors import Interrupted, NodeError, UsageError
from awsddp.report import money
from awsddp.spec import ClusterSpec

if TYPE_CHECKING:
    from awsddp.plan import LaunchPlan


_PRICED = frozenset(
    {
        "cluster.instance_type",
        "cluster.gpus",
        "cluster.max_price_usd",
        "cluster.budget_usd",
        "capacity.types",
        "capacity.reservation",
    }
)
"""Keys that choose what is paid for, or limit it."""


def launch_question(
    options: Globals, show: Screen, spec: ClusterSpec
) -> Callable[["LaunchPlan | str"], None]:
    """Return the question that `up` asks: the plan and whether to launch it, or the steps of a change.

    -y answers it, but chooses no price: the answer is a UsageError where nobody named a type or a limit.
    """

    def ask(plan: "LaunchPlan | str") -> None:
        show.pause()
        if options.yes and not isinstance(plan, str) and not plan.steps and not spec.given & _PRICED:
            _refuse_any_price(plan)
        if isinstance(plan, str):
            if not confirm(f"{plan}Do this?", options):
                raise Interrupted("nothing was changed", "the answer was no")
            return
        if not options.quiet:
            plan_page(plan, stderr=True)
        if not confirm("Do this?" if plan.steps else "Launch this?", options):
            raise Interrupted("nothing was launched", "the answer was no")

    return ask


def _refuse_any_price(plan: "LaunchPlan") -> None:
    if plan.target == "local":
        return
    price = money(plan.price_usd_per_hour)
    raise UsageError(
        f"-y does not choose a price: {plan.nodes} x {plan.instance_type} cost {price} per hour",
        "neither an instance type, GPUs, nor a limit was given",
        f"--instance-type {plan.instance_type}   # if that is what you want\n"
        "--budget USD   # or a limit until they expire",
    )


def down_question(options: Globals, show: Screen) -> Callable[[str], None]:
    """Return the question that `down` asks, given what it is about to end."""

    def ask(what: str) -> None:
        show.pause()
        if not confirm(f"{what}\nEnd it?", options):
            raise Interrupted("nothing was ended", "the answer was no")

    return ask


def loss_question(options: Globals, show: Screen) -> Callable[[NodeError], bool]:
    """Return the question that `down` asks where results cannot come home. Only a person may lose them."""

    def ask(error: NodeError) -> bool:
        show.pause()
        if options.yes or not sys.stdin.isatty():
            return False
        return confirm(f"{error.message}: {error.why}\nEnd the nodes, and lose what they hold?", options)

    return ask


def on_the_way(options: Globals, show: Screen) -> Callable[[str], bool]:
    """Return what answers a question that comes up on the way: -y, a terminal, or else nobody, which is no.

    A question that comes up again has the same answer.
    """

    @functools.cache
    def ask(question: str) -> bool:
        show.pause()
        return options.yes or (sys.stdin.isatty() and confirm(question, options))

    return ask


def stop_question(options: Globals, show: Screen) -> Callable[[str], None]:
    """Return the question that `stop` asks, given what it is about to stop."""

    def ask(what: str) -> None:
        show.pause()
        if not confirm(f"{what}\nStop it?", options):
            raise Interrupted("nothing was stopped", "the answer was no")

    return ask


def sync_question(options: Globals, show: Screen) -> Callable[[str], None]:
    """Return the question that `sync` asks where a job runs."""

    def ask(what: str) -> None:
        show.pause()
        if not confirm(f"{what}\nSend the files all the same?", options):
            raise Interrupted("nothing was sent", "the answer was no")

    return ask


def quota_question(options: Globals, show: Screen) -> Callable[[str], None]:
    """Return the question that is asked before AWS is asked for a larger quota."""

    def ask(what: str) -> None:
        show.pause()
        if not confirm(what, options):
            raise Interrupted("nothing was asked for", "the answer was no")

    return ask
