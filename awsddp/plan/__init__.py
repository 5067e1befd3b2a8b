"""What is wanted as plain data: the plan of a launch and of its changes, the environment, the projects."""
