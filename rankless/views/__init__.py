"""What a script sees: jobs, and loaders of logical tensors.

Enters: the user's functions, modules and data sets, and a `World` handed down by the runtime. Leaves: results of
whole batches. Called by `rankless.script`, the facade.
"""
