"""Check, before a job starts, for anything that would make it hang or fail on its hosts.

The input is a `DoctorConfig`, the output a list of `CheckResult`, each with what the check saw and the fix. `rankless
doctor` calls `run_all_checks.run_diagnosis`. Every job on several hosts calls `single_host_checks.run_preflight`.
`remote_probes` starts one `probe_server` on each host, by ssh or directly on this host, and sends it requests over its
standard input.
"""
