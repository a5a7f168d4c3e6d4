"""What Horovod keeps under this name for all frameworks: exceptions, process sets, elastic training, utilities."""
