"""The package of `horovod.runner.http.http_server`."""
