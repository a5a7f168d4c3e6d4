"""Ranks that diverge are detected by the rank that arrives later, without a message."""

import time
from dataclasses import replace

import pytest
from support.processes import on_mesh

from rankless.collectives.byte_messages import all_gather_bytes, barrier
from rankless.collectives.desync_detection import SLOTS, DesyncDetector
from rankless.errors import RanksDiverged

UNLIKE = (1, 3)
SAME = [("call 1 of job 'train'", (1, 2))] * 3


def check_sync_points(mesh, steps):
    """Reach the sync points `steps[rank]` in turn; return the text of an error, and the notices."""
    messages: list[str] = []
    detector = DesyncDetector(mesh, notify=messages.append)
    with_detector = replace(mesh, desync_detector=detector)
    with_detector.check_sync_point("the start")
    outcome = ""
    for text, digests in steps[mesh.rank]:
        try:
            if text == "end":
                detector.end()
            else:
                remark = f"the step is {mesh.rank}" if digests == UNLIKE else ""
                with_detector.check_sync_point(text, names=lambda: ["images", "labels"], digests=digests, remark=remark)
        except RanksDiverged as error:
            outcome = str(error)
            break
    barrier(mesh)
    return outcome, messages


def outcomes(steps):
    return [outcome for outcome, _ in on_mesh(len(steps), check_sync_points, steps)]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_make_the_same_calls_raise_nothing(size):
    steps = [[(f"call {number} of job 'train'", (number, 7)) for number in range(3 * SLOTS)] + [("end", ())]] * size
    assert on_mesh(size, check_sync_points, steps) == [("", [])] * size


@pytest.mark.parametrize("size", [2, 3])
def test_the_error_names_a_different_call_with_ranks_and_line(size):
    last = [*SAME, ("call 1 of job 'evaluate'", (1, 2))]
    first = [*SAME, ("call 4 of job 'train'", (1, 2))]
    found = [text for text in outcomes([*([first] * (size - 1)), last]) if text]
    assert found
    assert all("call 1 of job 'evaluate'" in text and "call 4 of job 'train'" in text for text in found)
    assert all(f"rank {size - 1} reached" in text and "test_desync_detection.py:" in text for text in found)


def test_the_error_names_the_argument_and_the_rank_with_other_values():
    found = [text for text in outcomes([SAME, SAME, [*SAME[:-1], (SAME[0][0], UNLIKE)]]) if text]
    assert found
    assert all("labels on rank" in text for text in found)
    assert all("; on rank 2 the step is 2" in text for text in found)
    assert not any("images" in text for text in found)


def test_the_error_names_a_rank_whose_script_ended():
    found = [text for text in outcomes([SAME, [*SAME[:2], ("end", ())]]) if text]
    assert found
    assert all("the end of the script" in text for text in found)


def test_a_rank_that_is_far_ahead_is_not_compared_with_overwritten_slots():
    ahead = [(f"call {number}", ()) for number in range(SLOTS + 5)]
    behind = [(f"call {number}", ()) for number in range(3)]
    assert outcomes([ahead, behind]) == ["", ""]


def test_long_texts_and_many_digests_fit():
    steps = [[("x" * 5000, tuple(range(2**63, 2**63 + 100)))] * 2] * 2
    assert outcomes(steps) == ["", ""]


def test_a_difference_at_the_end_of_a_long_text_is_found():
    steps = [[("x" * 5000 + end, ())] for end in "ab"]
    assert any(outcomes(steps))


def without_memory(mesh):
    messages: list[str] = []
    detector = DesyncDetector(mesh, notify=messages.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.mkstemp", full)
        for number in range(3):
            detector.check_sync_point(f"call {number} on rank {mesh.rank}")
    barrier(mesh)
    return messages


def full(**_: object):
    raise OSError(28, "No space left on device")


def test_without_shared_memory_nothing_is_compared_and_the_user_is_notified():
    messages = on_mesh(2, without_memory)
    assert [len(texts) for texts in messages] == [1, 1]
    assert "cannot check" in messages[0][0]


def between_hosts(mesh, hosts, steps, reachable):
    """Reach the sync points `steps[rank]` as if each rank were on `hosts[rank]`, in step, until all have raised."""
    messages: list[str] = []
    detector = DesyncDetector(mesh, notify=messages.append)
    made, outcome = 0, ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rankless.collectives.desync_detection.host_identity", lambda: hosts[mesh.rank])
        if not reachable:
            patch.setattr("rankless.collectives.sync_point_connections._own_address", lambda: "256.0.0.0")
            patch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
            patch.setattr("rankless.collectives.sync_point_connections.ACCEPT_SECONDS", 0.2)
        detector.check_sync_point("the start")
    for text, digests in steps[mesh.rank]:
        try:
            if outcome:
                pass
            elif text == "end":
                detector.end()
            else:
                detector.check_sync_point(text, names=lambda: ["images", "labels"], digests=digests)
                made += 1
        except RanksDiverged as error:
            outcome = str(error)
        all_outcomes = all_gather_bytes(outcome.encode(), mesh=mesh)
        if all(all_outcomes):
            break
        if any(all_outcomes):
            time.sleep(SECONDS_FOR_MESSAGES)
    return outcome, made, messages


SECONDS_FOR_MESSAGES = 0.02
CALLS = [(f"call {number} of job 'train'", (number, 7)) for number in range(6)]
HOSTS = ["a", "a", "b", "b"]


def test_hosts_that_make_the_same_calls_raise_nothing():
    calls = [(f"call {number} of job 'train'", (number, 7)) for number in range(3 * SLOTS)] + [("end", ())]
    assert on_mesh(3, between_hosts, ["a", "b", "c"], [calls] * 3, True) == [("", 3 * SLOTS, [])] * 3


@pytest.mark.parametrize(
    ("other", "sign"),
    [
        ((CALLS[2][0], (2, 8)), "labels on ranks 2, 3: other values than on ranks 0, 1"),
        (("call 1 of job 'evaluate'", (2, 7)), "ranks 2, 3 reached call 1 of job 'evaluate'"),
    ],
)
def test_ranks_of_all_hosts_raise_the_same_error_at_a_call_after_a_difference(other, sign):
    rest = [(f"call {number} of job 'train'", (number, 7)) for number in range(3, 1000)]
    steps = [[*CALLS[:3], *rest]] * 2 + [[*CALLS[:2], other, *rest]] * 2
    found = on_mesh(4, between_hosts, HOSTS, steps, True)
    assert all(sign in outcome for outcome, _, _ in found), found
    assert len({outcome for outcome, _, _ in found}) == 1
    assert all(2 <= made < 1000 for _, made, _ in found), found


def test_a_difference_at_the_end_of_the_script_is_found():
    steps = [[*CALLS, ("end", ())], [*CALLS[:-1], (CALLS[-1][0], (5, 8)), ("end", ())]]
    assert "labels on rank 1" in on_mesh(2, between_hosts, ["a", "b"], steps, True)[0][0]


def test_ranks_of_one_host_are_compared_although_another_is_there():
    steps = [CALLS, [*CALLS[:3], ("call 1 of job 'evaluate'", ()), *CALLS[4:]], CALLS]
    found = on_mesh(3, between_hosts, ["a", "a", "b"], steps, True)
    assert any("call 1 of job 'evaluate'" in outcome for outcome, _, _ in found)


def test_hosts_that_cannot_connect_are_not_compared_and_the_user_is_notified():
    found = on_mesh(2, between_hosts, ["a", "b"], [CALLS, CALLS[:4] + [("other", ())] * 2], False)
    assert [(outcome, made, len(messages)) for outcome, made, messages in found] == [("", 6, 1)] * 2
    assert "cannot check that the ranks of different hosts make the same calls" in found[0][2][0]


def check_many_values(mesh, differing):
    values = [100 * (mesh.rank == 1) if number == differing else number for number in range(80)]
    compared = replace(mesh, desync_detector=DesyncDetector(mesh, notify=print))
    compared.check_sync_point("the start")
    barrier(mesh)
    try:
        compared.check_sync_point("call", names=lambda: [f"value {n}" for n in range(80)], digests=values)
    except RanksDiverged as error:
        return str(error)
    finally:
        barrier(mesh)
    return ""


@pytest.mark.parametrize(
    ("differing", "named"),
    [
        (0, "value 0 on"),
        (30, "value 30 on"),
        (31, "one of the 49 values from value 31 to value 79 on"),
        (79, "one of the 49 values from value 31 to value 79 on"),
    ],
)
def test_the_last_of_many_values_is_compared_as_the_first(differing, named):
    errors = on_mesh(2, check_many_values, differing)
    assert any(errors)
    assert all(named in text for text in errors if text)
