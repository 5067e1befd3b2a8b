"""`awsddp doctor`: checks of a cluster or before a launch, and where a job hangs."""

import json

import click

from awsddp.cli import session
from awsddp.cli.completion import jobs
from awsddp.cli.options import Globals, Verb
from awsddp.cli.plan_page import quota_page


@click.command("doctor", cls=Verb)
@click.option("--iam-policy", is_flag=True, help="Print the least IAM policy for this configuration.")
@click.option("--request-quota", is_flag=True, help="Request the missing quota from AWS.")
@click.option(
    "--why",
    "job",
    shell_complete=jobs,
    metavar="JOB",
    help="Show where each rank of a running job is, and who lags.",
)
def command(options: Globals, *, iam_policy: bool, request_quota: bool, job: str | None) -> int:
    """Check the nodes of a cluster: GPUs, disks, clocks, ports between all pairs, a process group, bandwidth.

    Without a cluster: credentials, permissions, quota, offers and compatibility, before a launch. With --why
    it asks the nodes of a job where its ranks are; the job runs on. Changes nothing.
    """
    from awsddp.cli.doctor_page import checks_page, health_page, why_page
    from awsddp.verbs import doctor as verb
    from awsddp.verbs import health

    with session.opened(options) as (ctx, show):
        if job is not None:
            from awsddp.verbs.why import why

            show.result(why(ctx, job), why_page)
            return 0
        if iam_policy:
            from awsddp.plan.policy import least_policy

            print(json.dumps(least_policy(ctx.spec), indent=2))  # AWS's format: no schema of ours
            return 0
        if request_quota:
            confirm = show.question("", "nothing was requested")
            show.result(verb.request_quota(ctx, confirm=confirm), quota_page)
            return 0
        report, page, code = health.doctor(ctx), health_page, 6
        if report is None:
            report, page, code = verb.doctor(ctx), checks_page, 4
        show.result(report, page)
        return code if any(check["ok"] is False for check in report["checks"]) else 0
