"""The core names no extension. What an extension adds comes through its declaration."""

import re

from architecture.sources import python_files, short

NAMES = re.compile(r"\b(rankless\.extensions\.\w+|hvd|fleetrun)\b|horovod|torchrun", re.IGNORECASE)
NAMED = {
    "rankless/api.py": "tells users which launchers are recognized",
    "rankless/config/cluster_variables.py": "a time limit of torchrun's",
    "rankless/config/environment.py": "the variables of torch.distributed, which torchrun sets first",
    "rankless/config/process_configs.py": "likewise",
    "rankless/collectives/distributed_sampler.py": "likewise",
    "rankless/runtime/process_context.py": "likewise",
    "rankless/runtime/rendezvous/find_rendezvous.py": "likewise; advises users of mpirun",
    "rankless/runtime/redirect_output.py": "compares with torchrun",
    "rankless/runtime/hooks/torch_settings.py": "compares with torchrun",
    "rankless/runtime/worker.py": "names the option of each command that starts plain processes",
    "rankless/launch/recovery/membership.py": "elastic jobs are Horovod's so far",
    "rankless/launch/watchdog/phase_timeouts.py": "a table for users",
    "rankless/parameter_server.py": "the public path of the extension `servers`",
    "rankless/verify/causes.py": "names the call that mends a script",
}
"""Files of the core that name an extension, with the reason."""


def test_the_core_names_extensions_only_where_a_reason_is_listed():
    core = [file for file in python_files("rankless") if not short(file).startswith("rankless/extensions/")]
    assert {short(file) for file in core if NAMES.search(file.read_text())} == set(NAMED)


SERVERS = re.compile(
    r"parameter_server|[Pp]arameter server|ServersConfig|RequestedServers|ServerConfig|server_hosts|--server"
)
PUBLIC = {
    "__init__": "the public names of the package",
    "compiler/ir/row_lookups": "the error for an id outside an embedding names the table that takes any id",
    "errors": "an example of an error",
    "ownership/states_of_survivors": "the error for sparse gradients of a lost worker names tables",
    "parameter_server": "the public path of the extension `servers`",
}
"""Files of the core that name parameter servers, with the reason."""


def test_the_core_names_parameter_servers_only_at_their_public_path():
    core = [file for file in python_files("rankless") if not short(file).startswith("rankless/extensions/")]
    found = {
        short(file).removeprefix("rankless/").removesuffix(".py") for file in core if SERVERS.search(file.read_text())
    }
    assert found == set(PUBLIC)
