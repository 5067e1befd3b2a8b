"""`awsddp doctor`: what stands in the way, before it costs anything."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("doctor", cls=Verb)
@click.option("--iam-policy", is_flag=True, help="Print the least IAM policy for what is configured.")
def command(options: Globals, *, iam_policy: bool) -> int:
    """Check credentials, permissions, quota, offer and fit before a launch. Changes nothing."""
    from awsddp.cli.plan_page import checks_page
    from awsddp.verbs.doctor import doctor, iam_policy_of

    with session.opened(options) as (ctx, show):
        if iam_policy:
            screen.document(iam_policy_of(ctx))
            return 0
        found = doctor(ctx)
        show.pause()
        screen.document(found) if options.json else checks_page(found["checks"])
        return 4 if any(check["ok"] is False for check in found["checks"]) else 0
