"""`awsddp doctor`: checks before a launch."""

import json

import click

from awsddp.cli import session
from awsddp.cli.options import Globals, Verb
from awsddp.cli.plan_page import checks_page, quota_page


@click.command("doctor", cls=Verb)
@click.option("--iam-policy", is_flag=True, help="Print the least IAM policy for this configuration.")
@click.option("--request-quota", is_flag=True, help="Request the missing quota from AWS.")
def command(options: Globals, *, iam_policy: bool, request_quota: bool) -> int:
    """Check credentials, permissions, quota, offers and compatibility before a launch. Changes nothing."""
    from awsddp.verbs import doctor as verb

    with session.opened(options) as (ctx, show):
        if iam_policy:
            print(json.dumps(verb.iam_policy_of(ctx), indent=2))  # AWS's format: no schema of ours
            return 0
        if request_quota:
            confirm = show.question("", "nothing was requested")
            show.result(verb.request_quota(ctx, confirm=confirm), quota_page)
            return 0
        report = verb.doctor(ctx)
        show.result(report, checks_page)
        return 4 if any(check["ok"] is False for check in report["checks"]) else 0
