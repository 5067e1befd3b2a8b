"""Jobs: where each rank runs, what a node is told, what its supervisor does there, and what it says.

Nothing here opens a connection: the builders return commands and bytes, the parsers take bytes, and
`supervisor` is the program that runs on the node.
"""
