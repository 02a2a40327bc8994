"""What the host and its workers agree on. Of the modules that workers consist of, the host imports no other."""

MAX_MESSAGE = 1 << 16
"""Bytes of one message on the socket between them; what is large is passed as an open file."""
INTERPRETED_NAME = "main.py"
"""The Python program, among the files of its directory."""
ARTIFACT = "artifact"
"""The file that a compiler leaves."""
WORK_PREFIX = "cookbook-sandbox-"
"""Of the directories that programs have where there are no namespaces; the process id of the worker follows."""
