"""Recording a run inside its workers: results of jobs, parameters, and every value of one call.

Job calls and training steps enter, through the protocols in `context.observers`; files of typed records leave.
"""
