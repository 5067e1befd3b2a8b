"""Check before a launch that the nodes can save results to S3."""

from awsddp.compat.types import REGION_USD_PER_GB
from awsddp.errors import ConfigError
from awsddp.plan.records import Facts
from awsddp.settings.spec import ClusterSpec
from awsddp.settings.values import parse_s3_uri


def bucket_not_found(bucket: str, region: str, why: str = "") -> ConfigError:
    """Return the error for a bucket that does not exist."""
    remedy = f"aws s3 mb s3://{bucket} --region {region}   # or another --save-to"
    return ConfigError(f"there is no bucket {bucket}", why, remedy)


def bucket_in_other_region(bucket: str, bucket_region: str, region: str) -> ConfigError:
    """Return the error for a bucket that is not in the nodes' region."""
    return ConfigError(
        f"bucket {bucket} is in {bucket_region}, the nodes are in {region}",
        f"transfer between regions is slow and costs about ${REGION_USD_PER_GB:.2f} per GB within the US, "
        "more elsewhere",
        f"--save-to s3://BUCKET/PREFIX   # a bucket in {region}; or awsddp --region {bucket_region} up",
    )


def check_saving(spec: ClusterSpec, facts: Facts) -> list[str]:
    """Return warnings about permissions that saving results needs and that the nodes' role may lack.

    Raises ConfigError if no node could save.
    """
    saving, profile = facts.saving, spec.access.instance_profile
    if saving is None:
        return []
    if not profile:
        raise ConfigError(
            f"nodes without a role cannot save to {saving.uri}",
            "job.save_to needs access.instance_profile, because no AWS keys are sent to the nodes",
            "-o access.instance_profile=NAME   # docs/saving.md shows how to make one",
        )
    name, (bucket, _) = profile.rpartition("/")[2], parse_s3_uri(saving.uri)
    if facts.role == "":
        raise ConfigError(
            f"access.instance_profile: {profile} has no role",
            f"nodes without a role cannot save to {saving.uri}",
            f"aws iam add-role-to-instance-profile --instance-profile-name {name} --role-name ROLE",
        )
    if saving.region == "":
        raise bucket_not_found(bucket, facts.region, f"job.save_to is {saving.uri}")
    if saving.region not in (None, facts.region):
        raise bucket_in_other_region(bucket, str(saving.region), facts.region)
    if not saving.lacks:
        return []
    return [
        f"the role of {name} has no permission {', '.join(saving.lacks)} in {saving.uri}, unless a policy of "
        "the bucket allows it: awsddp doctor --iam-policy nodes prints the policy that the role needs"
    ]
