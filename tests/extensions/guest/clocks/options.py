from rankless.errors import ConfigError


def check(options, request):
    if options.get("clocks", 1) < 1 or request.elastic is not None:
        raise ConfigError(expected="--clocks from 1 up", found=options["clocks"], fix="give --clocks 1")
