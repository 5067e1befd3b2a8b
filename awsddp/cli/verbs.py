"""The verbs of the command line. A verb is one entry here and one file in cli/, verbs/ and tests/."""

VERBS = {
    "init": "Write a starter awsddp.toml.",
    "plan": "Show what `up` would do and cost. Changes nothing.",
    "up": "Launch and prepare the nodes. Idempotent: finishes, repairs, resizes.",
    "status": "Show nodes, addresses, jobs, price, cost and time left.",
    "sync": "Send the working folder to every node.",
    "train": "Sync, launch the ranks, stream their logs, fetch the results.",
    "jobs": "List all jobs and what they and their clusters cost.",
    "logs": "Show a job's logs; -f follows the job to its end and fetches its results.",
    "cancel": "End a job; it gets time to save a checkpoint.",
    "fetch": "Fetch a job's results.",
    "exec": "Run a command on all nodes.",
    "ssh": "Open a shell on a node.",
    "doctor": "Check what a launch needs; --why JOB shows where a running job hangs.",
    "report": "Write a page about a job: its state, loss, ranks, cost.",
    "stop": "Stop the instances, keep their disks; `up` starts them again.",
    "down": "Terminate everything, wait until it is gone, and show the cost.",
    "run": "up, train and down in one: nothing is left, whatever happens.",
    "local": "The local cloud: a rehearsal without an AWS account.",
}
"""Each verb's line on `awsddp --help`."""
