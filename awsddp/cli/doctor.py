"""`awsddp doctor`: what stands in the way, before it costs anything."""

import click

from awsddp.cli import screen, session
from awsddp.cli.options import Globals, Verb


@click.command("doctor", cls=Verb)
@click.option("--iam-policy", is_flag=True, help="Print the least IAM policy for what is configured.")
@click.option("--request-quota", is_flag=True, help="Ask AWS for the quota that is missing.")
def command(options: Globals, *, iam_policy: bool, request_quota: bool) -> int:
    """Check credentials, permissions, quota, offer and fit before a launch. Changes nothing."""
    from awsddp.cli.plan_page import checks_page, quota_page
    from awsddp.cli.questions import quota_question
    from awsddp.verbs import doctor as verb

    with session.opened(options) as (ctx, show):
        if iam_policy:
            screen.document(verb.iam_policy_of(ctx))
            return 0
        if request_quota:
            asked = verb.request_quota(ctx, confirm=quota_question(options, show))
            show.pause()
            screen.document(asked) if options.json else quota_page(asked)
            return 0
        found = verb.doctor(ctx)
        show.pause()
        screen.document(found) if options.json else checks_page(found["checks"])
        return 4 if any(check["ok"] is False for check in found["checks"]) else 0
