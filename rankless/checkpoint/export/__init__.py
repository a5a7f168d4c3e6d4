"""A checkpoint's models as plain safetensors files, for programs that know no Rankless.

Input: a checkpoint's folder. `exported_tensors` says which tensors it gives and where their elements are,
`safetensors_files` writes them in parts. `rankless.cli.checkpoint` calls it.
"""
