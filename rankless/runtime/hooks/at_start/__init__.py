"""A folder that workers put first on PYTHONPATH, so that every Python that they start finds `sitecustomize` in it.

Enters: nothing. Leaves: `runtime.hooks.import_aliases` in that interpreter, once it is needed. Python itself calls it.
"""
