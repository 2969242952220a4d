"""The archive: a process beside a storage server that serves blocks of sealed segments."""
