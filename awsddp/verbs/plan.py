"""plan: what `up` would do. Reads AWS, changes nothing."""

from awsddp.plan import LaunchPlan, make_plan
from awsddp.verbs.context import Context, target_for


def plan(ctx: Context) -> LaunchPlan:
    """Return the plan that `up` would carry out now.

    Raises ConfigError where the spec cannot be meant, CloudError where AWS does not answer or allow it.
    """
    from awsddp.aws.facts import gather
    from awsddp.aws.session import Aws

    with target_for(ctx) as target:
        facts = gather(Aws(target), ctx.spec, caller_address=target.caller_address, target=target.name)
        return make_plan(ctx.spec, facts)
