"""The folder that workers put first on PYTHONPATH, so that every Python that they start runs its `sitecustomize`.

Enters: nothing. Leaves: `runtime.hooks.import_aliases` in that interpreter, once a script needs it. Python
calls it.
"""
