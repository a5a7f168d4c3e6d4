"""Rows by ids, of which a save writes those that have changed since the checkpoint before.

`row_files` finds them in the states of objects, writes them, links what the checkpoint before has,
and reads them. Note [layers of rows] in `manifest` has the form of the files.
"""
