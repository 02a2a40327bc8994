"""Constants shared by the host and its workers. The host imports no other module that runs in workers."""

MAX_MESSAGE = 1 << 16
"""Bytes of one message on the socket between them; larger data are passed as open files."""
INTERPRETED_NAME = "main.py"
"""The file name of the Python program in its directory."""
ARTIFACT = "artifact"
"""The file that a compiler writes."""
WORK_PREFIX = "cookbook-sandbox-"
"""Prefix of program directories without namespaces; the process id of the worker follows."""
