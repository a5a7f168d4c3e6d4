"""Small parts of Horovod's launcher: hosts and slots, keys, codecs, time limits, commands in a shell.

Enters: the calls of tools that plan or start jobs themselves. Leaves: plain values. No other part of Rankless uses it.
"""
