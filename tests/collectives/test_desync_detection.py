"""Ranks that diverge are detected by the rank that arrives later, without a message."""

from dataclasses import replace

import pytest
from support.processes import on_mesh

from rankless.collectives.byte_messages import barrier
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
