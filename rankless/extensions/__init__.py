"""The extensions that come with Rankless: the APIs and command lines of other systems.

Each folder has an `extension.toml`, which declares what the extension adds (see `rankless.config.extensions`). The core
imports no extension: it loads one by name when a script or a command uses it.
"""
