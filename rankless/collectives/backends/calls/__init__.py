"""From the arguments of torch's methods to calls that are ready to run.

Enters: tensors and options as torch passes them. Leaves: a `PreparedCall`, or a `CallError` that says what does not
fit. `process_group` calls the functions.
"""
