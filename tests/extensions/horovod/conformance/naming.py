"""Names of operations: how ranks recognize them, which collide, and how timelines show them."""

import json
import os
import re
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import horovod.torch as hvd
import torch
from raised import raised
from torch import nn

from rankless.collectives.backends.shared_group import NO_MEMORY
from rankless.extensions.horovod.engine import backends


class Trace:
    """What rank 0 writes within; nothing on other ranks."""

    def __enter__(self) -> "Trace":
        anew(HOROVOD_TIMELINE="DYNAMIC")
        self._folder = TemporaryDirectory()
        self._path = Path(self._folder.name) / "timeline.json"
        hvd.start_timeline(str(self._path), mark_cycles=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            return  # the job ends
        hvd.barrier()
        hvd.stop_timeline()
        self.events = json.loads(self._path.read_text())[:-1] if hvd.rank() == 0 else []
        self._folder.cleanup()
        self._keys = {one["pid"]: one["args"]["name"] for one in self.events if one["ph"] == "M"}
        anew()

    @property
    def keys(self) -> set[str]:
        """Of the operations, by which ranks recognise them."""
        return set(self._keys.values())

    def activities(self, key: str) -> list[str]:
        """What was done to an operation, in the order of beginnings."""
        return [one["name"] for one in self.events if one["ph"] == "B" and self._keys[one["pid"]] == key]

    def assert_whole(self) -> None:
        """What has begun has ended, in each lane the last first."""
        for pid in self._keys:
            for thread_id in (0, 1):
                phases = [one["ph"] for one in self.events if one["pid"] == pid and one.get("tid") == thread_id]
                steps = [{"B": 1, "E": -1}.get(phase, 0) for phase in phases]
                assert all(sum(steps[:count]) >= 0 for count in range(len(steps))), (self._keys[pid], phases)
                assert sum(steps) == 0, (self._keys[pid], phases)


def anew(**variables: str) -> None:
    hvd.barrier()
    hvd.shutdown()
    os.environ.update(variables)
    hvd.init()
    for name in variables:
        del os.environ[name]


def check_a_group_and_an_operation_of_a_members_name():
    """A group `x` and a single allreduce `x_1of2` may be in flight at once."""
    if hvd.rank() != 0:
        hvd.barrier()  # both of rank 0's are in flight
    group = hvd.grouped_allreduce_async([torch.ones(3), torch.ones(40_000)], name="x", op=hvd.Sum)
    single = hvd.allreduce_async(torch.full((5,), 2.0), name="x_1of2", op=hvd.Sum)
    if hvd.rank() == 0:
        hvd.barrier()
    assert hvd.synchronize(single).tolist() == [2.0 * hvd.size()] * 5
    assert [found.unique().tolist() for found in hvd.synchronize(group)] == [[hvd.size()], [hvd.size()]]


def check_the_keys_of_operations():
    """`<op>.<name>`, `<op>.noname.<count>`, `<grouped_op>.<name>_<i>of<n>`."""
    size = hvd.size()
    rows = torch.ones(size, 2)
    with Trace() as trace:
        hvd.allreduce(rows, name="plain")
        hvd.allgather(rows, name="plain")
        hvd.broadcast(rows, 0, name="plain")
        hvd.alltoall(rows, name="plain")
        hvd.reducescatter(rows, name="plain")
        hvd.grouped_allreduce([rows, rows], name="group")
        hvd.grouped_allgather([rows, rows], name="group")
        hvd.grouped_reducescatter([rows, rows], name="group")
        hvd.allreduce(rows)
        hvd.grouped_allreduce([rows])
    if hvd.rank() == 0:
        kinds = ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter")
        grouped = ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter")
        expected = {f"{kind}.plain" for kind in kinds} | {f"{kind}.group_{n}of2" for kind in grouped for n in (1, 2)}
        assert expected <= trace.keys, trace.keys
        unnamed = {key for key in trace.keys if ".noname." in key}
        assert {key.partition(".")[0] for key in unnamed} == {"allreduce", "grouped_allreduce"}, unnamed
        assert any(key.endswith("_1of1") for key in unnamed), unnamed


def check_the_keys_of_gradients_and_states():
    """Parameters left without names are `allreduce.noname.<group>.<index>`; states are `<key>.<n>`; sparse ones are
    gathered as `<name>.indices` and `<name>.values`.
    """
    made = nn.Linear(3, 2)
    with Trace() as trace:
        plain = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
        for parameters in (None, list(made.named_parameters())):
            groups = None if parameters is None else [list(made.parameters())]
            optimizer = hvd.DistributedOptimizer(plain, parameters, groups=groups)
            optimizer.zero_grad()
            made(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            del optimizer
        hvd.broadcast_optimizer_state(plain, root_rank=0)
        hvd.broadcast_parameters(made.state_dict(), root_rank=0)
        part = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (2,), check_invariants=False)
        hvd.sparse_allreduce_async(part, name="table", op=hvd.Sum)()
    if hvd.rank() == 0:
        expected = {
            *("allreduce.allreduce.noname.0.0", "allreduce.allreduce.noname.0.1"),
            *("grouped_allreduce.weight_1of2", "grouped_allreduce.weight_2of2"),
            *("broadcast.momentum_buffer.1", "broadcast.momentum_buffer.2", "broadcast.weight", "broadcast.bias"),
            *("allgather.table.indices", "allgather.table.values"),
        }
        assert expected <= trace.keys, trace.keys


def check_unnamed_operations_in_different_orders():
    """Do not fit together: the same kind raises at once, another kind once all ranks wait."""
    counts = (3, 4) if hvd.rank() == 0 else (4, 3)
    handles = [hvd.allreduce_async(torch.ones(count)) for count in counts]
    for handle, (one, other) in zip(handles, ((3, 4), (4, 3)), strict=True):
        text = raised(hvd.HorovodInternalError, lambda handle=handle: hvd.synchronize(handle))
        assert text.startswith(
            f"Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [{one}], "
            f"but another rank sent a tensor of shape [{other}]. Operation allreduce.noname."
        ), text
    calls = [lambda: hvd.allreduce_async(torch.ones(3)), lambda: hvd.broadcast_async(torch.ones(3), 0)]
    waiting = [call() for call in (calls if hvd.rank() == 0 else calls[::-1])]
    hvd.barrier()  # all have handed them in
    assert not any(hvd.poll(handle) for handle in waiting)
    text = raised(hvd.HorovodInternalError, lambda: hvd.synchronize(waiting[0]))
    assert "rank 0 waits in allreduce.noname." in text, text
    # On a busy machine a rank may come to wait after the others have waited long enough.
    assert re.search(r"ranks? [\d, ]+ waits? in broadcast\.noname\.", text), text
    anew()


IN_USE = (
    "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is currently "
    "being processed.  If you want to request another tensor, use a different tensor name."
)


def check_what_holds_while_an_operation_is_outstanding():
    """A name is in use, and poll() is False, until a cycle has passed or synchronize() returns; for every size. Batches
    are a cycle apart.
    """
    anew(HOROVOD_CYCLE_TIME="500")
    start = time.monotonic()
    sizes = {"small": 3, "large": 40_000}
    handles = {name: hvd.allreduce_async(torch.ones(count), name=name) for name, count in sizes.items()}
    for name, handle in handles.items():
        assert not hvd.poll(handle), name
        text = raised(ValueError, lambda name=name: hvd.allreduce_async(torch.ones(sizes[name]), name=name))
        assert text == IN_USE
    for name, handle in handles.items():
        assert len(hvd.synchronize(handle)) == sizes[name]
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum, name="small").tolist() == [hvd.size()] * 3
    assert time.monotonic() - start >= 0.5
    handle = hvd.allreduce_async(torch.ones(3), name="small")
    while not hvd.poll(handle):
        time.sleep(0.01)
    assert time.monotonic() - start >= 1.5
    again = hvd.allreduce_async(torch.ones(3), name="small")
    assert [hvd.synchronize(one).tolist() for one in (again, handle)] == [[1.0] * 3] * 2
    anew()


def check_a_name_that_is_in_use_on_one_rank_only():
    """The others get an error in the same operation, and the ranks go on together."""
    is_last = hvd.rank() == hvd.size() - 1
    anew(**({"HOROVOD_CYCLE_TIME": "60000"} if is_last else {}))
    for count in (3, 40_000):
        name, given = f"in.use.{count}", torch.ones(count)
        first = hvd.allreduce_async(given, op=hvd.Sum, name=name)
        if is_last:
            assert raised(ValueError, lambda name=name, given=given: hvd.allreduce_async(given, name=name)) == IN_USE
        assert hvd.synchronize(first)[0].item() == hvd.size()
        if not is_last:
            second = hvd.allreduce_async(given, op=hvd.Sum, name=name)
            text = raised(hvd.HorovodInternalError, lambda second=second: hvd.synchronize(second))
            assert text == f"allreduce.{name} was refused by rank {hvd.size() - 1}: {IN_USE}"
        assert hvd.allreduce(given, op=hvd.Sum, name=name)[0].item() == hvd.size()
    anew()


def check_a_timeline_only_by_leave():
    """start_timeline() needs HOROVOD_TIMELINE=DYNAMIC."""
    expected = "Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage."
    assert raised(ValueError, lambda: hvd.start_timeline("/nowhere")) == expected


def check_a_timeline_is_a_chrome_trace():
    """Rank 0 writes what became of each operation: NEGOTIATE_<OP>, <OP>, QUEUE, what was done, CYCLE_START."""
    with Trace() as trace:
        for _ in range(5):
            hvd.allreduce(torch.ones(100_000), name="traced")
        hvd.allgather(torch.ones(3), name="traced")
    if hvd.rank() == 0:
        trace.assert_whole()
        first = ["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "QUEUE", "INIT_FUSION_BUFFER", "SHARED_MEMORY_ALLREDUCE"]
        later = [name for name in first if name != "INIT_FUSION_BUFFER"]
        found = trace.activities("allreduce.traced")
        assert sorted(found) == sorted(first + 4 * later), found
        expected = ["NEGOTIATE_ALLGATHER", "ALLGATHER", "QUEUE", "SHARED_MEMORY_ALLGATHER"]
        assert trace.activities("allgather.traced") == expected, trace.activities("allgather.traced")
        assert any(one.get("name") == "CYCLE_START" for one in trace.events)
        marks = [one for one in trace.events if one["ph"] == "X"]
        ranks = {one["name"] for one in marks}
        assert ranks == {str(rank) for rank in range(hvd.size())}, ranks


def use_gloo():
    """Make the world's next operations as on ranks that share no memory."""
    with mock.patch.object(backends, "open_shared_group", return_value=NO_MEMORY):
        hvd.allreduce(torch.ones(50_000))


def check_a_timeline_of_a_fused_group():
    """WAIT_FOR_OTHER_TENSOR_DATA while others of a group are missing; INIT_FUSION_BUFFER where a buffer is made or
    grown; MEMCPY_IN_FUSION_BUFFER, GLOO_ALLREDUCE, MEMCPY_OUT_FUSION_BUFFER.
    """
    with Trace() as trace:
        use_gloo()
        for name, count in (("one", 30_000), ("two", 30_000), ("three", 40_000)):
            given = [torch.full((count,), float(number)) for number in range(3)]
            found = hvd.grouped_allreduce(given, name=name, op=hvd.Sum)
            assert [one.unique().item() for one in found] == [0.0, hvd.size(), 2.0 * hvd.size()]
    if hvd.rank() == 0:
        trace.assert_whole()
        executed = [
            *("ALLREDUCE", "QUEUE", "INIT_FUSION_BUFFER"),
            *("MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"),
        ]
        for name in ("one", "two", "three"):
            for number in (1, 2, 3):
                found = trace.activities(f"grouped_allreduce.{name}_{number}of3")
                waits = ["WAIT_FOR_OTHER_TENSOR_DATA"] if number < 3 else []
                makes = [one for one in executed if name != "two" or one != "INIT_FUSION_BUFFER"]
                assert found == ["NEGOTIATE_ALLREDUCE", *waits, *makes], (name, number, found)


def check_a_timeline_from_the_beginning():
    """HOROVOD_TIMELINE=FILE writes from init to shutdown."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.json"
        anew(HOROVOD_TIMELINE=str(path), HOROVOD_TIMELINE_MARK_CYCLES="1")
        hvd.allreduce(torch.ones(2), name="from.the.beginning")
        anew()
        assert path.exists() == (hvd.rank() == 0)
        if hvd.rank() == 0:
            events = json.loads(path.read_text())
            assert {"name": "allreduce.from.the.beginning"} in [one.get("args") for one in events]
            assert any(one.get("name") == "CYCLE_START" for one in events)
