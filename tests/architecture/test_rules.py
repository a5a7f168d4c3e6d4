"""The rules that STYLE and CONTRIBUTING state, tested as they are stated. Exceptions are listed with their reasons."""

import ast
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from architecture.sources import PACKAGE, ROOT, nodes_of, parsed, python_files, short

MOST_MODULES = 24
"""In one folder, beside its `__init__.py`."""
CROWDED_FOLDERS: dict[str, str] = {}

# Modules imported late on purpose, by a call of importlib.import_module.
IMPORTED_LATE = {
    "rankless/__init__.py": "the command line imports rankless, and must not import torch",
    "rankless/api.py": "the logical view begins when the script imports torch, which it may do later",
    "rankless/cli/__init__.py": "a command is imported when it is called",
    "rankless/cli/shared_run_options.py": "few command lines name a plan",
    "rankless/cli/run.py": "most runs start once",
    "rankless/cli/checkpoint.py": "an export needs torch, and the help of the command line must not",
    "rankless/config/rank_awareness.py": "metadata of packages takes 40 ms, and most scripts import torch themselves",
    "rankless/config/environment.py": "reads the variables of foreign launchers only if they exist",
    "rankless/extensions/servers/training/shared_tables.py": "only shared tables need numba and zmq",
    "rankless/launch/agent.py": "few runs are elastic, and few have processes beside workers",
    "rankless/launch/prepare_run.py": "most runs have one host",
    "rankless/launch/supervisor/supervisor.py": "only a run in which something fails needs to know why",
    "rankless/launch/start_and_end_report.py": "likewise",
    "rankless/launch/watchdog/__init__.py": "only a run that stalls or fails needs stacks and reports",
    "rankless/extensions/horovodrun/profile.py": "the HTTP server costs 20 ms, and most jobs need none",
    "rankless/parameter_server.py": "what it shows is used without torch too, in servers and in the help of commands",
    "rankless/runtime/process_context.py": "few runs record steps in the logical view",
    "rankless/runtime/fork_server.py": "preloads what the workers will import",
    "rankless/runtime/hooks/at_start/sitecustomize.py": "runs in every Python below a worker, and must cost nothing",
    "rankless/runtime/hooks/import_aliases.py": "imports the module behind an alias when a script asks",
    "rankless/runtime/hooks/init_process_group.py": "only a script that makes a process group needs what makes one",
    "rankless/runtime/preload_option.py": "imports the modules that the user names",
    "rankless/extensions/horovodrun/launched_worker.py": "reads variables without torch, which a rendezvous needs",
    "rankless/config/extensions.py": "modules of extensions, and what finds other packages, are for few runs",
    "rankless/runtime/worker.py": "a worker imports torch and numpy when the script does",
    "rankless/terminal/lazy_progress_display.py": "rich is imported at the first progress record",
}

# Where `except Exception` or `except BaseException` stands.
BROAD_EXCEPTS = {
    "rankless/checkpoint/saving.py": "the next call, or the other ranks, learn of the error, and it is raised again",
    "rankless/collectives/backends/message_transfers.py": "the other ranks learn of it, and it is raised again",
    "rankless/collectives/backends/operation_queue.py": "the caller that waits gets the error; the others learn of it",
    "rankless/collectives/checked_collective_queue.py": "the error belongs to the caller that waits for the collective",
    "rankless/extensions/horovod/data/data_loader_base.py": "the loop raises the error of the thread that reads",
    "rankless/extensions/horovod/runner/util/threads.py": "Horovod's in_thread prints the error of any function",
    "rankless/extensions/horovod/runner/run_task.py": "the error travels to the process that called horovod.run",
    "rankless/compiler/local_program.py": "operators are foreign code; the error gets the line of the script",
    "rankless/compiler/pipeline_parallel/stages.py": "operators are foreign code; one that fails is estimated",
    "rankless/compiler/probing/operator_probe.py": "operators are foreign code; one that fails is not compared",
    "rankless/compiler/probing/row_independence.py": "operators are foreign code; one that fails is not split",
    "rankless/context/all_or_nothing_operations.py": "the other ranks raise it, too",
    "rankless/runtime/fork_replacement.py": "a copy of a worker that cannot begin must not run the script",
    "rankless/context/exception_serialization.py": "a class of the script may raise anything where it is made again",
    "rankless/context/once_for_all_ranks.py": "the other ranks learn that rank 0 failed, and the error is raised again",
    "rankless/data/batch_source.py": "data sets and streams are foreign code; the others learn of the error",
    "rankless/data/probed_collation.py": "a collate_fn is foreign code; its error gets an explanation",
    "rankless/data/collation_probe.py": "a collate_fn is foreign code; if it raises, ranks read whole batches",
    "rankless/data/prefetching.py": "the error is raised after the batches that were read before it",
    "rankless/data/sample_reader.py": "a data set is foreign code; its error gets the index of the sample",
    "rankless/data/batches_from_first_rank.py": "a data set is foreign code; the others raise, too",
    "rankless/jobs/views/view_choice_and_recovery.py": "operators are foreign code; all ranks raise what it becomes",
    "rankless/logical_view/call_plan.py": "PyTorch raises many errors in a trace; the call runs on whole values",
    "rankless/logical_view/plan_cache.py": "PyTorch raises many errors for symbols; the other ranks learn of it",
    "rankless/jobs/call_agreement.py": "the number of the call is taken back, and the error is raised again",
    "rankless/compiler/capture/tensors_kept_between_calls.py": "the script's state is restored, the error raised again",
    "rankless/jobs/job.py": "the script's own error gets a traceback without Rankless's frames",
    "rankless/extensions/servers/training/job_tables.py": "operators are foreign code; the call raises the error",
    "rankless/jobs/programs/program_cache.py": "capture with symbolic sizes may fail in the script's code",
    "rankless/launch/rendezvous/follower.py": "the connection is closed, and the error is raised again",
    "rankless/launch/spawn_function.py": "the workers are ended, and the error is raised again",
    "rankless/extensions/servers/service/table_requests.py": "a step that fails half-way is refused to all workers",
    "rankless/plain_script/effects_on_first_rank.py": "the other ranks raise it too, and it is raised again",
    "rankless/runtime/worker_recovery.py": "it is raised again unless the agent says that a worker is lost",
    "rankless/runtime/preload_option.py": "a preloaded module is foreign code; the workers import it themselves",
    "rankless/runtime/spawned_function.py": "the function's error travels to the process that called spawn",
    "rankless/runtime/worker.py": "every end of a script is reported, and the error is raised again",
}

# Files beside config/environment.py that mention the process's environment.
ENVIRONMENT_READERS = {
    "rankless/extensions/servers/config.py": "the configuration of server processes, which no worker has",
    "rankless/cli/__init__.py": "looks for a completing shell's variable before it imports anything",
    "rankless/extensions/horovod/common/util.py": "changes the environment for the caller, as Horovod's own does",
    "rankless/compiler/guards/guard_discovery.py": "recognizes os.environ among the objects that a job reads",
    "rankless/compiler/guards/python_tracer.py": "recognizes reads of os.environ in the code of a job",
}

# Where msgspec's encoders are used directly, beside parameter servers, which know tables by names that must come back
# as they were. They raise for text that UTF-8 does not have (rankless.records.encoding).
DIRECT_ENCODERS = {
    "rankless/records/encoding.py": "is the one place",
    "rankless/checkpoint/content.py": "a name in a checkpoint must come back as it was, so saving refuses others",
    "rankless/checkpoint/safetensors_export.py": "likewise",
    "rankless/checkpoint/folder_commit.py": "likewise",
    "rankless/checkpoint/manifest.py": "likewise",
    "rankless/checkpoint/tensor_file_writer.py": "likewise",
    "rankless/collectives/value_encoding.py": "values of the script arrive as they were: such text is packed as bytes",
    "rankless/extensions/horovod/engine/messages.py": "names of tensors come back in answers",
    "rankless/context/optimizer_fingerprint.py": "its encoder is given to encode_msgpack",
    "rankless/extensions/servers/training/served_weights.py": "encodes digests",
    "rankless/runtime/rendezvous/file.py": "encodes addresses",
    "rankless/extensions/horovod/launched_rendezvous.py": "likewise",
    "rankless/runtime/rendezvous/join_at_tcp_address.py": "likewise",
}

# Class names that exist more than once.
SAME_CLASS_NAMES = {
    "FixedHosts": "Horovod's, beside that of elastic jobs",
    "DistributedSampler": "is torch's name, in rankless.collectives and in hvd",
}

OLD_WORDS = {
    *("assembled", "assembly", "bedside", "company", "crew", "crews", "culprit", "culprits", "deltas", "desk", "desks"),
    *("examination", "handing", "invitation", "jury", "lifeline", "lockstep", "lookout", "negotiated", "negotiator"),
    *("pace", "planes", "preloaded", "relaunching", "riding", "sabotage", "sabotages", "said", "seating", "solitude"),
    *("standstill", "ticket", "tickets", "told", "trap", "traps", "victim", "visits", "vitals", "whereabouts"),
}
"""Words of the private vocabulary that the code once spoke (decision 0018)."""


def modules() -> dict[str, Path]:
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in python_files("rankless")
    }


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    for node in nodes_of(file):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("rankless"):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def sibling_graph(package: str, edges: dict[str, set[str]]) -> dict[str, set[str]]:
    """Which direct members of a package import which others of them."""
    graph: dict[str, set[str]] = defaultdict(set)
    prefix = f"{package}."
    for source, targets in edges.items():
        if source.startswith(prefix):
            member = source.removeprefix(prefix).partition(".")[0]
            graph[member] |= {
                target.removeprefix(prefix).partition(".")[0] for target in targets if target.startswith(prefix)
            }
            graph[member].discard(member)
    return graph


def cycle_in(graph: dict[str, set[str]]) -> list[str]:
    """One cycle of a graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return path[path.index(node) :]
        if node in done:
            return []
        for follower in sorted(graph.get(node, ())):
            if found := visit(follower, [*path, node]):
                return found
        done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := visit(node, []))), [])


def test_no_import_cycle_at_any_level():
    known = modules()
    edges = {name: set(imports(file, known)) for name, file in known.items()}
    packages = {name for name, file in known.items() if file.name == "__init__.py"}
    cycles = {package: cycle for package in sorted(packages) if (cycle := cycle_in(sibling_graph(package, edges)))}
    assert not cycles


def test_the_search_for_cycles_finds_one():
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_folder_has_more_modules_than_a_reader_can_survey():
    counts = {
        short(folder.parent): len(list(folder.parent.glob("*.py"))) - 1 for folder in PACKAGE.rglob("__init__.py")
    }
    assert {folder for folder, count in counts.items() if count > MOST_MODULES} == set(CROWDED_FOLDERS)


def test_modules_are_imported_late_only_where_a_reason_is_listed():
    late = {
        short(file)
        for file in python_files("rankless")
        for node in nodes_of(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__")
    }
    assert late == set(IMPORTED_LATE)


def test_broad_excepts_stand_only_where_a_reason_is_listed():
    broad = {
        short(file)
        for file in python_files("rankless")
        for node in nodes_of(file)
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) in ("Exception", "BaseException"))
    }
    assert broad == set(BROAD_EXCEPTS)


def test_the_environment_is_read_and_written_in_one_file():
    readers = {
        short(file)
        for file in python_files("rankless")
        for node in nodes_of(file)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv")
    }
    assert readers == {"rankless/config/environment.py", *ENVIRONMENT_READERS}


def test_text_of_any_kind_is_encoded_in_one_file():
    encoders = {
        short(file)
        for file in python_files("rankless")
        if not file.is_relative_to(ROOT / "rankless" / "extensions" / "servers" / "service")
        and not file.is_relative_to(ROOT / "rankless" / "extensions" / "servers" / "tables")
        for node in nodes_of(file)
        if isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith(("msgspec.json.", "msgspec.msgpack."))
        and node.attr in ("encode", "Encoder", "encode_into")
    }
    assert encoders == set(DIRECT_ENCODERS)


def test_a_class_name_exists_once():
    places: dict[str, list[str]] = defaultdict(list)
    for file in python_files("rankless"):
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(short(file))
    assert {name for name, files in places.items() if len(files) > 1} == set(SAME_CLASS_NAMES)


def words_of(identifier: str) -> list[str]:
    """The words of an identifier, as "warm_parent" or "WarmParent"."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def is_of_old_words(identifier: str) -> bool:
    return not OLD_WORDS.isdisjoint(words_of(identifier))


def test_no_name_is_made_of_the_old_private_words():
    found = set()
    for file in python_files("rankless", "tests", "bench"):
        names = {*file.relative_to(ROOT).with_suffix("").parts}
        if any(map(is_of_old_words, set(re.findall(r"[^\W\d]\w*", file.read_text())))):  # perhaps in a text
            with tokenize.open(file) as source:
                tokens = tokenize.generate_tokens(source.readline)
                names |= {token.string for token in tokens if token.type == tokenize.NAME}
        found |= {f"{short(file)}: {name}" for name in names if is_of_old_words(name)}
    assert not found


def test_no_reference_leads_out_of_the_repository():
    for file in python_files("rankless", "tests", "examples", "bench"):
        if file != Path(__file__):
            assert not re.search(r"DESIGN\.md|HOUSE\.md|\bfacts/", file.read_text()), short(file)
