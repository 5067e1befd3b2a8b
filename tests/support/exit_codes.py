"""The exit code of each error."""

CODES = {
    "JobError": 1,
    "UsageError": 2,
    "ConfigError": 3,
    "NoRegion": 3,
    "InUse": 3,
    "LocalCloudError": 3,
    "CloudError": 4,
    "CapacityError": 5,
    "NodeError": 6,
    "NotFoundError": 7,
    "LeftoverError": 8,
    "Interrupted": 130,
}
