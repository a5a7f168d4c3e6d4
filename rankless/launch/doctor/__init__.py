"""What would make a job hang or fail, found before it starts: each finding a row, with what was seen and the fix.

Enters: the hosts of a job. Leaves: rows. `rankless doctor` calls `examination`, and each job on several hosts calls
`quick`; a program of its own (`on_host`) looks at each host, this one too, and is asked through its standard input.
"""
