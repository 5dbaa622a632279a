"""The commands, a module each, with a function of its name that takes the parsed options.

They raise `UsageError` for a wrong command and `MinillmError` for work that fails; `minillm/cli.py` makes sentences and exit
statuses of both. It imports a command when that is asked for, and `parser` alone before: `minillm --help` answers at once.
"""
