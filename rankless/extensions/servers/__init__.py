"""Parameter servers, and tables of rows by ids: embeddings that grow with the data. `rankless.parameter_server` is the
public path.

`embedding` looks up rows. `ftrl` is an optimizer. `tables` holds and steps rows, without PyTorch. Between the two,
`table_training` connects a table with autograd and with the script's optimizers. `service` holds tables for the workers
of a run, also without PyTorch. `launch` starts the servers and decides about those that die.
"""
