from rankless.errors import ConfigError


def check(options, request):
    if options.get("clocks", 0) < 1 or request.elastic is not None:
        raise ConfigError(expected="--clocks from 1 up", found=options, fix="give --clocks 1")
