"""The run of a script that knows no ranks, in the logical view.

Every rank runs the whole script. `install_view` installs what makes that one training: `loaders` lets a `DataLoader`
yield logical batches, and `hide_ranks` hides the other ranks. `install_effects` lets what the script does to files,
processes and the terminal happen once, and lets it draw equal numbers: see Note [effects] in `effects_on_first_rank`.
"""
