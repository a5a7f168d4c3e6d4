"""Each mutant that is drawn is Python, and another program than the one before."""

import ast

import pytest
from support import mutants


@pytest.mark.exhaustive
def test_a_draw_has_the_same_number_of_each_package_and_is_the_same_again():
    drawn = mutants.choose(None)
    assert [mutant.package for mutant in drawn] == [
        each for each in mutants.PACKAGES for _ in range(mutants.PER_PACKAGE)
    ]
    assert mutants.choose(None) == drawn
    for mutant in drawn:
        source = (mutants.ROOT / mutant.file).read_text()
        changed = source[: mutant.start] + mutant.changed + source[mutant.start + len(mutant.text) :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant
